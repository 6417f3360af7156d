"""What becomes of a blob of which one byte is wrong."""

from exl2nb import ops


def refused_bytes(blob, x, count):
    """How many of the first `count` bytes are such that a product refuses the blob when they are turned around; none may crash it."""
    refused = 0
    for at in range(count):
        damaged = blob.clone()
        damaged[at] ^= 0xFF
        try:
            ops.linear(x, damaged)
        except RuntimeError:
            refused += 1
    return refused

"""How torch's allocator lays tensors into the memory of a GPU, followed on paper: what it takes from the device is more than the tensors.

Rules of torch's caching allocator: up to 1 MiB a tensor comes out of a segment of 2 MiB; from there to 10 MiB out of one of 20 MiB; above,
it gets a segment of its own, rounded up to 2 MiB. The smallest free block that is large enough is taken, and split where more than 1 MiB
(512 bytes, in small segments) would be left over. What is freed merges with free neighbours and stays with the process.
widgets/src/plan/formula.ts follows the same rules for the cache.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

MIB = 2**20
SMALL, SMALL_SEGMENT, LARGE, LARGE_SEGMENT, ROUND = MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB
GRAIN = 512


class Block:
    """A piece of a segment and its neighbours."""

    __slots__ = ("free", "left", "number", "right", "size", "small")

    def __init__(self, size: int, small: bool, number: int) -> None:
        self.size, self.small, self.number, self.free = size, small, number, True
        self.left: Block | None = None
        self.right: Block | None = None


class Allocator:
    """reserved: bytes taken from the device. allocated: bytes of blocks in use."""

    def __init__(self) -> None:
        self.reserved = self.allocated = self._count = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, size: int) -> Block:
        """Take a block of at least `size` bytes."""
        size = max(GRAIN, -(-size // GRAIN) * GRAIN)
        small = size <= SMALL
        pool = self._free[small]
        at = bisect_left(pool, (size, -1))
        block = pool.pop(at)[2] if at < len(pool) else self._segment(segment_bytes(size), small)
        if block.size - size >= GRAIN if small else block.size - size > SMALL:
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        return block

    def release(self, block: Block) -> None:
        """Give a block back."""
        self.allocated -= block.size
        block.free = True
        for other in (block.left, block.right):
            if other is not None and other.free:
                self._forget(other)
                self._join(block, other)
        insort(self._free[block.small], (block.size, block.number, block))

    def spare(self) -> list[int]:
        """Sizes of the free large blocks, rising."""
        return [size for size, _, _ in self._free[False]]

    def _segment(self, size: int, small: bool) -> Block:
        self.reserved += size
        self._count += 1
        return Block(size, small, self._count)

    def _split(self, block: Block, size: int) -> None:
        self._count += 1
        rest = Block(block.size - size, block.small, self._count)
        rest.left, rest.right, block.size = block, block.right, size
        if rest.right is not None:
            rest.right.left = rest
        block.right = rest
        insort(self._free[block.small], (rest.size, rest.number, rest))

    def _forget(self, block: Block) -> None:
        pool = self._free[block.small]
        pool.pop(bisect_left(pool, (block.size, block.number)))

    @staticmethod
    def _join(block: Block, other: Block) -> None:
        block.size += other.size
        if other is block.left:
            block.left = other.left
            if block.left is not None:
                block.left.right = block
        else:
            block.right = other.right
            if block.right is not None:
                block.right.left = block


def segment_bytes(size: int) -> int:
    """What the allocator takes from the device for a tensor that fits no free block."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE else -(-size // ROUND) * ROUND


def taken(spare: Iterable[int], sizes: Iterable[int]) -> int:
    """Bytes taken from the device anew for tensors of `sizes`, where `spare` large blocks are free.

    Example: two tensors of 6 MiB beside a hole of 7 MiB: the first fits it, the second opens a segment.
        >>> taken([7 * MIB], [6 * MIB, 6 * MIB]) == 20 * MIB
        True
    """
    free, opened, small = sorted(spare), 0, 0
    for wanted in sizes:
        size = -(-wanted // GRAIN) * GRAIN
        if size <= SMALL:
            small += size
            continue
        at = bisect_left(free, size)
        if at < len(free):
            block = free.pop(at)
        else:
            block = segment_bytes(size)
            opened += block
        if block - size > SMALL:
            insort(free, block - size)
    return opened + -(-small // SMALL_SEGMENT) * SMALL_SEGMENT

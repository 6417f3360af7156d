"""The allocator followed on paper: its invariants, and what it does with the sizes that matter."""

import random

from exl2nb.facade.plan_allocator import MIB, Allocator, segment_bytes, taken


def test_segments_and_splits():
    books = Allocator()
    first = books.allocate(3 * MIB)
    assert (books.reserved, books.allocated, books.spare()) == (20 * MIB, 3 * MIB, [17 * MIB])
    second = books.allocate(16 * MIB + MIB // 2)
    assert books.allocated == 20 * MIB, "half a MiB is not worth a block"
    third = books.allocate(11 * MIB)
    assert books.reserved == 32 * MIB, "a segment of its own"
    books.release(first)
    books.release(second)
    assert books.spare() == [20 * MIB], "neighbours merge"
    books.release(third)
    assert (books.reserved, books.allocated) == (32 * MIB, 0), "what is free stays with the process"


def test_small_tensors_share_segments():
    books = Allocator()
    for _ in range(2048):
        books.allocate(1000)
    assert (books.reserved, books.allocated) == (2 * MIB, 2 * MIB)
    assert segment_bytes(1) == 2 * MIB
    assert segment_bytes(10 * MIB) == 10 * MIB
    assert segment_bytes(10 * MIB + 1) == 12 * MIB


def test_random_walk_keeps_the_books():
    """Bytes in use never exceed what was taken, and everything merges back when all is released."""
    rng, books, held = random.Random(0), Allocator(), []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            books.release(held.pop(rng.randrange(len(held))))
        else:
            held.append(books.allocate(rng.choice((100, 5000, 2 * MIB, 9 * MIB, 30 * MIB)) + rng.randrange(1000)))
        assert books.allocated == sum(block.size for block in held)
        assert books.allocated <= books.reserved
    for block in held:
        books.release(block)
    assert books.allocated == 0
    assert sum(size for size, _, _ in (*books._free[True], *books._free[False])) == books.reserved


def test_taken_is_what_the_allocator_takes():
    rng = random.Random(1)
    for _ in range(50):
        books = Allocator()
        kept = [books.allocate(rng.randrange(MIB + 1, 30 * MIB)) for _ in range(20)]
        for block in kept[::2]:
            books.release(block)
        spare, before = books.spare(), books.reserved
        sizes = [rng.choice((2, 3, 7, 15)) * MIB + 512] * rng.randrange(1, 60)
        for size in sizes:
            books.allocate(size)
        assert taken(spare, sizes) == books.reserved - before

"""What packing writes in front of a blob's strips on the GPU (csrc/format/gpu_blob.h): items, warps, pieces, permutations.

Marked gpu: `make test-gpu` on a machine that has one.
"""

import struct
from itertools import pairwise

import pytest
import torch

from exl2nb import ops
from exl2nb.model.gpu_memory import blob_bytes
from exl2nb.model.inspection import StoredMatrix

from .cases import exl2, gptq

pytestmark = pytest.mark.gpu
BLOCK = 32  # rows of half a unit
ENDS, WARPS, SLOT, ITEM_UNITS = 24, 16, 2688, 10  # as in csrc/format/gpu_blob.h
MIXES = {
    "one width": [(4, 128)] * 32,
    "most of a K": [(4, 128)] * 112,
    "groups of 32": [(2, 32)] * 20,
    "three widths": [(6, 128), *[(5, 128)] * 3, *[(4, 32)] * 36, (4, 16 * 32)],
    "lone halves": [(8, 32), *[(6, 32)] * 3, (5, 96), (4, 32), (3, 64), (2, 32)],
    "little": [(3, 32)],
    "by twos": [*[(4, 128)] * 2, *[(3, 128)] * 14],
    "groups of 32, sixteen items": [(4, 32)] * 64,
    "one of 70B": [*[(6, 32)] * 45, *[(3, 64)] * 90, *[(2, 64)] * 335],
}


def parts_of(blob):
    """Header; of every part its fields, items `(offset, block, bits, units, bytes, unit0, one, lone, scales)` and ends; permutations."""
    raw = bytes(blob.cpu().numpy())
    _, _, K, _, count, size, perms, stored, perms_at, image, items, units = struct.unpack_from("<q4iq2i2q2i", raw)
    ends_at, parts = image + 16 * items + (units + 3) // 4 * 16, []
    for p in range(count):
        part = struct.unpack_from("<10i2q4i", raw, 64 + 128 * p)
        first, number = part[4], part[5]
        own = [struct.unpack_from("<IHBBHHBBB", raw, image + 16 * i) for i in range(first, first + number)]
        ends = [end - first for end in struct.unpack_from(f"<{WARPS + 1}H", raw, ends_at + 2 * ENDS * p)]
        parts.append((part, own, ends))
    table = torch.frombuffer(bytearray(raw[perms_at:]), dtype=torch.int32)[: perms * (stored + K)] if perms_at else None
    return size, K, stored, parts, table


def check_items(part, items, ends, widths):
    """All rows once and in order, in items of the sizes that kernels have room for. widths: of every 32 rows."""
    at, end = 0, 0
    for offset, block, bits, units, size, _, one, lone, scales in items:
        assert (offset, block) == (end, at)
        assert 1 <= units <= ITEM_UNITS
        rows = 2 * units - lone
        assert set(widths[at : at + rows]) == {bits}
        assert not (one and (at % 2 or lone)) or scales
        sets = units * (1 if one else 2) // (scales if one else 1) if scales else 0
        assert size == units * bits * 128 + (64 * sets if scales else -(-units * (8 if one else 16) // 16) * 16)
        assert size <= SLOT
        at, end = at + rows, end + size
    assert at == len(widths)
    assert part[10] == end
    assert (ends[0], ends[-1]) == (0, len(items))
    counts = [b - a for a, b in pairwise(ends)]
    assert max(counts) - min(counts) <= 1


def check_pieces(part, items):
    """Pieces of a strip: as few as have one item a warp, about equally many in each; their halves fit. Whether two items are as one."""
    pieces, count, room, pairs = part[12:16]
    assert pieces == -(-len(items) // WARPS)
    assert count <= WARPS
    assert (pieces - 1) * count < len(items) <= pieces * count
    for first in range(0, len(items), count):
        piece = items[first : first + count]
        for half in (piece[: WARPS // 2], piece[WARPS // 2 :]):
            assert sum(item[4] for item in half) <= room
    small = all(units == 2 and one and not scales for _, _, _, units, _, _, one, _, scales in items)
    assert pairs == (len(items) == WARPS and small and all(a[2] == b[2] and b[1] == a[1] + 4 for a, b in zip(items[::2], items[1::2])))


def check_perms(table, perm, K):
    """Stored row -> feature, K where there is none; feature -> stored row."""
    rows = torch.arange(len(perm))[perm < K]
    inverse = torch.empty(K, dtype=torch.int64)
    inverse[perm[rows]] = rows
    assert torch.equal(table, torch.cat([perm, inverse]).int())


def check(blob, groups, perm, outputs, kind="exl2"):
    """One matrix, `groups` of (bits, rows) and stored row -> feature `perm`."""
    size, K, stored, [(part, items, ends)], table = parts_of(blob)
    widths = [bits for bits, rows in groups for _ in range(0, rows, BLOCK)]
    assert size == blob.numel() == blob_bytes([StoredMatrix("", None, "", kind, K, outputs, tuple(groups), 0.0, 0)])
    assert stored == max(K, len(perm))
    check_items(part, items, ends, widths)
    check_pieces(part, items)
    check_perms(table, perm, K)


@pytest.mark.parametrize("name", MIXES)
def test_exl2(name):
    tensors = exl2(sum(rows for _, rows in MIXES[name]), 96, MIXES[name])
    order = torch.empty(len(tensors[4]), dtype=torch.int64)
    order[tensors[4].long()] = torch.arange(len(order))
    blob = ops.pack_exl2(*(t.cuda() for t in tensors))
    check(blob, MIXES[name], order, 96)
    assert parts_of(blob)[3][0][0][15] == (name == "by twos")


@pytest.mark.parametrize(("bits", "size"), [(4, 128), (3, 32), (8, 96), (2, 64)])
def test_gptq(bits, size):
    case = gptq(416, 96, bits, size, act_order=True)
    arguments = [None if t is None else t.cuda() for t in case.arguments]
    blob = ops.pack_gptq(*arguments, bits=bits, in_features=416)
    groups = [(bits, min(size, 416 - row)) for row in range(0, 416, size)]
    check(blob, groups, case.arguments[3].long(), 96, "gptq")


def test_dense_matrices_have_no_permutation():
    size, K, _, [(part, items, ends)], table = parts_of(blob := ops.pack_dense(torch.randn(48, 1000).cuda()))
    assert table is None
    assert size == blob.numel() == blob_bytes([StoredMatrix("", None, "", "float16", K, 48, (), 16.0, 0)])
    assert part[9]
    assert (ends[0], ends[-1], sum(item[3] for item in items)) == (0, len(items), -(-1000 // 64))

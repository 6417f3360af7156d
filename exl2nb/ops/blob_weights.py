"""Weights in and out of blobs, and EXL2 reconstruction. Knows nothing about files or activations."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from exl2nb.ops import blob as layout
from exl2nb.ops import reference
from exl2nb.ops._library import check_argument, define_op, dynamic_size


def _pack_exl2(
    q_weight: Tensor, q_scale: Tensor, q_scale_max: Tensor, q_groups: Tensor, q_invperm: Tensor, prescale: float, out_features: int
) -> Tensor:
    K = len(q_invperm)
    fits = 0 < out_features <= q_weight.shape[1]
    check_argument(fits, "pack_exl2", "out_features", out_features, f"1 to {q_weight.shape[1]} (columns of q_weight)")
    stored, groups = reference.codes(q_weight, q_groups, K)
    tiles = -(-out_features // layout.TILE_ROWS)
    columns = stored[:, : tiles * layout.TILE_ROWS].numpy()
    indices = reference.scale_indices(q_scale)[:, : tiles * layout.TILE_ROWS].numpy().reshape(len(groups), tiles, 8, 2)
    nibbles = (indices[..., 0] | (indices[..., 1] << 4)).transpose(1, 0, 2).reshape(tiles, -1)
    scales = np.zeros((tiles, layout.align_64(len(groups) * layout.SCALE_BYTES)), np.uint8)
    scales[:, : nibbles.shape[1]] = nibbles
    sections, table, offset = [scales], np.zeros(len(groups), layout.GROUP_DTYPE), scales.shape[1]
    for row, (bits, first, rows) in zip(table, groups):
        row["bits"], row["first_row"], row["rows"], row["offset"] = bits, first, rows, offset
        block = columns[first : first + rows].reshape(rows, tiles, layout.TILE_ROWS).transpose(1, 0, 2)
        words = np.stack([layout.pack_units(tile, bits) for tile in block])
        sections.append(words.astype("<u4").view(np.uint8).reshape(tiles, -1))
        offset += sections[-1].shape[1]
    perm = torch.argsort(q_invperm.long()).to(torch.int32).numpy()
    tables = reference.step_tables(q_scale_max, prescale).numpy()
    part = layout.BlobPart(layout.EXL2_PART, out_features, perm, table, tables, np.concatenate(sections, 1))
    return layout.write_blob(K, [part])


def _pack_dense(weight: Tensor) -> Tensor:
    got = f"{weight.dtype} {tuple(weight.shape)}"
    check_argument(weight.dim() == 2 and weight.dtype in layout.DENSE_DTYPES, "pack_dense", "weight", got, "f32, f16 or bf16 (N, K)")
    N, K = weight.shape
    tiles = -(-N // layout.TILE_ROWS)
    padded = torch.zeros(tiles * layout.TILE_ROWS, K, dtype=weight.dtype)
    padded[:N] = weight
    data = padded.view(tiles, layout.TILE_ROWS, K).transpose(1, 2).contiguous().view(tiles, -1).view(torch.uint8).numpy()
    no_groups, no_tables = np.zeros(0, layout.GROUP_DTYPE), np.zeros((0, 16), np.float32)
    return layout.write_blob(K, [layout.BlobPart(layout.DENSE_DTYPES.index(weight.dtype), N, None, no_groups, no_tables, data)])


def _pack_concat(blobs: list[Tensor]) -> Tensor:
    read = [layout.read_blob(b) for b in blobs]
    check_argument(len(read) > 0, "pack_concat", "number of blobs", 0, "at least 1")
    check_argument(len({K for K, _ in read}) == 1, "pack_concat", "K of the parts", [K for K, _ in read], "the same K everywhere")
    return layout.write_blob(read[0][0], [part for _, parts in read for part in parts])


def _unpack(blob: Tensor) -> Tensor:
    K, parts = layout.read_blob(blob)
    return torch.cat([_unpack_dense(K, part) for part in parts], 1)


def _unpack_dense(K: int, part: layout.BlobPart) -> Tensor:
    if part.kind == layout.GPTQ_PART:
        return _gptq_dense(K, part)
    if part.kind != layout.EXL2_PART:
        tiles = torch.from_numpy(part.data.copy()).view(layout.DENSE_DTYPES[part.kind]).view(len(part.data), K, layout.TILE_ROWS)
        return tiles.transpose(0, 1).reshape(K, -1)[:, : part.outputs].float()
    out = torch.empty(K, len(part.data) * layout.TILE_ROWS)
    for g, group in enumerate(part.groups):
        first, rows = int(group["first_row"]), int(group["rows"])
        codes = _unpack_codes(part, group)
        packed = part.data[:, g * 8 : g * 8 + 8]
        steps = part.tables[g][np.stack([packed & 15, packed >> 4], -1).reshape(-1)]
        out[first : first + rows] = torch.from_numpy((codes - 2 ** (int(group["bits"]) - 1)) * steps)
    if part.perm is not None:
        out = torch.empty_like(out).index_copy_(0, torch.from_numpy(part.perm.astype(np.int64)), out)
    return out[:, : part.outputs]


def _unpack_codes(part: layout.BlobPart, group: np.void) -> np.ndarray:
    """The codes of one group: f32 `(rows, columns)`."""
    bits, rows, at = (int(group[name]) for name in ("bits", "rows", "offset"))
    data = np.ascontiguousarray(part.data[:, at : at + rows * bits * 2])
    words = data.view("<u4").reshape(len(part.data), rows // 32, bits, layout.TILE_ROWS)
    return layout.unpack_units(words, bits).transpose(1, 0, 2).reshape(rows, -1).astype(np.float32)


def _gptq_prefix(groups: int, flags: int) -> tuple[int, int, int]:
    """Bytes of the scales and zeros at the start of a GPTQ tile, and of both together with their padding."""
    scales = groups * layout.TILE_ROWS * (4 if flags & layout.HAS_WIDE_SCALES else 2)
    zeros = groups * layout.TILE_ROWS * 2 if flags & layout.HAS_ZEROS else 0
    return scales, zeros, layout.align_64(scales + zeros)


def _gptq_dense(K: int, part: layout.BlobPart) -> Tensor:
    tiles, groups = len(part.data), part.groups
    scale_bytes, zero_bytes, _ = _gptq_prefix(len(groups), part.flags)
    scale_type = "<f4" if part.flags & layout.HAS_WIDE_SCALES else "<f2"

    def columns(start: int, size: int, dtype: str) -> np.ndarray:
        values = np.ascontiguousarray(part.data[:, start : start + size]).view(dtype).reshape(tiles, len(groups), layout.TILE_ROWS)
        return values.transpose(1, 0, 2).reshape(len(groups), -1).astype(np.float32)

    scales = columns(0, scale_bytes, scale_type)
    zeros = columns(scale_bytes, zero_bytes, "<u2") if zero_bytes else None
    blocks = []
    for g, group in enumerate(groups):
        zero = 2 ** (int(group["bits"]) - 1) if zeros is None else zeros[g]
        blocks.append((_unpack_codes(part, group) - zero) * scales[g])
    stored = torch.from_numpy(np.concatenate(blocks))[:, : part.outputs]
    if part.perm is None:
        return stored
    perm = torch.from_numpy(part.perm.astype(np.int64))
    return stored.new_empty(K, part.outputs).index_copy_(0, perm[perm < K], stored[perm < K])


def _pack_gptq(
    qweight: Tensor, scales: Tensor, zeros: Tensor | None, perm: Tensor | None, group_rows: Tensor, bits: int, in_features: int
) -> Tensor:
    check_argument(bits in (2, 3, 4, 8), "pack_gptq", "bits", bits, "2, 3, 4 or 8")
    sizes, N = group_rows.tolist(), qweight.shape[1]
    stored = in_features if perm is None else len(perm)
    check_argument(
        all(n > 0 and n % 32 == 0 for n in sizes) and sum(sizes) == stored, "pack_gptq", "group_rows", sizes, f"units adding to {stored}"
    )
    tiles = -(-N // layout.TILE_ROWS)
    padding = (0, tiles * layout.TILE_ROWS - N)
    table = torch.tensor([bits, 0], dtype=torch.int16)
    codes = torch.nn.functional.pad(reference.codes(qweight, table, in_features)[0], (*padding, 0, 1))  # the last row: padding
    codes = codes[:in_features] if perm is None else codes[perm.long()]
    flags = (0 if zeros is None else layout.HAS_ZEROS) | (layout.HAS_WIDE_SCALES if scales.dtype == torch.float32 else 0)
    used, zero_bytes, prefix = _gptq_prefix(len(sizes), flags)

    def section(values: Tensor) -> np.ndarray:
        wide = torch.nn.functional.pad(values, padding).view(len(sizes), tiles, layout.TILE_ROWS)
        return wide.transpose(0, 1).contiguous().view(torch.uint8).view(tiles, -1).numpy()

    head = np.zeros((tiles, prefix), np.uint8)
    head[:, :used] = section(scales)
    if zeros is not None:
        head[:, used : used + zero_bytes] = section(zeros)
    sections, groups, row, offset = [head], np.zeros(len(sizes), layout.GROUP_DTYPE), 0, prefix
    for entry, rows in zip(groups, sizes):
        entry["bits"], entry["first_row"], entry["rows"], entry["offset"] = bits, row, rows, offset
        block = codes[row : row + rows].view(rows, tiles, layout.TILE_ROWS).transpose(0, 1).numpy()
        sections.append(np.stack([layout.pack_units(tile, bits) for tile in block]).astype("<u4").view(np.uint8).reshape(tiles, -1))
        row, offset = row + rows, offset + rows * bits * 2
    order = None if perm is None else perm.numpy()
    part = layout.BlobPart(layout.GPTQ_PART, N, order, groups, np.zeros((0, 16), np.float32), np.concatenate(sections, 1), flags)
    return layout.write_blob(in_features, [part])


def _blob_fake(*_: object) -> Tensor:
    return torch.empty(dynamic_size(), dtype=torch.uint8)


_pack_exl2_op = define_op(
    "pack_exl2(Tensor q_weight, Tensor q_scale, Tensor q_scale_max, Tensor q_groups, Tensor q_invperm, float prescale, int out_features)"
    " -> Tensor",
    fake=_blob_fake,
    reference=_pack_exl2,
)
_pack_gptq_op = define_op(
    "pack_gptq(Tensor qweight, Tensor scales, Tensor? zeros, Tensor? perm, Tensor group_rows, int bits, int in_features) -> Tensor",
    fake=_blob_fake,
    reference=_pack_gptq,
)
_pack_dense_op = define_op("pack_dense(Tensor weight) -> Tensor", fake=_blob_fake, reference=_pack_dense)
_pack_concat_op = define_op("pack_concat(Tensor[] blobs) -> Tensor", fake=_blob_fake, reference=_pack_concat)
_unpack_op = define_op("unpack(Tensor blob) -> Tensor", fake=lambda blob: torch.empty(dynamic_size(), dynamic_size()), reference=_unpack)
_reconstruct_op = define_op(
    "reconstruct(Tensor q_weight, Tensor q_scale, Tensor q_scale_max, Tensor q_groups, Tensor q_invperm) -> Tensor",
    fake=lambda q_weight, *rest: q_weight.new_empty(len(rest[-1]), q_weight.shape[1], dtype=torch.float16),
    reference=reference.reconstruct,
)


def pack_exl2(
    q_weight: Tensor,
    q_scale: Tensor,
    q_scale_max: Tensor,
    q_groups: Tensor,
    q_invperm: Tensor,
    *,
    prescale: float = 1.0,
    out_features: int | None = None,
) -> Tensor:
    """Repack an EXL2 matrix into the blob that the kernels read.

    Args:
        q_weight: int32 `(R, N)`. q_scale: int32 `(G, N / 8)`. q_scale_max: f16 `(G,)`. q_groups: int16 `(2 * G,)`.
        q_invperm: int32 `(K,)`. All as `quant.exl2` validated them.
        prescale: factor of the whole matrix, rounded into the scales as the format says (logit scale, residual scale).
        out_features: outputs wanted; the columns after them are padding and are dropped. None: N.

    Returns:
        uint8 1-D blob.

    Raises:
        RuntimeError, ValueError: a tensor does not fit; names what was got and expected.
    """
    columns = q_weight.shape[1] if out_features is None else out_features
    return _pack_exl2_op(q_weight, q_scale, q_scale_max, q_groups, q_invperm, prescale, columns)


def pack_gptq(
    qweight: Tensor, scales: Tensor, zeros: Tensor | None, perm: Tensor | None, group_rows: Tensor, *, bits: int, in_features: int
) -> Tensor:
    """Repack a GPTQ matrix into the blob that the kernels read, its rows sorted by group.

    Args:
        qweight: int32 `(K * bits / 32, N)`, codes down the columns in original row order.
        scales: f16 or f32 `(G, N)`. zeros: int16 `(G, N)`, true zero points; None: `2**(bits - 1)` everywhere.
        perm: int32 `(S,)`, the original row of each stored one, K for padding; None: rows in order, S = K.
        group_rows: int32 `(G,)`, stored rows of each group, multiples of 32 that add up to S.
        bits: 2, 3, 4 or 8. in_features: K.

    Returns:
        uint8 1-D blob.

    Raises:
        RuntimeError, ValueError: a tensor does not fit; names what was got and expected.
    """
    return _pack_gptq_op(qweight, scales, zeros, perm, group_rows, bits, in_features)


def pack_dense(weight: Tensor) -> Tensor:
    """Repack a dense matrix `(N, K)` f32, f16 or bf16 (the nn.Linear layout) into a uint8 blob; values are kept exactly."""
    return _pack_dense_op(weight)


def pack_concat(blobs: list[Tensor]) -> Tensor:
    """One blob, uint8 1-D, whose outputs are those of `blobs` (same K) side by side; kinds, widths and permutations may differ.

    Raises:
        RuntimeError, ValueError: no blobs, or of different K.
    """
    return _pack_concat_op(blobs)


def unpack(blob: Tensor) -> Tensor:
    """Blob -> f32 `(K, N)`, rows in original order: (code - zero) * step without EXL2's last rounding to fp16."""
    return _unpack_op(blob)


def reconstruct(q_weight: Tensor, q_scale: Tensor, q_scale_max: Tensor, q_groups: Tensor, q_invperm: Tensor) -> Tensor:
    """EXL2 tensors (as in `pack_exl2`) -> f16 `(K, N)`, rows in original order, bit for bit what the format says."""
    return _reconstruct_op(q_weight, q_scale, q_scale_max, q_groups, q_invperm)


_cache: WeakIdKeyDictionary = WeakIdKeyDictionary()


def cached_dense(blob: Tensor) -> Tensor:
    """`unpack(blob)`, f32 `(K, N)`, remembered while the blob lives: what the reference ops multiply by."""
    if blob not in _cache:
        _cache[blob] = _unpack(blob)
    return _cache[blob]

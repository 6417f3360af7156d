"""The weight blob in torch: builds and reads the byte layout of `csrc/format/blob.h`. Knows nothing about activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOB_MAGIC = 0x3157424E324C5845
GPU_MAGIC = 0x3147424E324C5845  # csrc/format/gpu_blob.h: the same header, then another layout
BLOB_VERSION = 1
TILE_ROWS = 16
ROW_UNIT = 32
ALIGN_BYTES = 64
SCALE_BYTES = 8
CODE_WIDTHS = (2, 3, 4, 5, 6, 8)
DENSE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EXL2_PART = 3  # kind of a part, after the numbers of DENSE_DTYPES
GPTQ_PART = 4
HAS_ZEROS = 1  # flag of a GPTQ part
HAS_WIDE_SCALES = 2  # flag of a GPTQ part

HEADER_DTYPE = np.dtype(
    [("magic", "<i8"), ("version", "<i4"), ("K", "<i4"), ("N", "<i4"), ("num_parts", "<i4"), ("bytes", "<i8"), ("pad", "<i8", 4)]
)
PART_DTYPE = np.dtype(
    [(name, "<i4") for name in ("kind", "outputs", "tiles", "num_groups", "first_output", "flags")]
    + [(name, "<i8") for name in ("perm", "groups", "tables", "data", "tile_bytes")]
)
GROUP_DTYPE = np.dtype([("bits", "<i4"), ("first_row", "<i4"), ("rows", "<i4"), ("offset", "<i4")])


@dataclass
class BlobPart:
    """One matrix of a blob.

    outputs: columns. perm: int32 (S,) or None. groups: GROUP_DTYPE (G,), EXL2 and GPTQ. tables: f32 (G, 16), EXL2 only. data: bytes
    (tiles, tile_bytes). flags: of a GPTQ part. S: stored rows, K but for the padding rows of GPTQ, whose perm is K.
    """

    kind: int
    outputs: int
    perm: np.ndarray | None
    groups: np.ndarray
    tables: np.ndarray
    data: np.ndarray
    flags: int = 0


def bit_placement(bits: int) -> list[tuple[int, int, int, int, int]]:
    """Where the bits of a pair go: `(pair, first bit of the code, number of bits, word, first bit of the 16-bit half)`."""
    per_half = 16 // bits
    placed = [(w * per_half + j, 0, bits, w, j * bits) for w in range(bits) for j in range(per_half)]
    if bits in (3, 5):
        placed += [(15, t, 1, t, 15) for t in range(bits)]
    if bits == 6:
        placed += [(12 + i, 0, 4, i, 12) for i in range(4)]
        placed += [(12 + i, 4, 2, 4 + i // 2, 12 + 2 * (i % 2)) for i in range(4)]
    return placed


def pack_units(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes uint8 `(rows, 16)`, rows a multiple of 32 -> uint32 `(rows / 32, bits, 16)`."""
    pairs = codes.astype(np.uint32).reshape(-1, 16, 2, TILE_ROWS)
    out = np.zeros((pairs.shape[0], bits, TILE_ROWS), np.uint32)
    for pair, low, count, word, shift in bit_placement(bits):
        piece = (pairs[:, pair] >> low) & ((1 << count) - 1)
        out[:, word] |= (piece[:, 0] << shift) | (piece[:, 1] << (shift + 16))
    return out


def unpack_units(words: np.ndarray, bits: int) -> np.ndarray:
    """Inverse of `pack_units`, over any number of tiles: uint32 `(..., units, bits, 16)` -> uint8 `(..., units * 32, 16)`."""
    pairs = np.zeros((*words.shape[:-2], 16, 2, TILE_ROWS), np.uint32)
    for pair, low, count, word, shift in bit_placement(bits):
        for half in (0, 1):
            pairs[..., pair, half, :] |= ((words[..., word, :] >> (shift + 16 * half)) & ((1 << count) - 1)) << low
    return pairs.astype(np.uint8).reshape(*words.shape[:-3], -1, TILE_ROWS)


def align_64(n: int) -> int:
    """Round up to a multiple of 64."""
    return (n + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES


def write_blob(K: int, parts: list[BlobPart]) -> Tensor:
    """Lay parts out as one blob, uint8 1-D."""
    sections: list[bytes] = []
    at = HEADER_DTYPE.itemsize + PART_DTYPE.itemsize * len(parts)

    def put(data: np.ndarray) -> int:
        nonlocal at
        raw = data.tobytes()
        sections.append(raw.ljust(align_64(len(raw)), b"\0"))
        start, at = at, at + align_64(len(raw))
        return start

    table = np.zeros(len(parts), PART_DTYPE)
    perms: dict[bytes, int] = {}
    first = 0
    for row, part in zip(table, parts):
        row["kind"], row["outputs"], row["tiles"], row["num_groups"] = part.kind, part.outputs, len(part.data), len(part.groups)
        row["first_output"], row["tile_bytes"], row["flags"] = first, part.data.shape[1], part.flags
        first += part.outputs
        if part.perm is not None:
            key = part.perm.tobytes()
            if key not in perms:
                perms[key] = put(part.perm)
            row["perm"] = perms[key]
        if part.kind in (EXL2_PART, GPTQ_PART):
            row["groups"] = put(part.groups)
        if part.kind == EXL2_PART:
            row["tables"] = put(part.tables)
        row["data"] = put(part.data)
    head = np.zeros(1, HEADER_DTYPE)
    head["magic"], head["version"], head["K"], head["N"], head["num_parts"], head["bytes"] = (
        BLOB_MAGIC,
        BLOB_VERSION,
        K,
        first,
        len(parts),
        at,
    )
    raw = bytearray(head.tobytes() + table.tobytes() + b"".join(sections))
    return torch.frombuffer(raw, dtype=torch.uint8)


def shape(blob: Tensor) -> tuple[int, int]:
    """`(K, N)` of a blob of either layout on any device: in_features and all outputs, from its header."""
    head = _read_header(blob, BLOB_MAGIC, GPU_MAGIC)
    return int(head["K"]), int(head["N"])


def read_blob(blob: Tensor) -> tuple[int, list[BlobPart]]:
    """K and the parts of a blob, uint8 1-D of the CPU's layout.

    Raises:
        ValueError: no blob.
    """
    head = _read_header(blob, BLOB_MAGIC)
    raw = blob.cpu().numpy()
    table = np.frombuffer(raw, PART_DTYPE, int(head["num_parts"]), HEADER_DTYPE.itemsize)
    return int(head["K"]), [_read_part(raw, int(head["K"]), row) for row in table]


def _read_part(raw: np.ndarray, K: int, row: Any) -> BlobPart:
    def get(offset: int, dtype: Any, count: int) -> np.ndarray:
        return np.frombuffer(raw, dtype, count, offset)

    G = int(row["num_groups"])
    kind = int(row["kind"])
    groups = get(int(row["groups"]), GROUP_DTYPE, G) if kind in (EXL2_PART, GPTQ_PART) else np.zeros(0, GROUP_DTYPE)
    stored = int(groups["rows"].sum()) if kind == GPTQ_PART else K
    return BlobPart(
        kind=kind,
        outputs=int(row["outputs"]),
        perm=get(int(row["perm"]), "<i4", stored) if row["perm"] else None,
        groups=groups,
        tables=get(int(row["tables"]), "<f4", G * 16).reshape(G, 16) if kind == EXL2_PART else np.zeros((0, 16), np.float32),
        data=get(int(row["data"]), np.uint8, int(row["tiles"]) * int(row["tile_bytes"])).reshape(int(row["tiles"]), -1),
        flags=int(row["flags"]),
    )


def _read_header(blob: Tensor, *magics: int) -> Any:
    if blob.dtype != torch.uint8 or blob.dim() != 1 or blob.numel() < HEADER_DTYPE.itemsize:
        raise ValueError(f"blob is {blob.dtype} {tuple(blob.shape)}; expected the uint8 tensor that a pack op returned")
    head = np.frombuffer(blob[: HEADER_DTYPE.itemsize].cpu().numpy(), HEADER_DTYPE)[0]
    if head["magic"] not in magics or head["version"] != BLOB_VERSION or head["bytes"] != blob.numel():
        raise ValueError("blob has no valid header; expected the tensor that a pack op returned")
    return head

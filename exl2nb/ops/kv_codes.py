"""The codes of a quantised KV cache in torch: what cache/FORMAT.md says, bit for bit. The kernels do the same, faster."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STORAGE_NUMBERS = {"fp16": 0, "fp32": 1, "q8": 2, "q4": 3, "fp8": 4}
"""Storage of a pool (`cache/spec.py`) -> its number in the kernels, csrc/format/pool.h; compared when the library is loaded."""
PAGE_TOKENS = 256
"""Tokens of a page of a coded pool; it has no dimension that says so."""
ZERO_CODES = {4: 7.0, 8: 127.5}
"""Code of the number 0."""
SCALE_CANDIDATES = tuple((21 - k) / 160 for k in range(8))
"""4 bits: the scales that are tried, as parts of the largest number."""


@dataclass(frozen=True)
class Coding:
    """How the numbers of one pool are stored: bits of a code, and whether it is a float (e4m3, not rotated)."""

    bits: int
    float8: bool = False


def group_size(head_dim: int) -> int:
    """Numbers that share a scale: 32, or the largest power of two that divides `head_dim` when that is smaller."""
    return min(32, head_dim & -head_dim)


def row_bytes(head_dim: int, bits: int, page_size: int = PAGE_TOKENS) -> int:
    """Bytes of one head of one page: codes, then fp16 scales."""
    return page_size * head_dim * bits // 8 + 2 * page_size * head_dim // group_size(head_dim)


def page_size(pool: Tensor) -> int:
    """Tokens of a page of a pool of any kind: plain `(num_pages, Hkv, P, D)` or coded `(num_pages, Hkv, row)`."""
    return pool.shape[2] if pool.dim() == 4 else PAGE_TOKENS


def coding_of(pool: Tensor, head_dim: int) -> Coding | None:
    """What a pool holds for heads of `head_dim`; None for plain fp16 or fp32 numbers `(num_pages, Hkv, P, D)`.

    Raises:
        ValueError: no pool of this head_dim.
    """
    if pool.dim() == 4 and pool.dtype in (torch.float16, torch.float32) and pool.shape[3] == head_dim:
        return None
    if pool.dim() == 3 and pool.dtype == torch.float8_e4m3fn and pool.shape[2] == row_bytes(head_dim, 8):
        return Coding(8, float8=True)
    if pool.dim() == 3 and pool.dtype == torch.uint8:
        for bits in ZERO_CODES:
            if pool.shape[2] == row_bytes(head_dim, bits):
                return Coding(bits)
    raise ValueError(
        f"pool is {pool.dtype} {tuple(pool.shape)}; expected float16 or float32 (pages, heads, page size, {head_dim}), or coded rows of "
        f"{row_bytes(head_dim, 4)} or {row_bytes(head_dim, 8)} bytes: (pages, heads, bytes) uint8 or float8_e4m3fn"
    )


def rotate_groups(x: Tensor) -> Tensor:
    """The Walsh-Hadamard transform over sqrt(G) of each group of the last dimension of x `(..., D)`: f32, same shape; its own inverse."""
    size = group_size(x.shape[-1])
    y, h = x.float().reshape(-1, size), 1
    while h < size:
        a, b = y.view(-1, size // (2 * h), 2, h).unbind(2)
        y, h = torch.stack((a + b, a - b), 2).view(-1, size), 2 * h
    return (y * torch.tensor(size**-0.5, dtype=torch.float32)).view(x.shape)


def _hadamard_tree(v: Tensor) -> Tensor:
    while v.shape[-1] > 1:
        v = v[..., 0::2] + v[..., 1::2]
    return v


def _inverse_scale(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def _quantize_codes(g: Tensor, scale: Tensor, bits: int) -> Tensor:
    return torch.round(g * _inverse_scale(scale) + ZERO_CODES[bits]).clamp(0, 2**bits - 1)


def _search_scale(g: Tensor, top: Tensor) -> Tensor:
    """The 4-bit scale of least squared error: f32 `(..., 1)`, fp16 numbers."""
    zero = ZERO_CODES[4]

    def error(scale: Tensor) -> Tensor:
        return _hadamard_tree((g - (_quantize_codes(g, scale, 4) - zero) * scale).square())

    best = (top * torch.tensor(SCALE_CANDIDATES[0], dtype=torch.float32)).half().float()
    least = error(best)
    for part in SCALE_CANDIDATES[1:]:
        scale = (top * torch.tensor(part, dtype=torch.float32)).half().float()
        e = error(scale)
        best, least = torch.where(e < least, scale, best), torch.minimum(e, least)
    centred = _quantize_codes(g, best, 4) - zero
    over, under = _hadamard_tree(g * centred), _hadamard_tree(centred.square())
    fitted = torch.where(under == 0, 0.0, over / under).half().float()
    return torch.where(error(fitted) < least, fitted, best)


def encode_rows(x: Tensor, coding: Coding) -> tuple[Tensor, Tensor]:
    """Numbers `(..., D)` -> codes uint8 `(..., D * bits / 8)` and scales f16 `(..., D / G)`."""
    D = x.shape[-1]
    g = x.half().float()
    if not coding.float8:
        g = rotate_groups(g)
    g = g.unflatten(-1, (-1, group_size(D)))
    finite = g.isfinite().all(-1, keepdim=True)
    g = torch.where(finite, g, 0.0)
    hi, lo = g.amax(-1, keepdim=True), (-g).amax(-1, keepdim=True)
    top = torch.maximum(hi, lo)
    if coding.float8:
        scale = (top * torch.tensor(1 / 448, dtype=torch.float32)).half().float()
        codes = (g * _inverse_scale(scale)).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        scale = (top * torch.tensor(1 / 127.5, dtype=torch.float32)).half().float() if coding.bits == 8 else None
        scale = _search_scale(g, torch.where(hi >= lo, hi, -lo)) if scale is None else scale
        codes = _quantize_codes(g, scale, coding.bits).to(torch.uint8)
    codes = torch.where(finite, codes, torch.zeros((), dtype=torch.uint8)).flatten(-2)
    scale = torch.where(scale == 0, 0.0, scale)  # never -0: bytes are compared
    scale = torch.where(finite, scale, float("nan")).half().flatten(-2)
    return (codes if coding.bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4), scale


def decode_rows(codes: Tensor, scales: Tensor, coding: Coding, *, rotated: bool = False) -> Tensor:
    """Codes and scales as `encode_rows` gives them -> f32 `(..., D)`; rotated: still in the rotated frame, as attention reads them."""
    if coding.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    levels = codes.view(torch.float8_e4m3fn).float() if coding.float8 else codes.float() - ZERO_CODES[coding.bits]
    groups = levels.unflatten(-1, (scales.shape[-1], -1)) * scales.float().unsqueeze(-1)
    x = groups.flatten(-2)
    return x if coding.float8 or rotated else rotate_groups(x)


def _pool_parts(pool: Tensor, coding: Coding, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views of a coded pool: codes uint8 `(pages, heads, P, bytes)`, scales f16 `(pages, heads, P, D / G)`."""
    data, width = pool.view(torch.uint8), head_dim * coding.bits // 8
    codes = data[..., : PAGE_TOKENS * width].unflatten(-1, (PAGE_TOKENS, width))
    scales = data[..., PAGE_TOKENS * width :].view(torch.float16).unflatten(-1, (PAGE_TOKENS, -1))
    return codes, scales


def write_slots(pool: Tensor, slots: Tensor, x: Tensor) -> None:
    """Store x `(T, heads, D)` at `slots` int `(T,)` of a pool of any kind, in place."""
    coding, at, P = coding_of(pool, x.shape[-1]), slots.long(), page_size(pool)
    page, offset = at // P, at % P
    if coding is None:
        pool[page, :, offset] = x.to(pool.dtype)
        return
    codes, scales = _pool_parts(pool, coding, x.shape[-1])
    codes[page, :, offset], scales[page, :, offset] = encode_rows(x, coding)


def read_pages(pool: Tensor, pages: Tensor, head_dim: int) -> Tensor:
    """The numbers of `pages` int `(n,)` of a pool of any kind: f32 `(n, heads, P, D)`."""
    coding, at = coding_of(pool, head_dim), pages.long()
    if coding is None:
        return pool[at].float()
    codes, scales = _pool_parts(pool, coding, head_dim)
    return decode_rows(codes[at], scales[at], coding)

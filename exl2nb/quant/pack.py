"""Codes <-> 32-bit words. Knows nothing of groups, scales or files; see FORMAT.md, "Bit packing"."""

from __future__ import annotations

import torch
from torch import Tensor

from exl2nb.core.errors import FormatError
from exl2nb.quant.bits import CODE_WIDTHS

ROWS_PER_UNIT = 32  # rows that fill whole words at every width: 32 codes of b bits are b words


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes down the columns, low bits first, into one continuous bit stream per column.

    Args:
        codes: uint8 `(rows, N)`, each below `2**bits`; rows a multiple of 32.
        bits: one of CODE_WIDTHS.

    Returns:
        int32 `(rows * bits / 32, N)`, contiguous.

    Raises:
        FormatError: another width or dtype, a row count that is not a multiple of 32, or a code that does not fit.
    """
    _check(bits, codes, torch.uint8)
    if codes.shape[0] % ROWS_PER_UNIT:
        raise FormatError(f"codes: found {codes.shape[0]} rows, expected a multiple of {ROWS_PER_UNIT}")
    if codes.numel() and int(codes.max()) >> bits:
        raise FormatError(f"codes: found the code {int(codes.max())}, expected codes below {1 << bits} at {bits} bits")
    units, columns = codes.shape[0] // ROWS_PER_UNIT, codes.shape[1]
    source = codes.reshape(units, ROWS_PER_UNIT, columns)
    words = torch.zeros(units, bits, columns, dtype=torch.int32, device=codes.device)
    for row in range(ROWS_PER_UNIT):
        word, shift = divmod(row * bits, 32)
        code = source[:, row].to(torch.int32)
        words[:, word] |= code << shift
        if shift + bits > 32:
            words[:, word + 1] |= code >> (32 - shift)
    return words.reshape(units * bits, columns)


def unpack_codes(words: Tensor, bits: int) -> Tensor:
    """Invert pack_codes.

    Args:
        words: int32 `(rows * bits / 32, N)`.
        bits: one of CODE_WIDTHS.

    Returns:
        uint8 `(rows, N)`, contiguous.

    Raises:
        FormatError: another width or dtype, or a word count that is not a multiple of `bits`.
    """
    _check(bits, words, torch.int32)
    if words.shape[0] % bits:
        raise FormatError(f"words: found {words.shape[0]} rows of words, expected a multiple of {bits} at {bits} bits")
    units, columns = words.shape[0] // bits, words.shape[1]
    source = words.reshape(units, bits, columns)
    codes = torch.empty(units, ROWS_PER_UNIT, columns, dtype=torch.uint8, device=words.device)
    mask = (1 << bits) - 1
    for row in range(ROWS_PER_UNIT):
        word, shift = divmod(row * bits, 32)
        code = source[:, word] >> shift  # arithmetic: the sign bits it drags in are masked off
        if shift + bits > 32:
            low = 32 - shift
            code = (code & ((1 << low) - 1)) | (source[:, word + 1] << low)
        codes[:, row] = (code & mask).to(torch.uint8)
    return codes.reshape(units * ROWS_PER_UNIT, columns)


def pack_scales(index: Tensor) -> Tensor:
    """Pack 4-bit scale indices, eight columns to a word, lowest nibble first.

    Args:
        index: uint8 `(G, N)`, each 0..15; N a multiple of 8.

    Returns:
        int32 `(G, N / 8)`.

    Raises:
        FormatError: an index above 15, another dtype, or N not a multiple of 8.
    """
    if index.dtype != torch.uint8 or index.ndim != 2 or index.shape[1] % 8:
        raise FormatError(f"scale index: found {index.dtype} {tuple(index.shape)}, expected uint8 (G, N) with N a multiple of 8")
    if index.numel() and int(index.max()) > 15:
        raise FormatError(f"scale index: found {int(index.max())}, expected 0..15")
    nibbles = index.reshape(index.shape[0], -1, 8).to(torch.int32)
    words = torch.zeros(nibbles.shape[:2], dtype=torch.int32, device=index.device)
    for column in range(8):
        words |= nibbles[:, :, column] << (4 * column)
    return words


def unpack_scales(words: Tensor) -> Tensor:
    """Invert pack_scales: int32 `(G, N / 8)` -> uint8 `(G, N)`."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).reshape(words.shape[0], -1)


def _check(bits: int, tensor: Tensor, dtype: torch.dtype) -> None:
    if bits not in CODE_WIDTHS:
        raise FormatError(f"width: found {bits} bits, expected one of {', '.join(map(str, CODE_WIDTHS))}")
    if tensor.dtype != dtype or tensor.ndim != 2:
        raise FormatError(f"packing at {bits} bits: found {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} with two dimensions")

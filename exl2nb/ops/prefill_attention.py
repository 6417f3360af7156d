"""Causal attention of the last tokens of one sequence over dense keys and values: flash-attn's where it is installed, else torch's.

flash-attn (2.3 or later, Ampere or later) is never needed. It reads grouped heads, windows and, from 2.6 on, capped scores, which torch's
kernels do not; its function is called as published: tensors (1, tokens, heads, head_dim), the mask aligned to the last key. On Hopper torch
has a quicker kernel, cuDNN's, for prompts and pieces of a usual length: it knows no mask aligned to the last key, so the keys before a
piece are read apart, whole, and the parts are weighted by their sums.

flash-attn 2.8.3 on an H100 (2026-11-26, benchmarks/flash_attn.py), 32 heads, 8 of keys: 0.16 ms a layer for 2048 tokens and 1.57 for 8192,
torch 0.12 and 1.06; 2000 tokens 0.17 and 0.22; with a window or capped scores our paged kernel, which computes those without flash-attn,
takes 3 to 4 times as long at 2048 and 18 to 20 times at 8192.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from exl2nb.ops import kv_codes
from exl2nb.ops.cuda_attention import merge_parts

MAX_HEAD_DIM = 256  # head_dim
HOPPER_MIN_TOKENS = (
    2048  # tokens of a usual prompt from which on torch's kernel is known to be quicker on Hopper than flash-attn's with grouped heads
)
USUAL_PROMPT_MULTIPLE = 512  # prompts of a multiple of this many tokens have lengths that recur
PROMPT_CHUNK_TOKENS = 1024  # so do pieces of long prompts
KEY_BLOCK_TOKENS = 2048  # keys before a piece, a power of two; as few as can take longer to compile for (60 ms a length) than they save


class FlashAttention(NamedTuple):
    """What is known of flash-attn here. call: its flash_attn_func, None where it cannot be used, and then `why`; caps: takes `softcap`.

    hopper: the GPU is one of compute capability 9.0, for which torch's attention has a kernel of its own.
    """

    call: Callable[..., Tensor] | None
    caps: bool = False
    why: str = ""
    hopper: bool = False


@lru_cache(maxsize=1)
def flash_attention() -> FlashAttention:
    """What is known of flash-attn, found out once a process."""
    if find_spec("flash_attn") is None:
        return FlashAttention(None, why="not installed")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        return FlashAttention(None, why="it needs a GPU of compute capability 8.0 or later")
    try:
        from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]
    except Exception as error:  # built for another torch, most often
        return FlashAttention(None, why=f"cannot be imported: {type(error).__name__}: {str(error)[:200]}")
    known = inspect.signature(flash_attn_func).parameters
    if missing := {"softmax_scale", "causal", "window_size"} - set(known):
        return FlashAttention(None, why=f"its function lacks {', '.join(sorted(missing))}: 2.3 or later is needed")
    return FlashAttention(flash_attn_func, "softcap" in known, hopper=torch.cuda.get_device_capability()[0] == 9)


def can_attend(head_dim: int, *, window: int = 0, softcap: float = 0.0) -> bool:
    """Whether `attend_prefix` takes such heads. window: keys that a token sees, itself included; 0 = all."""
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return False
    if not window and not softcap:
        return True
    flash = flash_attention()
    return flash.call is not None and (flash.caps or not softcap)


def attend_prefix(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0, softcap: float = 0.0) -> Tensor:
    """Attention of the last n of `length` tokens.

    Args:
        q: f16 `(n, Hq, D)`. k, v: f16 `(length, Hkv, D)`, Hkv a divisor of Hq. scale: of the scores. window, softcap: as `can_attend`
            allows.

    Returns:
        f16 `(n, Hq * D)`.
    """
    flash, (n, length) = flash_attention(), (q.shape[0], k.shape[0])
    share = q.shape[1] // k.shape[1]
    if not window and not softcap and (blocks := blocks_before(n, length)) and _can_use_cudnn(q, k, v):
        return _attend_in_blocks(q, k, v, scale, blocks)
    # torch's quickest kernel is compiled for every new length, which takes longer than all of a short prompt
    usual = n == length and n % USUAL_PROMPT_MULTIPLE == 0
    torchs = flash.hopper and usual and not window and not softcap and (share == 1 or n >= HOPPER_MIN_TOKENS)
    if flash.call is not None and not torchs:
        options = {"softcap": softcap} if softcap else {}
        sides = (window - 1, 0) if window else (-1, -1)
        return flash.call(q[None], k[None], v[None], softmax_scale=scale, causal=True, window_size=sides, **options)[0].flatten(1)
    if share > 1 and not _reads_groups(q, k, v):
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    y = (
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        if usual
        else _attend_behind(q, k, v, scale)
    )
    return y[0].transpose(0, 1).reshape(n, -1)


def blocks_before(n: int, length: int) -> list[int]:
    """Runs of keys before the last n tokens to be attended to apart: each `KEY_BLOCK_TOKENS` times a power of two, the longest first.

    Empty where the keys are too few for that to be quicker, or n is no usual number. Keys that are left over go with the n.

    Example:
        >>> blocks_before(2048, 30000)
        [16384, 8192, 2048]
    """
    left, blocks = (length - n) // KEY_BLOCK_TOKENS * KEY_BLOCK_TOKENS, []
    while n % PROMPT_CHUNK_TOKENS == 0 and left:
        blocks.append(1 << (left.bit_length() - 1))
        left -= blocks[-1]
    return blocks


def _sdpa_params(q: Tensor, k: Tensor, v: Tensor) -> SDPAParams:
    one, keys, values = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    return SDPAParams(one, keys, values, None, 0.0, False, q.shape[1] != k.shape[1])


def _reads_groups(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether torch has a kernel here that reads grouped heads as they are."""
    return q.shape[-1] % 8 == 0 and can_use_flash_attention(_sdpa_params(q, k, v))


def _can_use_cudnn(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether cuDNN's attention, which is quick on Hopper, can be used here, and FlashAttention beside it."""
    hopper = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
    return hopper and _reads_groups(q, k, v) and can_use_cudnn_attention(_sdpa_params(q, k, v))


def _attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float, blocks: list[int]) -> Tensor:
    """Attention to runs of keys, each read whole by cuDNN's kernel, and to the rest up to a token itself, put together."""
    n, begin, done = len(q), 0, []
    qs, ks, vs = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    for end in [*itertools.accumulate(blocks), len(k)]:
        keys, values, last = ks[:, :, begin:end], vs[:, :, begin:end], end == len(k)
        if last and end - begin != n:
            done.append(torch.ops.aten._scaled_dot_product_flash_attention(qs, keys, values, 0.0, True, False, scale=scale)[:2])
        else:
            done.append(torch.ops.aten._scaled_dot_product_cudnn_attention(qs, keys, values, None, True, 0.0, last, False, scale=scale)[:2])
        begin = end
    parts, lse = [y[0].transpose(0, 1).contiguous() for y, _ in done], [each.reshape(-1, n) for _, each in done]
    return merge_parts(parts, lse).flatten(1)


def attend_whole(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, pages: Tensor, end: int, *, scale: float, window: int = 0, softcap: float = 0.0
) -> Tensor:
    """Attention of tokens that see each other whole and everything before them: a picture's.

    Args:
        q: `(n, Hq, D)`, the tokens before position `end`. k_pool, v_pool: as in `paged_attention`. pages: int `(max_pages,)`, the
        sequence's. window: positions behind a token that it sees, itself included; 0 = all.

    Returns:
        f32 `(n, Hq * D)`.
    """
    n, share = q.shape[0], q.shape[1] // k_pool.shape[1]
    used = pages[: -(-end // kv_codes.page_size(k_pool))]
    keys, values = (
        kv_codes.read_pages(pool, used, q.shape[2]).transpose(0, 1).flatten(1, 2)[:, :end].repeat_interleave(share, 0)[None]
        for pool in (k_pool, v_pool)
    )
    place = torch.arange(end, device=q.device)
    hidden = place[None] <= place[end - n :, None] - window if 0 < window < end else None
    queries = q.float().transpose(0, 1)[None]
    if softcap:
        scores = softcap * torch.tanh(queries @ keys.transpose(-1, -2) * (scale / softcap))
        y = (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)).softmax(-1) @ values
    else:
        y = F.scaled_dot_product_attention(queries, keys, values, attn_mask=None if hidden is None else ~hidden, scale=scale)
    return y[0].transpose(0, 1).reshape(n, -1)


def _attend_behind(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention where the queries `(1, Hq, n, D)` are at the end of the keys `(1, Hkv, length, D)`.

    Hkv may be less than Hq where `_reads_groups`. As torch.nn.attention.bias.causal_lower_right has it, whose import takes seconds: it
    brings torch's compiler along.
    """
    params = SDPAParams(q, k, v, None, 0.0, False, q.shape[1] != k.shape[1])
    if q.shape[-1] % 8 == 0 and can_use_flash_attention(params):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)[0]
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)

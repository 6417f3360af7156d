"""The mathematics of every op on plain dense tensors in fp32, one function per op, same name. Start reading here; speed is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from exl2nb.ops import kv_codes

if TYPE_CHECKING:
    from exl2nb.ops.records import QkvOp, RoutedOp

ACTIVATION_NAMES = ("silu", "gelu", "gelu_tanh")


def embed(table: Tensor, ids: Tensor, scale: float = 1.0, position_table: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    """Rows `ids` (T,) of table `(V, H)`, times scale, plus rows `positions` of the position table -> f32 `(T, H)`."""
    x = table[ids.long()].float() * scale
    return x if position_table is None or positions is None else x + position_table[positions.long()].float()


def mask_logits(logits: Tensor, bits: Tensor) -> Tensor:
    """Logits `(V,)` where the bit of their token is set in bits `(ceil(V / 32),)`, the lowest first; -inf elsewhere."""
    places = torch.arange(logits.shape[0], device=logits.device)
    allowed = (bits[places // 32] >> (places % 32)) & 1
    return torch.where(allowed.bool(), logits, -torch.inf)


def draw(z: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """A token from one row of logits `(V,)`: the best, or where the cumulative probability of what the cuts leave passes `uniform`."""
    if temperature == 0 or not bool((z.max() / temperature).isfinite()):
        return int((z == z.max()).nonzero()[0])
    y = z / temperature
    floor = y.sort().values[len(y) - top_k] if 0 < top_k < len(y) else y.min()
    weights = torch.where(y >= floor, (y - y.max()).exp().double(), 0.0)
    if top_p < 1:
        order = y.sort().values
        below = torch.where(order >= floor, (order - y.max()).exp().double(), 0.0).cumsum(0)
        floor = order[min(int((below <= (1 - top_p) * below[-1]).sum()), len(y) - 1)]
    weights = torch.where((y >= floor) & ((y - y.max()).exp() >= min_p), weights, 0.0)
    through = weights.cumsum(0)
    return min(int((through <= uniform * through[-1]).sum()), int(weights.nonzero()[-1]))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X / rms(x) * weight over the last dimension, in fp32."""
    x = x.float()
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / std * weight + bias over the last dimension, in fp32."""
    x = x.float()
    x = x - x.mean(-1, keepdim=True)
    y = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))
    return y if bias is None else y + bias


def norm(x: Tensor, weight: Tensor | None, eps: float, bias: Tensor | None, layer: bool) -> Tensor:
    """The norm before a linear: none without a weight, else RMS, or LayerNorm."""
    if weight is None:
        return x.float()
    return layer_norm(x, weight, bias, eps) if layer else rms_norm(x, weight, eps)


def head_norm(x: Tensor, weight: Tensor | None, eps: float, layer: bool) -> Tensor:
    """Norm of x `(T, heads, D)`: weight `(D,)`, `(heads, D)`, or `(heads * D,)` for one norm over all heads together."""
    if weight is None:
        return x
    if weight.dim() == 1 and weight.shape[0] != x.shape[2]:
        return norm(x.flatten(1), weight, eps, None, layer).view(x.shape)
    return norm(x, weight, eps, None, layer)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """X `(M, K)` @ weight `(K, N)` + bias."""
    y = x.float() @ weight
    return y if bias is None else y + bias


def linear_residual(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    scale: float = 1.0,
) -> None:
    """Residual `(M, N)` += scale * norm(x @ weight + bias), in place."""
    y = linear(x, weight, bias)
    residual += scale * (y if norm is None else rms_norm(y, norm, eps))


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first 2 * half dims of x `(T, heads, D)`; cos, sin `(T, half)`. Dimension i pairs with half + i, or 2 i with 2 i + 1."""
    half = cos.shape[-1]
    if interleaved:
        a, b = x[..., : 2 * half].unflatten(-1, (half, 2)).unbind(-1)
        cos, sin = cos[:, None], sin[:, None]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        return torch.cat([turned, x[..., 2 * half :]], -1)
    a, b = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)


def norm_qkv_rope(x: Tensor, layer: QkvOp, positions: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
    """Norm, one matrix [q; k; v], optional head norms, rotation; K and V go to their slots; returns q `(T, Hq, D)`.

    layer: with the dense matrix `(H, N)` as its blob.
    """
    a = layer
    y = linear(norm(x, a.norm, a.eps, a.norm_bias, a.layer_norm), a.blob, a.bias).view(len(x), -1, a.head_dim)
    if a.clip:
        y = y.clamp(-a.clip, a.clip)
    q, k, v = y.split([a.num_heads, a.num_kv_heads, a.num_kv_heads], 1)
    cos, sin = a.cos[positions.long()], a.sin[positions.long()]
    q, k = (rope(head_norm(z, weight, a.eps, a.layer_norm), cos, sin, a.interleaved) for z, weight in ((q, a.q_norm), (k, a.k_norm)))
    kv_codes.write_slots(k_pool, slots, k)
    kv_codes.write_slots(v_pool, slots, v)
    return q.contiguous()


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Causal attention of q `(T, Hq, D)` over each sequence's pages -> `(T, Hq * D)`. The last query sits at context_len - 1."""
    T, Hq, D = q.shape
    Hkv, P = k_pool.shape[1], kv_codes.page_size(k_pool)
    out = torch.zeros(T, Hq, D)
    bounds, lens = cu_seqlens.tolist(), context_lens.tolist()
    for b, length in enumerate(lens):
        queries = q[bounds[b] : bounds[b + 1]].float()
        n = len(queries)
        if n == 0:
            continue
        pages = block_table[b, : (length + P - 1) // P].long()
        keys, values = (
            kv_codes.read_pages(pool, pages, D).transpose(0, 1).reshape(Hkv, -1, D)[:, :length].repeat_interleave(Hq // Hkv, 0)
            for pool in (k_pool, v_pool)
        )
        scores = torch.einsum("qhd,hkd->hqk", queries, keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(length - n, length)[:, None] - torch.arange(length)[None]
        hidden = (distance < 0) | (distance >= window) if window else distance < 0
        probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[bounds[b] : bounds[b + 1]] = torch.einsum("hqk,hkd->qhd", probs, values)
    return out.view(T, Hq * D)


def activate(x: Tensor, activation: str) -> Tensor:
    """One of ACTIVATION_NAMES, elementwise."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def norm_gate_up(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    norm_bias: Tensor | None = None,
    layer_norm: bool = False,
    gated: bool = True,
) -> Tensor:
    """act(gate) * up of the normed x, weight [gate; up] `(H, 2I)` -> `(T, I)`; not gated: act(up), weight `(H, I)`."""
    y = linear(norm(x, norm_weight, eps, norm_bias, layer_norm), weight, bias)
    if not gated:
        return activate(y, activation)
    gate, up = y.chunk(2, -1)
    return activate(gate, activation) * up


def route(logits: Tensor, top_k: int, renormalize: float) -> tuple[Tensor, Tensor]:
    """Router logits `(T, E)` -> the chosen experts int64 and their weights, both `(T, top_k)`, by falling weight.

    Weights are probabilities over all experts, divided by their norm of order `renormalize` over the chosen ones (0: not divided). A
    softmax over the chosen logits alone is the same as order 1.
    """
    weight, chosen = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weight, chosen = weight[:, :top_k], chosen[:, :top_k]
    if renormalize:
        weight = weight / torch.linalg.vector_norm(weight, ord=renormalize, dim=-1, keepdim=True)
    return chosen, weight


def routed_mlp(x: Tensor, experts: RoutedOp, matrix: Callable[[Tensor], Tensor] = lambda dense: dense) -> Tensor:
    """X `(T, H)` += scale * post_norm(weighted sum of each row's experts + shared expert), in place; the chosen experts `(T, top_k)`.

    matrix: of the layer's matrices -> dense `(K, N)`, which they may be already.
    """
    e = experts
    h = norm(x, e.norm, e.eps, e.norm_bias, e.layer_norm)
    chosen, weight = route(linear(h, matrix(e.blob), None), e.top_k, e.renormalize)

    def expert(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return linear(norm_gate_up(rows, None, 0.0, matrix(up), None, e.activation), matrix(down), None)

    out = torch.zeros_like(h)
    for i in chosen.unique().tolist():  # rising, so that a row's experts are added in that order
        rows, place = torch.where(chosen == i)
        out[rows] += weight[rows, place, None] * expert(h[rows], e.up[i], e.down[i])
    if e.shared_up is not None and e.shared_down is not None:
        shared = expert(h, e.shared_up, e.shared_down)
        out += shared if e.shared_gate is None else linear(h, matrix(e.shared_gate), None).sigmoid() * shared
    x += e.scale * (out if e.post_norm is None else rms_norm(out, e.post_norm, e.post_eps))
    return chosen.to(torch.int32)


def norm_head(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    norm_bias: Tensor | None = None,
    layer_norm: bool = False,
) -> Tensor:
    """Logits f32 of the normed x."""
    return linear(norm(x, norm_weight, eps, norm_bias, layer_norm), weight, bias)


def codes(q_weight: Tensor, q_groups: Tensor, K: int) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """Codes uint8 `(K, N)` in stored order, and the groups as `(bits, first row, rows)`."""
    table = q_groups.tolist()
    ends = [*table[3::2], q_weight.shape[0]]
    words = q_weight.numpy().astype("uint32")
    out, groups, row = torch.empty(K, q_weight.shape[1], dtype=torch.uint8), [], 0
    for bits, first, end in zip(table[::2], table[1::2], ends):
        rows = (end - first) * 32 // bits
        block = torch.from_numpy(words[first:end].astype("int64"))
        start = torch.arange(rows) * bits
        low, shift = block[start // 32], (start % 32)[:, None]
        high = block[((start + bits - 1) // 32)]
        joined = torch.where(shift + bits > 32, low | (high << 32), low) >> shift
        out[row : row + rows] = (joined & ((1 << bits) - 1)).to(torch.uint8)
        groups.append((bits, row, rows))
        row += rows
    return out, groups


def step_tables(q_scale_max: Tensor, prescale: float) -> Tensor:
    """Step size f32 `(G, 16)` of each scale index with the format's own fp16 roundings: fp16(fp16((i+1)^2) * fp16(max * prescale/256))."""
    m = (q_scale_max.float() * torch.tensor(prescale / 256, dtype=torch.float32)).half()
    squares = (torch.arange(1, 17) ** 2).half()
    return (squares[None].float() * m[:, None].float()).half().float()


def scale_indices(q_scale: Tensor) -> Tensor:
    """4-bit scale indices uint8 `(G, N)` of q_scale int32 `(G, N/8)`."""
    return ((q_scale[..., None] >> (torch.arange(8, dtype=torch.int32) * 4)) & 15).to(torch.uint8).view(q_scale.shape[0], -1)


def reconstruct(q_weight: Tensor, q_scale: Tensor, q_scale_max: Tensor, q_groups: Tensor, q_invperm: Tensor) -> Tensor:
    """EXL2 tensors -> f16 `(K, N)`, rows in original order, bit for bit what the format says (prescale 1)."""
    stored, groups = codes(q_weight, q_groups, len(q_invperm))
    steps = step_tables(q_scale_max, 1.0).gather(1, scale_indices(q_scale).long()).half()
    out = torch.empty(stored.shape, dtype=torch.float16)
    for g, (bits, first, rows) in enumerate(groups):
        centred = stored[first : first + rows].float() - 2 ** (bits - 1)
        out[first : first + rows] = (centred * steps[g].float()).half()
    return out[q_invperm.long()]

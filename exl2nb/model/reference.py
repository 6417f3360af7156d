"""The network in plain differentiable torch, fp32, on dense weights: what tests compare with and the converter runs.

Weights are a mapping from full tensor names ("model.layers.0.self_attn.q_proj.weight") to tensors of any float dtype, in the nn.Linear
layout `(out_features, in_features)`; they are widened where they are used, so a mapping that reads from disk on demand works too.
Shapes: x `(B, S, H)` f32; every sequence starts at position 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import Linear, layer_linears
from exl2nb.model.rope import rope_tables

Weights = Mapping[str, Tensor]
Steps = Generator[Tensor, None, Tensor]


class Capture(Protocol):
    """What is called before every linear with its key and input; an expert's input has only its own tokens, whose numbers are `rows`."""

    def __call__(self, key: str, value: Tensor, rows: Tensor | None = None, /) -> None:
        """One linear is about to run."""


class Past(Protocol):
    """Keys and values of the tokens before, of all layers: x then is what comes next, `(B, S, H)`."""

    @property
    def positions(self) -> Tensor:
        """Of x's tokens, int64 `(S,)`."""
        ...

    @property
    def context(self) -> int:
        """Tokens that there will be at the end: what some kinds of RoPE depend on."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Take k and v `(B, Hkv, S, D)` of layer `layer` in, and attend with q `(B, Hq, S, D)` to all that is there then."""
        ...


QUERIES_PER_BLOCK = 256  # that attend at once, to the keys up to the last of them
ACTIVATION_FUNCTIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def embed(config: ModelConfig, weights: Weights, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Rows of the embedding: ids `(B, S)` int, at positions int64 `(S,)`, from 0 on if not given -> `(B, S, H)` f32."""
    x = F.embedding(ids.long(), weights[f"{config.names.embed}.weight"]).float() * config.embed_scale
    if not config.learned_positions:
        return x
    table = weights[f"{config.names.positions}.weight"]
    return x + (table[: ids.shape[1]] if positions is None else table[positions]).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last axis."""
    if x.is_cuda and weight.dim() == 1:  # a kernel in place of six, and two in place of eleven for the gradient
        return F.rms_norm(x, weight.shape, weight.float(), eps)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`(x - mean) / std * weight + bias` over the last axis."""
    x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    return y if bias is None else y + bias.float()


def norm(config: ModelConfig, weights: Weights, x: Tensor, key: str) -> Tensor:
    """The norm of module `key` as this model has it."""
    weight = weights[f"{key}.weight"].float() + config.norm_offset
    if config.norm == "rms":
        return rms_norm(x, weight, config.norm_eps)
    return layer_norm(x, weight, weights[f"{key}.bias"] if config.norm_bias else None, config.norm_eps)


def _head_norm(config: ModelConfig, weights: Weights, x: Tensor, key: str) -> Tensor:
    """The norm of q or k `(B, heads, S, D)`, per head or over all heads."""
    weight = weights[f"{key}.weight"].float() + config.norm_offset
    if config.qk_norm == "full":
        flat = rms_norm(x.transpose(1, 2).flatten(2), weight, config.norm_eps)
        return _heads(flat, config.head_dim)
    weight = weight[:, None] if weight.dim() == 2 else weight  # a row per head
    return rms_norm(x, weight, config.norm_eps) if config.norm == "rms" else layer_norm(x, weight, None, config.norm_eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turn the pairs (j, j + rotary_dim/2) of x `(..., S, D)` by the angles of cos, sin `(S, rotary_dim/2)`; the rest passes.

    interleaved: the pairs are (2 j, 2 j + 1).
    """
    half = cos.shape[-1]
    if interleaved:
        a, b = x[..., : 2 * half].unflatten(-1, (half, 2)).unbind(-1)
        return torch.cat((torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2), x[..., 2 * half :]), dim=-1)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0, softcap: float = 0.0) -> Tensor:
    """Causal attention: q `(B, Hq, S, D)`, k and v `(B, Hkv, S, D)` -> `(B, Hq, S, D)`."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if not (softcap or 0 < window < q.shape[2]):
        if q.is_cuda or q.shape[2] <= QUERIES_PER_BLOCK:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return torch.cat([_attend_up_to(q, k, v, first, scale) for first in range(0, q.shape[2], QUERIES_PER_BLOCK)], dim=2)
    position = torch.arange(q.shape[2], device=q.device)
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < (window or q.shape[2]))
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * (scale / softcap))
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def _attend_up_to(q: Tensor, k: Tensor, v: Tensor, first: int, scale: float) -> Tensor:
    """Causal attention of a block of queries over the keys up to its last one: on the CPU, is_causal alone also computes masked scores."""
    last = min(first + QUERIES_PER_BLOCK, q.shape[2])
    seen = torch.ones(last - first, last, dtype=torch.bool).tril(first)
    return F.scaled_dot_product_attention(q[:, :, first:last], k[:, :, :last], v[:, :, :last], attn_mask=seen, scale=scale)


def block(config: ModelConfig, layer: int, weights: Weights, x: Tensor, capture: Capture | None = None, past: Past | None = None) -> Tensor:
    """One decoder layer.

    Args:
        layer: its index; selects names and window.
        x: f32 `(B, S, H)`, the residual stream.
        capture: called with (module key, input) before every linear; q, k and v see the same tensor, gate and up too. An expert's
            linears get the tokens `(n, K)` that chose it, and as a third argument their numbers int64 `(n,)` in x's `B * S`; the router's
            key comes with all tokens.
        past: the tokens before x, which takes x's keys and values in.

    Returns:
        f32 `(B, S, H)`, the residual stream after the layer.
    """
    return finish(steps(config, layer, weights, x, capture, past))


def finish(running: Steps) -> Tensor:
    """Run `steps` to its end: the stream after the layer."""
    while True:
        try:
            next(running)
        except StopIteration as done:
            return done.value


def stages(config: ModelConfig, layer: int) -> tuple[tuple[str, ...], ...]:
    """Roles of the linears that run after each stop of `steps`; "router" where it stops before the routing to experts."""
    moe = config.experts(layer)
    if moe is None:
        return ("q", "k", "v"), ("o",), ("gate", "up") if config.gated else ("up",), ("down",)
    shared = (("shared_gate", "shared_up"), ("shared_down",)) if moe.shared_size else ()
    return ("q", "k", "v"), ("o",), ("router",), *shared


def steps(
    config: ModelConfig,
    layer: int,
    weights: Weights,
    x: Tensor,
    capture: Capture | None = None,
    past: Past | None = None,
    residual: Callable[[Tensor], None] | None = None,
) -> Steps:
    """`block` in steps: stops before the linears of each of `stages` and yields their input; they read their weights afterwards.

    Experts run after the last stop. What a stop keeps alive is the residual stream and what was yielded.
    residual is called before the stops for o and down with the stream `(B, S, H)` that their outputs are added to.
    """
    names, linear = config.names, layer_linears(config, layer)

    def apply(role: str, value: Tensor) -> Tensor:
        return _linear(linear[role], weights, value, capture)

    def before(value: Tensor, part: str) -> Tensor:
        return norm(config, weights, value, names.at(layer, part)) if config.pre_norm else value

    def added(value: Tensor, part: str) -> Tensor:
        if config.post_norm:
            value = norm(config, weights, value, names.at(layer, part))
        return value * config.residual_scale

    h = before(x, "attention_norm")
    yield h
    bound = config.clip_qkv or None
    q, k, v = (
        _heads(apply(role, h) if bound is None else apply(role, h).clamp(-bound, bound), config.head_dim) for role in ("q", "k", "v")
    )
    if config.qk_norm:
        q, k = (_head_norm(config, weights, value, names.at(layer, part)) for value, part in ((q, "q_norm"), (k, "k_norm")))
    tables = _tables(config, x.shape[1] if past is None else past.context, config.rope_kind(layer), x.device)
    cos, sin = tables if past is None else (table[past.positions] for table in tables)
    q, k = rotate(q, cos, sin, config.interleaved), rotate(k, cos, sin, config.interleaved)
    if past is None:
        mixed = attend(q, k, v, scale=config.attention_scale, window=config.windows[layer], softcap=config.attention_softcap)
    else:
        mixed = past.attend(layer, q, k, v)
    mixed = mixed.transpose(1, 2).reshape(*x.shape[:2], config.q_size)
    h = h if config.parallel else None
    del q, k, v
    if residual is not None:
        residual(x)
    yield mixed
    x = x + added(apply("o", mixed), "attention_post_norm")
    del mixed
    h = h if h is not None else before(x, "mlp_norm")
    if config.experts(layer) is not None:
        return x + added((yield from _routed_steps(config, layer, weights, h, capture)), "mlp_post_norm")
    yield h
    activation = ACTIVATION_FUNCTIONS[config.activation]
    inner = activation(apply("gate", h)) * apply("up", h) if config.gated else activation(apply("up", h))
    del h
    if residual is not None:
        residual(x)
    yield inner
    return x + added(apply("down", inner), "mlp_post_norm")


@functools.lru_cache(maxsize=8)
def _tables(config: ModelConfig, context: int, kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """`rope_tables` of one sequence of `context` tokens, on a device."""
    with torch.inference_mode(False):  # for whoever comes next
        cos, sin = rope_tables(config, context, context=context, kind=kind)
        return cos.to(device), sin.to(device)


def routed_mlp(config: ModelConfig, layer: int, weights: Weights, h: Tensor, capture: Capture | None = None) -> Tensor:
    """The experts of a sparse layer on the normed stream h f32 `(B, S, H)` -> `(B, S, H)`; arguments as of `block`."""
    return finish(_routed_steps(config, layer, weights, h, capture))


def _routed_steps(config: ModelConfig, layer: int, weights: Weights, h: Tensor, capture: Capture | None) -> Steps:
    moe, linear, names = config.experts(layer), layer_linears(config, layer), config.names
    assert moe is not None, layer
    tokens, shared = h.flatten(0, -2), None
    if capture is not None:
        capture(names.at(layer, "router"), tokens)
    yield tokens
    chosen, weight = route(config, layer, weights, tokens)
    if moe.shared_size:
        result = yield from expert_steps(config, linear, weights, tokens, "", capture, None, before="shared_")
        shared = F.linear(tokens, weights[f"{names.at(layer, 'shared_router')}.weight"].float()).sigmoid() * result
    out = torch.zeros_like(tokens)
    for expert in chosen.unique().tolist():
        rows, place = torch.where(chosen == expert)
        result = finish(expert_steps(config, linear, weights, tokens[rows], f".{expert}", capture, rows))
        out = out.index_add(0, rows, weight[rows, place, None] * result)
    return (out if shared is None else out + shared).view(h.shape)


def route(config: ModelConfig, layer: int, weights: Weights, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Which experts the normed tokens f32 `(n, H)` visit, int64 `(n, top_k)`, and their weights f32 `(n, top_k)`."""
    moe = config.experts(layer)
    assert moe is not None, layer
    probs = F.linear(tokens, weights[f"{config.names.at(layer, 'router')}.weight"].float()).softmax(-1)
    weight, chosen = probs.topk(moe.top_k, -1)
    if moe.renormalize:
        weight = weight / torch.linalg.vector_norm(weight, ord=moe.renormalize, dim=-1, keepdim=True)
    return chosen, weight


def expert_steps(
    config: ModelConfig,
    linears: Mapping[str, Linear],
    weights: Weights,
    x: Tensor,
    after: str,
    capture: Capture | None,
    rows: Tensor | None,
    before: str = "",
) -> Steps:
    """One expert on tokens x `(n, H)` -> `(n, H)`, in steps; its roles are "gate", "up" and "down" between `before` and `after`."""
    gate, up, down = (linears[before + role + after] for role in ("gate", "up", "down"))
    yield x
    inner = ACTIVATION_FUNCTIONS[config.activation](_linear(gate, weights, x, capture, rows)) * _linear(up, weights, x, capture, rows)
    yield inner
    return _linear(down, weights, inner, capture, rows)


def final_norm(config: ModelConfig, weights: Weights, x: Tensor) -> Tensor:
    """The norm before the head."""
    return norm(config, weights, x, config.names.norm)


def head(config: ModelConfig, weights: Weights, x: Tensor, capture: Capture | None = None) -> Tensor:
    """Normed x `(..., H)` -> logits `(..., V)` f32. Without a matrix of its own the head uses the embedding's."""
    own = f"{config.names.head}.weight"
    name = own if own in weights else f"{config.names.embed}.weight"
    if capture is not None:
        capture(config.names.head, x)
    logits = F.linear(x, weights[name].float()) * config.logit_scale
    return config.logit_softcap * torch.tanh(logits / config.logit_softcap) if config.logit_softcap else logits


def logits(config: ModelConfig, weights: Weights, ids: Tensor, past: Past | None = None) -> Tensor:
    """The whole network: ids `(B, S)` int, from the beginning on -> logits `(B, S, V)` f32. past: attends in place of `attend`."""
    x = embed(config, weights, ids)
    for layer in range(config.num_layers):
        x = block(config, layer, weights, x, past=past)
    return head(config, weights, final_norm(config, weights, x))


def _linear(linear: Linear, weights: Weights, x: Tensor, capture: Capture | None, rows: Tensor | None = None) -> Tensor:
    if capture is not None:
        capture(linear.key, x) if rows is None else capture(linear.key, x, rows)
    bias = weights[f"{linear.key}.bias"].float() if linear.bias else None
    return F.linear(x, weights[f"{linear.key}.weight"].float(), bias)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """`(B, S, heads * D)` -> `(B, heads, S, D)`."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


class DenseAttention:
    """Causal attention of rows in plain products, for gradients that are the same every time; `past` of `block`, though nothing is cached.

    On a GPU the fused kernels of torch sum gradients in an order that varies. Its unfused path also computes masked scores, and passes
    over all of them more often. On a CPU its fused kernel takes twice as long as these products.

    Args:
        config: of the model.
        length: tokens of every row, all from position 0 on.
        device: of the rows.
    """

    def __init__(self, config: ModelConfig, length: int, device: torch.device) -> None:
        self._config, self.context = config, length
        self.positions = torch.arange(length, device=device)
        self._masks: dict[tuple[int, ...], Tensor] = {}  # kept as long as this: a recorded step reads them

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As the reference does, `(B, Hq, S, D)`; query heads of a KV head are more queries of it."""
        config, groups, window = self._config, q.shape[1] // k.shape[1], self._config.windows[layer]
        cap, found = config.attention_softcap, []
        q = (q * config.attention_scale).unflatten(1, (k.shape[1], groups))
        for first in range(0, self.context, QUERIES_PER_BLOCK):
            last = min(first + QUERIES_PER_BLOCK, self.context)
            begin = max(0, first - window + 1) if window > 0 else 0
            keys, values = k[:, :, begin:last], v[:, :, begin:last]
            scores = q[:, :, :, first:last].flatten(2, 3) @ keys.transpose(2, 3)
            scores = cap * torch.tanh(scores / cap) if cap else scores
            probabilities = scores.add_(self._mask(begin, first, last, window, groups)).softmax(-1)
            found.append((probabilities @ values).unflatten(2, (groups, last - first)))
        return torch.cat(found, dim=3).flatten(1, 2)

    def _mask(self, begin: int, first: int, last: int, window: int, groups: int) -> Tensor:
        """What keeps queries `first` to `last` of each head from keys that they may not see: f32 `(groups * n, last - begin)`."""
        made = self._masks.get((begin, first, last, window, groups))
        if made is None:
            query, key = self.positions[first:last, None], self.positions[begin:last]
            hidden = (key > query) | (key <= query - window) if window > 0 else key > query
            made = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf).repeat(groups, 1)
            self._masks[begin, first, last, window, groups] = made
        return made

"""The network in plain differentiable torch, fp32, on dense weights: the readable truth, and what the converter runs.

Weights are a mapping from full tensor names ("model.layers.0.self_attn.q_proj.weight") to tensors of any float dtype, in the nn.Linear
layout `(out_features, in_features)`; they are widened where they are used, so a mapping that reads from disk on demand works too.
Shapes: x `(B, S, H)` f32; every sequence starts at position 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import Linear, layer_linears
from exl2nb.model.rope import rope_tables

Weights = Mapping[str, Tensor]
Capture = Callable[[str, Tensor], None]
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def embed(config: ModelConfig, weights: Weights, ids: Tensor) -> Tensor:
    """Rows of the embedding: ids `(B, S)` int -> `(B, S, H)` f32."""
    return F.embedding(ids.long(), weights[f"{config.names.embed}.weight"]).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (j, j + rotary_dim/2) of x `(..., S, D)` by the angles of cos, sin `(S, rotary_dim/2)`; the rest passes."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0, softcap: float = 0.0) -> Tensor:
    """Causal attention: q `(B, Hq, S, D)`, k and v `(B, Hkv, S, D)` -> `(B, Hq, S, D)`."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if not (softcap or 0 < window < q.shape[2]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    position = torch.arange(q.shape[2], device=q.device)
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < (window or q.shape[2]))
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * (scale / softcap))
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def block(config: ModelConfig, layer: int, weights: Weights, x: Tensor, capture: Capture | None = None) -> Tensor:
    """One decoder layer.

    Args:
        config: the model.
        layer: its index; selects names and window.
        weights: at least this layer's tensors.
        x: f32 `(B, S, H)`, the residual stream.
        capture: called with (module key, input) before every linear; q, k and v see the same tensor, gate and up too.

    Returns:
        f32 `(B, S, H)`, the residual stream after the layer.
    """
    linear = layer_linears(config, layer)

    def apply(role: str, value: Tensor) -> Tensor:
        return _linear(linear[role], weights, value, capture)

    h = rms_norm(x, weights[f"{config.names.at(layer, 'attention_norm')}.weight"], config.norm_eps)
    q, k, v = (_heads(apply(role, h), config.head_dim) for role in ("q", "k", "v"))
    cos, sin = (table.to(x.device) for table in rope_tables(config, x.shape[1]))
    softcap, window = config.attention_softcap, config.windows[layer]
    mixed = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, scale=config.attention_scale, window=window, softcap=softcap)
    x = x + apply("o", mixed.transpose(1, 2).reshape(*x.shape[:2], config.q_size))
    h = rms_norm(x, weights[f"{config.names.at(layer, 'mlp_norm')}.weight"], config.norm_eps)
    return x + apply("down", ACTIVATIONS[config.activation](apply("gate", h)) * apply("up", h))


def final_norm(config: ModelConfig, weights: Weights, x: Tensor) -> Tensor:
    """The norm before the head."""
    return rms_norm(x, weights[f"{config.names.norm}.weight"], config.norm_eps)


def head(config: ModelConfig, weights: Weights, x: Tensor, capture: Capture | None = None) -> Tensor:
    """Normed x `(..., H)` -> logits `(..., V)` f32. Without a matrix of its own the head uses the embedding's."""
    own = f"{config.names.head}.weight"
    name = own if own in weights else f"{config.names.embed}.weight"
    if capture is not None:
        capture(config.names.head, x)
    logits = F.linear(x, weights[name].float())
    return config.logit_softcap * torch.tanh(logits / config.logit_softcap) if config.logit_softcap else logits


def logits(config: ModelConfig, weights: Weights, ids: Tensor) -> Tensor:
    """The whole network: ids `(B, S)` int -> logits `(B, S, V)` f32."""
    x = embed(config, weights, ids)
    for layer in range(config.num_layers):
        x = block(config, layer, weights, x)
    return head(config, weights, final_norm(config, weights, x))


def _linear(linear: Linear, weights: Weights, x: Tensor, capture: Capture | None) -> Tensor:
    if capture is not None:
        capture(linear.key, x)
    bias = weights[f"{linear.key}.bias"].float() if linear.bias else None
    return F.linear(x, weights[f"{linear.key}.weight"].float(), bias)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """`(B, S, heads * D)` -> `(B, heads, S, D)`."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)

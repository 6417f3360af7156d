"""Which matrices and vectors a model has, with their shapes: what the loader expects, the converter walks and messages name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from exl2nb.model.config import ModelConfig


@dataclass(frozen=True)
class Linear:
    """One linear layer: `key` in the files; its role; layer index (-1: not in the stack).

    role: "q", "k", "v", "o", "gate", "up", "down", "head"; of expert 7 "gate.7", "up.7", "down.7"; of the expert that every token visits
    "shared_gate", "shared_up", "shared_down".
    """

    key: str
    role: str
    layer: int
    in_features: int
    out_features: int
    bias: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Shape `(out_features, in_features)` of the dense `.weight`."""
        return self.out_features, self.in_features


ATTENTION_ROLES = ("q", "k", "v", "o")
MLP_ROLES = ("gate", "up", "down")


def role_groups(roles: Iterable[str]) -> list[list[str]]:
    """The roles of a layer, parted into what must be quantised together or not at all (FORMAT: "Granularity"): attention, each MLP."""
    found: dict[str, list[str]] = {}
    for role in roles:
        stem, _, expert = role.partition(".")
        found.setdefault("q" if stem in ATTENTION_ROLES else expert or stem.rpartition("_")[0], []).append(role)
    return list(found.values())


def layer_linears(config: ModelConfig, layer: int) -> dict[str, Linear]:
    """The linears of one layer by role, in the order in which they run; an ungated MLP has no "gate". The router is not among them."""
    hidden, inner, moe = config.hidden_size, config.intermediate_size, config.experts(layer)
    shapes = {
        "q": (hidden, config.q_size, config.qkv_bias),
        "k": (hidden, config.kv_size, config.qkv_bias),
        "v": (hidden, config.kv_size, config.qkv_bias),
        "o": (config.q_size, hidden, config.o_bias),
    }
    if moe is None:
        shapes |= _mlp_linears(hidden, inner, bias=config.mlp_bias)
    else:
        for expert in range(moe.num_experts):
            shapes |= _mlp_linears(hidden, moe.intermediate_size, after=f".{expert}")
        if moe.shared_size:
            shapes |= _mlp_linears(hidden, moe.shared_size, before="shared_")
    if not config.gated:
        del shapes["gate"]
    return {role: Linear(config.names.at(layer, role), role, layer, k, n, bias) for role, (k, n, bias) in shapes.items()}


def _mlp_linears(hidden: int, inner: int, *, bias: bool = False, before: str = "", after: str = "") -> dict[str, tuple[int, int, bool]]:
    shapes = {"gate": (hidden, inner, bias), "up": (hidden, inner, bias), "down": (inner, hidden, bias)}
    return {before + role + after: shape for role, shape in shapes.items()}


def head_linear(config: ModelConfig) -> Linear:
    """The output head."""
    return Linear(config.names.head, "head", -1, config.hidden_size, config.vocab_size, False)


def model_linears(config: ModelConfig) -> list[Linear]:
    """Every linear of the model in running order, the head last."""
    stack = [linear for layer in range(config.num_layers) for linear in layer_linears(config, layer).values()]
    return [*stack, head_linear(config)]


def layer_norms(config: ModelConfig) -> tuple[str, ...]:
    """The norms of a layer over the hidden size, as fields of `Names`, in running order."""
    before = () if not config.pre_norm else ("attention_norm",) if config.parallel else ("attention_norm", "mlp_norm")
    return (*before, *(("attention_post_norm", "mlp_post_norm") if config.post_norm else ()))


def _norm(config: ModelConfig, key: str) -> dict[str, tuple[int, ...]]:
    shape = {f"{key}.weight": (config.hidden_size,)}
    return {**shape, f"{key}.bias": (config.hidden_size,)} if config.norm_bias else shape


def layer_vectors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Tensors of one layer that are never quantised, linear biases aside: full name -> shape.

    Head norms have the shape that EXL2 files give them, one row per head; `accepted_shapes` lists the others. Routers are here too.
    """
    found: dict[str, tuple[int, ...]] = {}
    for part in layer_norms(config):
        found |= _norm(config, config.names.at(layer, part))
    if config.qk_norm:
        for part, heads in (("q_norm", config.num_heads), ("k_norm", config.num_kv_heads)):
            full = config.qk_norm == "full"
            found[f"{config.names.at(layer, part)}.weight"] = (heads * config.head_dim,) if full else (heads, config.head_dim)
    moe = config.experts(layer)
    if moe is not None:
        found[f"{config.names.at(layer, 'router')}.weight"] = (moe.num_experts, config.hidden_size)
        if moe.shared_size:
            found[f"{config.names.at(layer, 'shared_router')}.weight"] = (1, config.hidden_size)
    return found


def accepted_shapes(config: ModelConfig, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Shapes that a vector of `vector_shapes` may have in the files: head norms also as one row for all heads."""
    return (shape, (config.head_dim,)) if len(shape) == 2 and config.qk_norm == "head" and shape[1] == config.head_dim else (shape,)


def end_vectors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The same outside the layers: embedding, learned positions, last norm."""
    names = config.names
    found: dict[str, tuple[int, ...]] = {f"{names.embed}.weight": (config.vocab_size, config.hidden_size)}
    if config.learned_positions:
        found[f"{names.positions}.weight"] = (config.max_position_embeddings, config.hidden_size)
    return {**found, **_norm(config, names.norm)}


def vector_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model that is never quantised, linear biases aside: full name -> shape."""
    found = end_vectors(config)
    for layer in range(config.num_layers):
        found |= layer_vectors(config, layer)
    return found

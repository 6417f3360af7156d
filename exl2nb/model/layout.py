"""Which matrices and vectors a model has, with their shapes: what the loader expects, the converter walks and messages name."""

from __future__ import annotations

from dataclasses import dataclass

from exl2nb.model.config import ModelConfig


@dataclass(frozen=True)
class Linear:
    """One linear layer: `key` in the files; role "q", "k", "v", "o", "gate", "up", "down" or "head"; layer index (-1: not in the stack)."""

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


# matrices that must be quantised together or not at all (FORMAT: "Granularity"), and that share one input
ATTENTION, MLP = ("q", "k", "v", "o"), ("gate", "up", "down")


def layer_linears(config: ModelConfig, layer: int) -> dict[str, Linear]:
    """The linears of one layer by role, in the order in which they run."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {
        "q": (hidden, config.q_size, config.qkv_bias),
        "k": (hidden, config.kv_size, config.qkv_bias),
        "v": (hidden, config.kv_size, config.qkv_bias),
        "o": (config.q_size, hidden, config.o_bias),
        "gate": (hidden, inner, config.mlp_bias),
        "up": (hidden, inner, config.mlp_bias),
        "down": (inner, hidden, config.mlp_bias),
    }
    return {role: Linear(config.names.at(layer, role), role, layer, k, n, bias) for role, (k, n, bias) in shapes.items()}


def head_linear(config: ModelConfig) -> Linear:
    """The output head."""
    return Linear(config.names.head, "head", -1, config.hidden_size, config.vocab_size, False)


def linears(config: ModelConfig) -> list[Linear]:
    """Every linear of the model in running order, the head last."""
    stack = [linear for layer in range(config.num_layers) for linear in layer_linears(config, layer).values()]
    return [*stack, head_linear(config)]


def vectors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that are never quantised, biases aside: full name -> shape."""
    names, hidden = config.names, (config.hidden_size,)
    norms = {f"{names.at(i, part)}.weight": hidden for i in range(config.num_layers) for part in ("attention_norm", "mlp_norm")}
    return {f"{names.embed}.weight": (config.vocab_size, config.hidden_size), **norms, f"{names.norm}.weight": hidden}

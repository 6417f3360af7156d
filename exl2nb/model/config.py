"""What a model is: sizes and features as plain, checked data. Knows no architecture by name; `archs/` fills it in."""

from __future__ import annotations

from dataclasses import dataclass, field

from exl2nb.core.errors import ConfigError
from exl2nb.model.names import Names
from exl2nb.model.rope import MAX_CONTEXT, RopeConfig

# hidden_act in config.json: activation of the ops
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}

# field: (key in config.json, lowest, highest). The upper ends are far above any published model and low enough that a product of two fits
# in 64 bits, so that an absurd config fails here by name and not in an allocation.
LIMITS: dict[str, tuple[str, int, int]] = {
    "vocab_size": ("vocab_size", 1, 1 << 22),
    "hidden_size": ("hidden_size", 8, 1 << 16),
    "intermediate_size": ("intermediate_size", 8, 1 << 18),
    "num_layers": ("num_hidden_layers", 1, 1024),
    "num_heads": ("num_attention_heads", 1, 1024),
    "num_kv_heads": ("num_key_value_heads", 1, 1024),
    "head_dim": ("head_dim", 8, 256),
    "max_position_embeddings": ("max_position_embeddings", 1, MAX_CONTEXT),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder, described by features.

    architecture: class name from `architectures`. Sizes as in LIMITS. norm_eps: of every RMSNorm. qkv_bias, o_bias, mlp_bias: which linears
    carry a bias. tie_word_embeddings: the head may use the embedding's matrix. activation: of the gate, as the ops call it.
    windows: per layer, tokens a query sees including itself; 0 = all. attention_scale: factor on q.k.
    attention_softcap, logit_softcap: c * tanh(x / c); 0 = none. quant_method: what `quantization_config` names ("exl2"), or None.

    Raises:
        ConfigError: a size out of range, or sizes that do not fit each other.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int, ...]
    attention_scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    activation: str = "silu"
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    quant_method: str | None = None
    names: Names = field(default_factory=Names)

    def __post_init__(self) -> None:
        for name, (key, low, high) in LIMITS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{key} is {value!r}; expected an integer from {low} to {high}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}; "
                "every KV head must serve the same number of query heads"
            )
        if self.head_dim % 8:
            raise ConfigError(
                f"config.json: head_dim is {self.head_dim}; expected a multiple of 8, which is what the attention kernels read"
            )
        if len(self.windows) != self.num_layers:
            raise ConfigError(f"{len(self.windows)} layers have a window; expected num_hidden_layers {self.num_layers}")
        assert self.activation in ACTIVATIONS.values(), self.activation

    @property
    def q_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_size(self) -> int:
        """Outputs of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Outputs of the key (or value) projection."""
        return self.num_kv_heads * self.head_dim

"""What a model is: sizes and features as plain, checked data. Knows no architecture by name; `archs/` fills it in."""

from __future__ import annotations

from dataclasses import dataclass, field

from exl2nb.core.errors import ConfigError
from exl2nb.core.show import facts
from exl2nb.model.rope import MAX_CONTEXT, RopeConfig
from exl2nb.quant.gptq_format import GptqSpec


@dataclass(frozen=True, kw_only=True)
class Names:
    """Keys without the suffix (`.weight`, `.bias`, `.q_weight` ...); those below `layer` are relative to it.

    Parts that an architecture lacks are never asked for: q_norm and k_norm without head norms, the post norms without `post_norm`,
    mlp_norm where attention and MLP share one, gate in an ungated MLP, positions without learned positions, router and experts in a
    layer without them. In the keys of experts {} is the expert.
    """

    embed: str = "model.embed_tokens"
    positions: str = "model.wpe"
    layer: str = "model.layers.{}"
    norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    mlp_post_norm: str = ""
    router: str = "mlp.gate"
    expert_gate: str = "mlp.experts.{}.gate_proj"
    expert_up: str = "mlp.experts.{}.up_proj"
    expert_down: str = "mlp.experts.{}.down_proj"
    shared_router: str = "mlp.shared_expert_gate"
    shared_gate: str = "mlp.shared_expert.gate_proj"
    shared_up: str = "mlp.shared_expert.up_proj"
    shared_down: str = "mlp.shared_expert.down_proj"

    def at(self, layer: int, part: str) -> str:
        """Full key of one part (a field name such as "q", or "gate.7" for that of expert 7) of layer `layer`.

        Example:
            >>> Names().at(3, "q"), Names().at(0, "up.2")
            ('model.layers.3.self_attn.q_proj', 'model.layers.0.mlp.experts.2.up_proj')
        """
        part, _, expert = part.partition(".")
        key = getattr(self, f"expert_{part}").format(expert) if expert else getattr(self, part)
        return f"{self.layer.format(layer)}.{key}"


@dataclass(frozen=True, kw_only=True)
class Files:
    """How a checkpoint's tensors become those of `Names`; EXL2 files have them already.

    renames: (old, new) replaced in every name, in order. fused: (key below the layer, roles) of matrices that hold several side by side.
    grouped: a fused q, k, v interleaves them per KV head (the q_per_kv query heads, then k, then v). transposed: matrices are stored
    `(in, out)`. stacked: (key below the layer, role, turned) of tensors that hold one role of all experts, a block of rows each; turned:
    the blocks are stored `(in, out)`. unit_head: the head's rows are normalised when a plain one is read. ignored: shell patterns of
    names that are not ours (after the renames), such as old buffers. passed: the same for what a converted model keeps as it is, such as a
    vision tower.
    """

    renames: tuple[tuple[str, str], ...] = ()
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    grouped: bool = False
    transposed: bool = False
    stacked: tuple[tuple[str, str, bool], ...] = ()
    unit_head: bool = False
    ignored: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MoE:
    """The experts of a model; all sparse layers are alike.

    num_experts: in each sparse layer. top_k: experts that a token visits. intermediate_size: of one expert. layers: which layers are
    sparse; the others have the plain MLP. renormalize: the probabilities of the chosen experts (softmax over all of them) are divided by
    their norm of this order; 0 = not, 1 = they sum to 1, which is also what a softmax over the chosen ones alone gives. shared_size:
    intermediate size of an expert that every token visits, weighted by a sigmoid; 0 = none.

    Raises:
        ConfigError: a token is to visit more experts than there are.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    layers: tuple[bool, ...]
    renormalize: float = 0.0
    shared_size: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(f"num_experts_per_tok is {self.top_k}; expected 1 to num_experts {self.num_experts}")


@dataclass(frozen=True, kw_only=True)
class MRope:
    """RoPE with three positions per token: time, height and width of a patch of a picture; a text's three are equal.

    sections: how many of a head's frequencies each of them turns. interleaved: the axes take turns over the frequencies (Qwen3-VL);
    otherwise they stand side by side.

    Raises:
        ConfigError: not three numbers of 1 or more.
    """

    sections: tuple[int, int, int]
    interleaved: bool = False

    def __post_init__(self) -> None:
        if len(self.sections) != 3 or any(type(n) is not int or not 1 <= n <= 256 for n in self.sections):
            raise ConfigError(f"mrope_section is {self.sections!r}; expected three numbers from 1 to 256")

    def axes(self) -> list[int]:
        """The axis of each frequency: 0 time, 1 height, 2 width."""
        if not self.interleaved:
            return [axis for axis, count in enumerate(self.sections) for _ in range(count)]
        axes = [0] * sum(self.sections)
        for axis in (1, 2):
            for at in range(axis, min(3 * self.sections[axis], len(axes)), 3):
                axes[at] = axis
        return axes


MAX_EXPERTS = 1024


# hidden_act in config.json: activation of the ops
ACTIVATION_NAMES = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}

# field: (key in config.json, lowest, highest). The upper ends are far above any published model and low enough that a product of two fits
# in 64 bits, so that an absurd config fails here by name and not in an allocation.
SIZE_LIMITS: dict[str, tuple[str, int, int]] = {
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

    architecture: class name from `architectures`. Sizes as in SIZE_LIMITS. norm_eps: of every RMSNorm. qkv_bias, o_bias, mlp_bias: which
    linears carry a bias. tie_word_embeddings: the head may use the embedding's matrix. activation: of the gate, as the ops call it.
    windows: per layer, tokens a query sees including itself; 0 = all. attention_scale: factor on q.k.
    attention_softcap, logit_softcap: c * tanh(x / c); 0 = none. quant_method: what `quantization_config` names ("exl2", "gptq"), or None;
    gptq: what it says of a GPTQ checkpoint.

    What most decoders do is the default of the rest. norm: "rms" or "layer" (LayerNorm); norm_bias: it has one. norm_offset: added to every
    norm's weight. pre_norm: norms before attention and MLP; post_norm: RMS norms on their results, before these are added. parallel:
    attention and MLP read the same normed input. qk_norm: "head" (each head of q and k) or "full" (all heads together). gated: the MLP is
    act(gate) * up, otherwise act(up). embed_scale, residual_scale, logit_scale: factors on the embedding, on what attention and MLP add,
    and on the logits. learned_positions: a table of positions is added to the embedding. interleaved: RoPE pairs are (2 i, 2 i + 1).
    rope_kinds: per layer "main" (`rope`), "local" (`local_rope`) or "none"; empty = all main. clip_qkv: q, k, v are cut to +-this; 0 = not.
    moe: experts in place of the MLP of some layers, or None. mrope: three positions per token, or None. sees_whole: the tokens of a picture
    see each other, later ones too. context_limit: longest sequence that is computed correctly, 0 = no such limit; context_limit_reason: the
    key of config.json that changes the result beyond it.

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
    gptq: GptqSpec | None = None
    names: Names = field(default_factory=Names)
    files: Files = field(default_factory=Files)
    norm: str = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False
    qk_norm: str = ""
    gated: bool = True
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    learned_positions: bool = False
    interleaved: bool = False
    local_rope: RopeConfig | None = None
    rope_kinds: tuple[str, ...] = ()
    clip_qkv: float = 0.0
    moe: MoE | None = None
    mrope: MRope | None = None
    sees_whole: bool = False
    context_limit: int = 0
    context_limit_reason: str = ""

    def __post_init__(self) -> None:
        for name, (key, low, high) in SIZE_LIMITS.items():
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
        assert self.activation in ACTIVATION_NAMES.values(), self.activation
        assert self.norm == "rms" or (self.norm == "layer" and not self.post_norm), "post norms are RMS norms"
        assert self.qk_norm in ("", "head", "full"), self.qk_norm
        assert len(self.rope_kinds) in (0, self.num_layers), "one kind of RoPE per layer"
        assert self.moe is None or (len(self.moe.layers) == self.num_layers and self.gated and not self.parallel), "experts are gated"
        if self.mrope is not None and len(self.mrope.axes()) != self.rope.rotary_dim // 2:
            half = self.rope.rotary_dim // 2
            raise ConfigError(f"mrope_section is {list(self.mrope.sections)}; expected numbers that sum to half of head_dim, {half}")
        assert self.local_rope is not None or "local" not in self.rope_kinds, "local layers need a local RoPE"

    def __repr__(self) -> str:
        return (
            f"ModelConfig({self.architecture}: {self.num_layers} layers, hidden size {self.hidden_size}, {self.num_heads} heads of "
            f"{self.head_dim}, {self.num_kv_heads} of them with keys and values, vocabulary {self.vocab_size})"
        )

    def _repr_html_(self) -> str:
        from exl2nb.model.facts import unusual_features

        experts = f"; {self.moe.num_experts} experts, {self.moe.top_k} a token" if self.moe is not None else ""
        rows = {
            "layers": str(self.num_layers),
            "hidden size": str(self.hidden_size),
            "attention": f"{self.num_heads} heads of {self.head_dim}; {self.num_kv_heads} with keys and values",
            "MLP": f"{self.intermediate_size}, {self.activation}{experts}",
            "vocabulary": f"{self.vocab_size} tokens",
            "positions": str(self.max_position_embeddings),
        }
        if notable := unusual_features(self):
            rows["unusual"] = "; ".join(notable)
        return facts(self.architecture, rows)

    def rope_kind(self, layer: int) -> str:
        """Which RoPE a layer uses: "main", "local" or "none"."""
        return self.rope_kinds[layer] if self.rope_kinds else "main"

    def experts(self, layer: int) -> MoE | None:
        """The experts of a layer; None where it has a plain MLP."""
        return self.moe if self.moe is not None and self.moe.layers[layer] else None

    def check_context(self, tokens: int) -> None:
        """Refuse sequences that are longer than this library computes correctly.

        Args:
            tokens: The longest sequence that is asked for.

        Raises:
            ConfigError: It is longer than `context_limit`.
        """
        if self.context_limit and tokens > self.context_limit:
            raise ConfigError(
                f"{self.architecture}: context is {tokens} tokens; expected at most {self.context_limit}. {self.context_limit_reason}; "
                f"exl2nb does not implement that. Use context={self.context_limit} or less, or run longer texts with Transformers"
            )

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

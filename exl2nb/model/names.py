"""Names in a decoder's files: the module keys we use, and how a checkpoint that names or packs its tensors otherwise is read."""

from __future__ import annotations

from dataclasses import dataclass


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

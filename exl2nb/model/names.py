"""Module keys of a decoder, as they stand in its files. An architecture that names them otherwise replaces fields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Names:
    """Keys without the suffix (`.weight`, `.bias`, `.q_weight` ...); those below `layer` are relative to it."""

    embed: str = "model.embed_tokens"
    layer: str = "model.layers.{}"
    norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"

    def at(self, layer: int, part: str) -> str:
        """Full key of one part (a field name such as "q") of layer `layer`.

        Example:
            >>> Names().at(3, "q")
            'model.layers.3.self_attn.q_proj'
        """
        return f"{self.layer.format(layer)}.{getattr(self, part)}"

"""Phi-3, Phi-3.5 and Phi-4: Llama with fused q, k, v and gate, up; longrope; Phi-4 mini rotates a part of each head."""

from collections.abc import Mapping
from typing import Any

from exl2nb.model.archs.architecture import ARCHS, Architecture
from exl2nb.model.archs.mistral import mistral_windows
from exl2nb.model.config import Files
from exl2nb.model.config_fields import Fields
from exl2nb.model.rope import RopeConfig


def phi_rope(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """The published files say "su" or "yarn" for what is longrope."""
    raw = dict(fields.raw)
    for key in ("rope_scaling", "rope_parameters"):
        own = fields.child(key)
        for name in ("rope_type", "type"):
            if own is not None and own.text(name, default=None) == "yarn":
                raw[key] = {**own.raw, "rope_type": "longrope"}
    raw.setdefault("original_max_position_embeddings", 4096)
    read = Fields(raw, fields.where)
    return {"rope": RopeConfig.read(read, head_dim=sizes["head_dim"], max_positions=sizes["max_position_embeddings"], partial=True)}


ARCHS.register("Phi3ForCausalLM")(
    Architecture(
        model_type="phi3",
        windows=mistral_windows,
        defaults={"max_position_embeddings": 4096},
        eps=1e-5,
        files=Files(fused=(("self_attn.qkv_proj", ("q", "k", "v")), ("mlp.gate_up_proj", ("gate", "up")))),
        read=phi_rope,
        reads="sliding_window",
        neutral={"full_attn_mod": (1,), "interpolate_factor": (1,)},
    )
)

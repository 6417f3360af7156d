"""Qwen 1 to 3, dense and with experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exl2nb.model.archs.architecture import ARCHS, Architecture, Features, layer_kinds, no_window
from exl2nb.model.config import MAX_EXPERTS, Files, MoE, MRope
from exl2nb.model.config_fields import ROPE_KEYS, Fields
from exl2nb.model.rope import MAX_CONTEXT


# Qwen 1: Qwen2 under other names, q, k and v fused; its context ends where its own scaling of RoPE and scores would begin.
def qwen_features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """`intermediate_size` counts gate and up together; `seq_length` is where the scaling of RoPE and scores would begin."""
    size, length = sizes["intermediate_size"], fields.integer("seq_length", low=1, high=MAX_CONTEXT)
    if size % 2:
        raise fields.refuse("intermediate_size", size, "an even number: gate and up together")
    scaled = [key for key in ("use_dynamic_ntk", "use_logn_attn") if fields.flag(key, default=True)]
    if not scaled:
        return {"intermediate_size": size // 2}
    return {
        "intermediate_size": size // 2,
        "max_position_embeddings": min(length, sizes["max_position_embeddings"]),
        "context_limit": length,
        "context_limit_reason": f"Beyond it, {' and '.join(scaled)} change the rotation or the scores",
    }


ARCHS.register("QWenLMHeadModel")(
    Architecture(
        model_type="qwen",
        qkv_bias=True,
        defaults={"seq_length": 8192},
        files=Files(
            renames=(
                ("transformer.wte.", "model.embed_tokens."),
                ("transformer.ln_f.", "model.norm."),
                ("transformer.h.", "model.layers."),
                (".attn.c_proj.", ".self_attn.o_proj."),
                (".attn.", ".self_attn."),
                (".ln_1.", ".input_layernorm."),
                (".ln_2.", ".post_attention_layernorm."),
                (".mlp.w1.", ".mlp.up_proj."),
                (".mlp.w2.", ".mlp.gate_proj."),
                (".mlp.c_proj.", ".mlp.down_proj."),
            ),
            fused=(("self_attn.c_attn", ("q", "k", "v")),),
        ),
        keys={"head_dim": "kv_channels", "max_position_embeddings": "seq_length", "rope_theta": "rotary_emb_base"},
        eps_key="layer_norm_epsilon",
        read=qwen_features,
        reads="use_dynamic_ntk use_logn_attn",
        neutral={"no_bias": (True,), "rotary_pct": (1,), "scale_attn_weights": (True,)},
    )
)


# Qwen 1.5, 2 and 2.5: biases on q, k and v; a window on the upper layers where the config switches it on.


def read_sliding_window(fields: Fields) -> int:
    """`sliding_window` where `use_sliding_window` switches it on, else 0."""
    used = fields.flag("use_sliding_window", default=False)
    return fields.integer("sliding_window", low=1, high=MAX_CONTEXT, default=4096) if used else 0


WINDOW_KEYS = "use_sliding_window sliding_window max_window_layers"


def qwen2_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """`layer_types` says which layers slide; without it, those from `max_window_layers` on."""
    size, first = read_sliding_window(fields), fields.integer("max_window_layers", low=0, high=1 << 20, default=28)
    slides = layer_kinds(fields, num_layers, lambda i: bool(size) and i >= first)
    if not size and any(slides):
        raise fields.refuse("layer_types", fields.raw["layer_types"], "no sliding_attention while use_sliding_window is false")
    return tuple(size if slide else 0 for slide in slides)


ARCHS.register("Qwen2ForCausalLM")(
    Architecture(
        model_type="qwen2",
        qkv_bias=True,
        windows=qwen2_windows,
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
        reads=WINDOW_KEYS,
        ignored="attention_bias",  # the class has its biases anyway, and the tensors show them
    )
)


# Qwen 1.5 and 2 MoE: Qwen2 with small experts and a shared expert that every token visits, weighted by a sigmoid.
MAX_SIZE = 1 << 18
EXPERT_KEYS = "num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers"


def qwen2_moe_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """`layer_types` says which layers slide; without it, every second one below `max_window_layers`."""
    size, first = read_sliding_window(fields), fields.integer("max_window_layers", low=0, high=1 << 20, default=28)
    slides = layer_kinds(fields, num_layers, lambda i: bool(size) and i % 2 == 0 and i < first)
    return tuple(size if slide else 0 for slide in slides)


def sparse_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer has experts, those in `mlp_only_layers` never."""
    step = fields.integer("decoder_sparse_step", low=1, high=1 << 20, default=1)
    plain = fields.raw.get("mlp_only_layers") or []
    if not isinstance(plain, list) or any(type(i) is not int or not 0 <= i < num_layers for i in plain):
        raise fields.refuse("mlp_only_layers", plain, f"a list of layers from 0 to {num_layers - 1}")
    return tuple(i not in plain and (i + 1) % step == 0 for i in range(num_layers))


def qwen_experts(fields: Fields, sizes: Mapping[str, int], *, shared: bool = True) -> Mapping[str, Any]:
    """Routing as the config says; a model whose config has no experts is a dense one."""
    count = fields.integer("num_experts", low=0, high=MAX_EXPERTS)
    layers = sparse_layers(fields, sizes["num_layers"])
    if count == 0 or not any(layers):
        return {}
    return {
        "moe": MoE(
            num_experts=count,
            top_k=fields.integer("num_experts_per_tok", low=1, high=count),
            intermediate_size=fields.integer("moe_intermediate_size", low=8, high=MAX_SIZE),
            layers=layers,
            renormalize=float(fields.flag("norm_topk_prob", default=False)),
            shared_size=fields.integer("shared_expert_intermediate_size", low=8, high=MAX_SIZE) if shared else 0,
        )
    }


ARCHS.register("Qwen2MoeForCausalLM")(
    Architecture(
        model_type="qwen2_moe",
        qkv_bias="qkv_bias",
        windows=qwen2_moe_windows,
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        read=qwen_experts,
        reads=f"{WINDOW_KEYS} {EXPERT_KEYS} shared_expert_intermediate_size",
    )
)


# Qwen3: Qwen2 without biases, with an RMS norm on every head of q and k.
ARCHS.register("Qwen3ForCausalLM")(
    Architecture(
        model_type="qwen3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windows=qwen2_windows,
        defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
        fixed={"qk_norm": "head"},
        reads=WINDOW_KEYS,
    )
)


# Qwen3 MoE: Qwen3 with experts, none of them shared; the same window on every layer.


def qwen3_moe_features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """Old files call the experts `num_experts`, newer ones may say `num_local_experts`."""
    raw = dict(fields.raw)
    raw["num_experts"] = raw.get("num_experts", raw.get("num_local_experts", 128))
    return qwen_experts(Fields(raw, fields.where), sizes, shared=False)


ARCHS.register("Qwen3MoeForCausalLM")(
    Architecture(
        model_type="qwen3_moe",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windows=lambda fields, num_layers: (read_sliding_window(fields),) * num_layers,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        fixed={"qk_norm": "head"},
        read=qwen3_moe_features,
        reads=f"use_sliding_window sliding_window num_local_experts {EXPERT_KEYS}",
    )
)


# Qwen2-VL, Qwen2.5-VL and Qwen3-VL: the text models with three positions per token. Published files of the first two keep the decoder's
# keys at the top of config.json, those that Transformers writes under `text_config`.
VISION_FILES = Files(
    renames=(("model.language_model.", "model."), ("model.visual.", "visual."), ("language_model.lm_head.", "lm_head.")),
    passed=("visual.*",),
)


def _mrope_sections(fields: Fields, default: list[int]) -> tuple[int, ...]:
    own = fields.child("rope_scaling") or fields.child("rope_parameters") or Fields({}, fields.where)
    found = own.raw.get("mrope_section", default)
    if not isinstance(found, list) or len(found) != 3 or any(type(n) is not int for n in found):
        raise own.refuse("mrope_section", found, "a list of three whole numbers")
    return tuple(found)


def qwen2_vl_features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """How a head's frequencies are shared among time, height and width."""
    time, height, width = _mrope_sections(fields, [16, 24, 24])
    return {"mrope": MRope(sections=(time, height, width))}


def qwen3_vl_features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """The same, interleaved."""
    time, height, width = _mrope_sections(fields, [24, 20, 20])
    return {"mrope": MRope(sections=(time, height, width), interleaved=True)}


def _vision_language(text: str, model_type: str, read: Features, defaults: Mapping[str, Any], **changes: Any) -> Architecture:
    return replace(
        ARCHS[text],
        model_type=model_type,
        text_key="text_config",
        flat=True,
        files=VISION_FILES,
        read=read,
        defaults={**ARCHS[text].defaults, **defaults},
        inner_types=(f"{model_type}_text", model_type),
        **changes,
    )


# Files leave out of `text_config` whatever is a default of its class.
QWEN2_VL_TEXT = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
}
QWEN3_VL_TEXT = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 128000,
    "rope_theta": 5e5,
}


ARCHS.register("Qwen2VLForConditionalGeneration")(_vision_language("Qwen2ForCausalLM", "qwen2_vl", qwen2_vl_features, QWEN2_VL_TEXT))
ARCHS.register("Qwen2_5_VLForConditionalGeneration")(_vision_language("Qwen2ForCausalLM", "qwen2_5_vl", qwen2_vl_features, QWEN2_VL_TEXT))
ARCHS.register("Qwen3VLForConditionalGeneration")(
    _vision_language(
        "Qwen3ForCausalLM",
        "qwen3_vl",
        qwen3_vl_features,
        QWEN3_VL_TEXT,
        # this class has no window; files keep the keys of Qwen3
        windows=no_window,
        reads="",
        neutral={"use_sliding_window": (False,)},
        rope_keys=replace(ROPE_KEYS, neutral={**ROPE_KEYS.neutral, "mrope_interleaved": (True,)}),
    )
)

"""A tiny random model of every architecture, as Transformers writes it.

Where Transformers has no class of that name the table names the one that computes the same, and an export that gives its tensors and config
the names of the real files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl2nb.io.safetensors import save as save_tensors
from exl2nb.model.archs import parse_config
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import layer_linears, model_linears
from exl2nb.model.store import open_store

from .tiny import BASE, random_exl2, randomize, raw_config

Tensors = dict[str, Tensor]
Export = Callable[[Tensors, dict[str, Any]], tuple[Tensors, dict[str, Any]]]

# (query heads, KV heads, head_dim, intermediate, vocabulary) of each seed; EXL2 needs multiples of 32, so only the first can be quantised
SIZES = [(4, 2, 16, 96, 131), (4, 1, 24, 52, 77), (3, 3, 24, 40, 257)]
GPT_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}


@dataclass(frozen=True)
class Tiny:
    """arch: the name in `architectures`. model, config: Transformers classes. changes: to the config. export: see above.

    text: config class of the decoder, where it is a part of a larger config, beside `vision`. keys: of the config, where they are unusual.
    """

    arch: str
    model: str
    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    export: Export | None = None
    text: str = ""
    keys: dict[str, str] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=lambda: VISION)


def tiny(arch: str, stem: str = "", export: Export | None = None, **changes: Any) -> Tiny:
    """The usual case: classes `<stem>ForCausalLM` and `<stem>Config`."""
    stem = stem or arch.removesuffix("ForCausalLM")
    return Tiny(arch, f"{stem}ForCausalLM", f"{stem}Config", changes, export)


def _named(arch: str, renames: dict[str, str], **changes: Any) -> Export:
    """An export that renames parts of tensor names and changes the config (None removes a key)."""

    def export(tensors: Tensors, raw: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        out = {}
        for name, tensor in tensors.items():
            for old, new in renames.items():
                name = name.replace(old, new)
            out[name] = tensor
        raw = {key: value for key, value in {**raw, "architectures": [arch], **changes}.items() if value is not None}
        return out, raw

    return export


def _internlm2(tensors: Tensors, raw: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    heads, kv, hidden = raw["num_attention_heads"], raw["num_key_value_heads"], raw["hidden_size"]
    for layer in range(raw["num_hidden_layers"]):
        stem = f"model.layers.{layer}.self_attn"
        q, k, v = (tensors.pop(f"{stem}.{part}_proj.weight") for part in "qkv")
        parts = [part.view(kv, -1, hidden) for part in (q, k, v)]
        tensors[f"{stem}.wqkv.weight"] = torch.cat(parts, 1).view(-1, hidden)
    assert heads % kv == 0
    renames = {
        "lm_head.": "output.", "model.embed_tokens.": "model.tok_embeddings.", ".self_attn.": ".attention.", ".o_proj.": ".wo.",
        "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    return _named("InternLM2ForCausalLM", renames, bias=False)(tensors, raw)


def _minicpm(tensors: Tensors, raw: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    changes = {
        "scale_emb": raw["embedding_multiplier"],
        "scale_depth": raw["residual_multiplier"] * raw["num_hidden_layers"] ** 0.5,
        "dim_model_base": round(raw["hidden_size"] / raw["logits_scaling"]),
        **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")),
    }
    return _named("MiniCPMForCausalLM", {}, **changes)(tensors, raw)


def _index(tensors: Tensors, raw: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    rows = torch.rand(raw["vocab_size"], 1, generator=torch.Generator().manual_seed(0)) + 0.1
    return _named("IndexForCausalLM", {})({**tensors, "lm_head.weight": tensors["lm_head.weight"] * rows}, raw)


def _qwen(tensors: Tensors, raw: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    for layer in range(raw["num_hidden_layers"]):
        stem = f"model.layers.{layer}.self_attn"
        for suffix in ("weight", "bias"):
            tensors[f"{stem}.c_attn.{suffix}"] = torch.cat([tensors.pop(f"{stem}.{part}_proj.{suffix}") for part in "qkv"])
    renames = {
        "model.embed_tokens.": "transformer.wte.", "model.norm.": "transformer.ln_f.", "model.layers.": "transformer.h.",
        ".self_attn.o_proj.": ".attn.c_proj.", ".self_attn.": ".attn.", ".input_layernorm.": ".ln_1.",
        ".post_attention_layernorm.": ".ln_2.", ".mlp.up_proj.": ".mlp.w1.", ".mlp.gate_proj.": ".mlp.w2.",
        ".mlp.down_proj.": ".mlp.c_proj.",
    }  # fmt: skip
    changes = {
        "intermediate_size": 2 * raw["intermediate_size"], "kv_channels": raw["head_dim"], "seq_length": raw["max_position_embeddings"],
        "rotary_emb_base": raw["rope_parameters"]["rope_theta"], "layer_norm_epsilon": raw["rms_norm_eps"],
        **dict.fromkeys(("head_dim", "max_position_embeddings", "rope_parameters", "rms_norm_eps", "num_key_value_heads", "layer_types")),
    }  # fmt: skip
    return _named("QWenLMHeadModel", renames, **changes)(tensors, raw)


def _gemmoe(tensors: Tensors, raw: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """The experts of Transformers' Mixtral, one by one, and what a Gemma config does not have."""
    out = {}
    for name, tensor in tensors.items():
        name = name.replace(".mlp.", ".block_sparse_moe.")
        stem = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        for expert, matrix in enumerate(tensor if stem != name else ()):
            parts = {"w2": matrix} if name.endswith("down_proj") else dict(zip(("w1", "w3"), matrix.chunk(2)))
            out |= {f"{stem}{expert}.{part}.weight": value for part, value in parts.items()}
        if stem == name:
            out[name] = tensor
    return _named("GemmoeForCausalLM", {}, **MIXTRAL)(out, raw)


def _with_experts(model: Any) -> None:
    """Mixtral's experts in place of each MLP."""
    from transformers.models.mixtral import MixtralConfig, modeling_mixtral

    sizes = {key: getattr(model.config, key) for key in ("hidden_size", "intermediate_size")}
    config = MixtralConfig(**sizes, **MIXTRAL, hidden_act="gelu_pytorch_tanh")
    config._experts_implementation = "eager"
    for layer in model.model.layers:
        layer.mlp = modeling_mixtral.MixtralSparseMoeBlock(config).eval()


def _old_gpt2(tensors: Tensors, raw: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    tensors, raw = _named("GPT2LMHeadModel", {"transformer.": ""})(tensors, raw)
    return {**tensors, "h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor([-1e4])}, raw


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
}  # fmt: skip
SLIDING = {"sliding_window": 13, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 300, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
QWEN_VISION = {"depth": 1, "hidden_size": 16, "out_hidden_size": 16, "embed_dim": 16, "num_heads": 2, "intermediate_size": 16,
               "patch_size": 14, "mlp_ratio": 1, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
               "num_position_embeddings": 4}  # fmt: skip
GRANITE = {"embedding_multiplier": 6.0, "attention_multiplier": 0.1, "residual_multiplier": 0.3, "logits_scaling": 4.0}
GPT = {"scale_attn_weights": True}

MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN_MOE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
DBRX_KEYS = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
             "max_position_embeddings": "max_seq_len"}  # fmt: skip
DBRX_FFN = {"moe_num_experts": 6, "moe_top_k": 3, "ffn_act_fn": {"name": "silu"}}
ZOO: dict[str, Tiny] = {
    "llama": tiny("LlamaForCausalLM", attention_bias=True, mlp_bias=True),
    "mistral": tiny("MistralForCausalLM", sliding_window=13),
    "qwen2": tiny("Qwen2ForCausalLM", tie_word_embeddings=True, use_sliding_window=True, sliding_window=11, max_window_layers=1),
    "yi": tiny("YiForCausalLM", "Llama", _named("YiForCausalLM", {"input_layernorm": "ln1", "post_attention_layernorm": "ln2"})),
    "yi-llama-names": tiny("YiForCausalLM", "Llama", _named("YiForCausalLM", {})),
    "internlm2": tiny("InternLM2ForCausalLM", "Llama", _internlm2),
    "qwen": tiny("QWenLMHeadModel", "Qwen2", _qwen, num_key_value_heads=0, rms_norm_eps=1e-5),
    "qwen3": tiny("Qwen3ForCausalLM"),
    "qwen3-bias": tiny("Qwen3ForCausalLM", attention_bias=True, tie_word_embeddings=True, use_sliding_window=True, sliding_window=9,
                       max_window_layers=1),
    "phi3": tiny("Phi3ForCausalLM", pad_token_id=0, sliding_window=17),
    "phi4-mini": tiny("Phi3ForCausalLM", pad_token_id=0, tie_word_embeddings=True,
                      rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}),
    "ministral3": tiny("Ministral3ForCausalLM", pad_token_id=0, rope_parameters=MINISTRAL3_ROPE),
    "mistral3-ministral3": Tiny("Mistral3ForConditionalGeneration", "Mistral3ForConditionalGeneration", "Mistral3Config",
                                {"rope_parameters": MINISTRAL3_ROPE, "sliding_window": 31}, text="Ministral3Config"),
    "mistral3": Tiny("Mistral3ForConditionalGeneration", "Mistral3ForConditionalGeneration", "Mistral3Config", {}, text="MistralConfig"),
    "qwen2_vl": Tiny("Qwen2VLForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Qwen2VLConfig",
                     {"mrope": True}, text="Qwen2VLTextConfig", vision=QWEN_VISION),
    "qwen2_5_vl": Tiny("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig",
                       {"mrope": True, "tie_word_embeddings": True}, text="Qwen2_5_VLTextConfig", vision=QWEN_VISION),
    "qwen3_vl": Tiny("Qwen3VLForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Qwen3VLConfig",
                     {"mrope": True}, text="Qwen3VLTextConfig", vision=QWEN_VISION),
    "llava": Tiny("LlavaForConditionalGeneration", "LlavaForConditionalGeneration", "LlavaConfig", {}, text="LlamaConfig",
                  vision={**VISION, "model_type": "clip_vision_model"}),
    "llava-qwen2": Tiny("LlavaForConditionalGeneration", "LlavaForConditionalGeneration", "LlavaConfig", {}, text="Qwen2Config",
                        vision={**VISION, "model_type": "siglip_vision_model"}),
    "pixtral": Tiny("LlavaForConditionalGeneration", "LlavaForConditionalGeneration", "LlavaConfig",
                    {"sliding_window": None, "num_hidden_layers": 3},
                    text="MistralConfig", vision={**VISION, "model_type": "pixtral"}),
    "smollm3": tiny("SmolLM3ForCausalLM", pad_token_id=0, num_hidden_layers=5),
    "smollm3-window": tiny("SmolLM3ForCausalLM", pad_token_id=0, num_hidden_layers=3, no_rope_layers=[1, 0, 1], use_sliding_window=True,
                           sliding_window=9, tie_word_embeddings=True),
    "granite": tiny("GraniteForCausalLM", **GRANITE),
    "granite-bias": tiny("GraniteForCausalLM", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, **GRANITE),
    "minicpm": tiny("MiniCPMForCausalLM", "Granite", _minicpm,
                    **{**GRANITE, "attention_multiplier": 0.0, "logits_scaling": 8.0}),
    "gemma": tiny("GemmaForCausalLM", tie_word_embeddings=True),
    "gemma2": tiny("Gemma2ForCausalLM", tie_word_embeddings=True, query_pre_attn_scalar=20, attn_logit_softcapping=3.0,
                   final_logit_softcapping=5.0, **SLIDING),
    "gemma3": Tiny("Gemma3ForCausalLM", "Gemma3ForCausalLM", "Gemma3TextConfig",
                   {"tie_word_embeddings": True, "query_pre_attn_scalar": 20, "rope_parameters": GEMMA3_ROPE, **SLIDING}),
    "gemma3-multimodal": Tiny("Gemma3ForConditionalGeneration", "Gemma3ForConditionalGeneration", "Gemma3Config",
                              {"query_pre_attn_scalar": 24, "rope_parameters": GEMMA3_ROPE, **SLIDING}, text="Gemma3TextConfig"),
    "olmo2": tiny("Olmo2ForCausalLM"),
    "glm4": tiny("Glm4ForCausalLM", pad_token_id=0),
    "cohere": tiny("CohereForCausalLM", tie_word_embeddings=True, logit_scale=0.3),
    "cohere-plus": tiny("CohereForCausalLM", tie_word_embeddings=True, use_qk_norm=True, logit_scale=0.3),
    "cohere2": tiny("Cohere2ForCausalLM", tie_word_embeddings=True, num_hidden_layers=4, sliding_window=13),
    "starcoder2": tiny("Starcoder2ForCausalLM", sliding_window=19, tie_word_embeddings=True),
    "gpt2": Tiny("GPT2LMHeadModel", "GPT2LMHeadModel", "GPT2Config", GPT, keys=GPT_KEYS),
    "gpt2-published": Tiny("GPT2LMHeadModel", "GPT2LMHeadModel", "GPT2Config", {**GPT, "intermediate_size": None}, _old_gpt2,
                           keys=GPT_KEYS),
    "gpt_bigcode": Tiny("GPTBigCodeForCausalLM", "GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT, keys=GPT_KEYS),
    "orion": tiny("OrionForCausalLM", "StableLm", _named("OrionForCausalLM", {}, rms_norm_eps=1e-5, rope_parameters=None),
                  use_qkv_bias=False, layer_norm_eps=1e-5, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 1.0}),
    "index": tiny("IndexForCausalLM", "Llama", _index),
    "mixtral": tiny("MixtralForCausalLM", **MIXTRAL),
    "mixtral-window": tiny("MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=1, sliding_window=21, tie_word_embeddings=True),
    "gemmoe": tiny("GemmoeForCausalLM", "Gemma", _gemmoe, tie_word_embeddings=True),
    "qwen2_moe": tiny("Qwen2MoeForCausalLM", num_hidden_layers=4, decoder_sparse_step=2, **QWEN_MOE),
    "qwen2_moe-norm": tiny("Qwen2MoeForCausalLM", norm_topk_prob=True, qkv_bias=False, tie_word_embeddings=True, use_sliding_window=True,
                           sliding_window=15, **QWEN_MOE),
    "qwen3_moe": tiny("Qwen3MoeForCausalLM", norm_topk_prob=True, num_hidden_layers=3, mlp_only_layers=[1], **QWEN_MOE),
    "qwen3_moe-bias": tiny("Qwen3MoeForCausalLM", attention_bias=True, use_sliding_window=True, sliding_window=17, **QWEN_MOE),
    "dbrx": Tiny("DbrxForCausalLM", "DbrxForCausalLM", "DbrxConfig", {"ffn_config": DBRX_FFN, "attn_config": {"clip_qkv": 0.8}},
                 keys=DBRX_KEYS),
    "dbrx-norm2": Tiny("DbrxForCausalLM", "DbrxForCausalLM", "DbrxConfig",
                       {"ffn_config": {**DBRX_FFN, "moe_normalize_expert_weights": 2.0}, "attn_config": {"clip_qkv": 50}}, keys=DBRX_KEYS),
}  # fmt: skip


def build(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """The Transformers model behind entry `name`, random, in the sizes of `seed`."""
    import transformers

    entry = ZOO[name]
    heads, kv_heads, head_dim, inner, vocab = SIZES[seed % len(SIZES)]
    settings = {
        **BASE, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * head_dim, "head_dim": head_dim,
        "intermediate_size": inner, "vocab_size": vocab, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
        **entry.changes, **changes,
    }  # fmt: skip
    if entry.config == "GPTBigCodeConfig" or entry.config == "GPT2Config":
        del settings["head_dim"], settings["num_key_value_heads"]
    if settings.pop("mrope", False):
        half = settings["head_dim"] // 2
        settings["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
        }
    if settings.get("num_key_value_heads") == 0:  # as many as query heads
        settings["num_key_value_heads"] = heads
    if settings.get("attention_multiplier") == 0.0:
        settings["attention_multiplier"] = head_dim**-0.5
    settings = {entry.keys.get(key, key): value for key, value in settings.items()}
    if entry.config == "DbrxConfig":
        _nest(settings)
    if entry.text:
        settings = {key: value for key, value in settings.items() if not (key == "head_dim" and entry.text.startswith("Qwen2"))}
        tie = settings["tie_word_embeddings"]
        config = getattr(transformers, entry.config)(
            text_config=getattr(transformers, entry.text)(**settings).to_dict(), vision_config=dict(entry.vision), tie_word_embeddings=tie
        )
    else:
        config = getattr(transformers, entry.config)(**settings, attn_implementation="eager")
    config.architectures = [entry.model]
    torch.manual_seed(seed)
    model = getattr(transformers, entry.model)(config).eval()
    if name == "gemmoe":
        _with_experts(model)
    randomize(model, seed, norm=0.0 if "Gemma" in entry.model else 1.0, inputs=0 if entry.config == "GPT2Config" else -1)
    if name == "index":
        model.lm_head.weight.data.copy_(torch.nn.functional.normalize(model.lm_head.weight, dim=-1))
    return model


def _nest(settings: dict[str, Any]) -> None:
    """Sizes where DBRX keeps them."""
    kv_heads, inner = (settings.pop(key) for key in ("num_key_value_heads", "intermediate_size"))
    del settings["head_dim"]
    settings["attn_config"] = {**settings["attn_config"], "kv_n_heads": kv_heads, "rope_theta": 5e5}
    settings["ffn_config"] = {**settings["ffn_config"], "ffn_hidden_size": inner}
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}


def write(name: str, model: Any, directory: Path) -> Path:
    """The files of entry `name`, as they are published."""
    export = ZOO[name].export
    if export is None:
        model.save_pretrained(directory)
        return directory
    tied = model.config.tie_word_embeddings
    tensors = {key: value.detach().clone().contiguous() for key, value in model.state_dict().items() if not (tied and "lm_head" in key)}
    tensors, raw = export(tensors, raw_config(model))
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(directory / "model.safetensors", {key: value.contiguous() for key, value in tensors.items()})
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of 93 words beside a model."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": 3 + i for i in range(90)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def config_of(directory: Path) -> ModelConfig:
    """Its parsed config."""
    return parse_config(json.loads((directory / "config.json").read_text()))


def build_wide(name: str) -> Any:
    """The model of seed 0 in a size whose every matrix EXL2 can hold: outputs in multiples of 32."""
    return build(name, **({"hidden_size": 128} if name == "gpt_bigcode" else {}))


def write_exl2(dense: Path, directory: Path, *, widths: tuple[int, ...] = (8, 6, 5, 4, 3, 2)) -> Path:
    """Every linear of the dense model replaced by a random EXL2 matrix, under the names that EXL2 files have."""
    raw = json.loads((dense / "config.json").read_text())
    config = parse_config(raw)
    with open_store(config, dense) as store:
        stack = {linear.key for layer in range(config.num_layers) for linear in layer_linears(config, layer).values()}
        kept = [name for name in store.names() if name.rpartition(".")[0] not in stack or name.endswith(".bias")]
        tensors = {name: store.read(name).half() for name in kept if name != f"{config.names.head}.weight"}
    for n, linear in enumerate(model_linears(config)):
        tensors |= random_exl2(linear.in_features, linear.out_features, widths, seed=n).tensors(linear.key)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": "exl2"}}))
    save_tensors(directory / "output.safetensors", tensors)
    return directory

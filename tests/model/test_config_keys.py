"""Keys of config.json: every key that Transformers knows is read, refused or known to be harmless, and no other one is dropped silently."""

import json

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from exl2nb.core.errors import ConfigError, UnknownArchitecture
from exl2nb.model.archs import ARCHS, parse_config
from exl2nb.model.archs.architecture import Wrapped
from exl2nb.model.config import SIZE_LIMITS
from exl2nb.model.config_fields import ROPE_KEYS
from exl2nb.model.loader import load_model
from exl2nb.model.rope import RopeOverride
from exl2nb.model.vision.families import VISION_KEYS, read_vision

from .test_model import error, run
from .tiny import BASE, ids_of, truth
from .zoo import MINISTRAL3_ROPE, build, write

BASE_KEYS = set(transformers.PretrainedConfig().to_dict())  # of the class that all configs extend
# Transformers writes these keys and does not read them, or they are the model's own copies of other keys.
COPIES = {"_sliding_window_pattern", "num_key_value_heads"}
ALONE = {"Gemma3ForCausalLM": "gemma3_text"}
# (architecture, its entry, the type of Transformers' config, the type of the decoder inside)
CLASSES = [
    (name, decoder, arch.model_type, kind)
    for name, arch in ((name, ARCHS[name]) for name in ARCHS)
    for kind, decoder in (arch.decoders.items() if isinstance(arch, Wrapped) else [(arch.inner_types[0] if arch.inner_types else "", arch)])
    if arch.model_type in CONFIG_MAPPING
]
NAMES = [f"{name}-{kind}" if kind else name for name, _, _, kind in CLASSES]


def written(kind, **settings):
    """The config.json that Transformers writes for a type of config with all of its defaults."""
    return json.loads(json.dumps(CONFIG_MAPPING[kind](**settings).to_dict()))


def test_the_classes_are_those_of_the_table():
    own = {"GemmoeForCausalLM", "IndexForCausalLM", "InternLM2ForCausalLM", "MiniCPMForCausalLM", "OrionForCausalLM", "QWenLMHeadModel",
           "YiForCausalLM"}  # fmt: skip
    assert {name for name, *_ in CLASSES} == set(ARCHS) - own


@pytest.mark.parametrize(("name", "arch", "kind", "inner"), CLASSES, ids=NAMES)
def test_every_key_of_transformers_is_known(name, arch, kind, inner):
    """If this fails after an update of Transformers: find out what the new key does, then read it, or add it to `neutral` or `ignored`."""
    raw = written(ALONE.get(name, kind), **({"text_config": {"model_type": inner}} if inner else {}))
    decoder, keys = raw["text_config"] if inner else raw, arch.known_keys()
    unknown = {key for key in set(decoder) - BASE_KEYS if not keys.known(key)}
    assert not unknown - COPIES, f"{name}: keys that are neither read nor known to be harmless"
    for key, nested in keys.nested.items():
        assert not {part for part in set(decoder[key]) - BASE_KEYS if not nested.known(part)}, key
    if inner:
        assert not {key for key in set(raw) - BASE_KEYS if not arch.outer_keys().known(key)}, f"{name}: outside of text_config"


@pytest.mark.parametrize("kind", ["clip_vision_model", "siglip_vision_model", "pixtral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_every_key_of_a_vision_encoder_is_known(kind):
    raw = written(kind)["vision_config"] if kind.startswith("qwen") else written(kind)
    assert not {key for key in set(raw) - BASE_KEYS if not VISION_KEYS[kind].known(key)}


def test_every_key_of_rope_parameters_is_known():
    """The keys that Transformers documents in the type of `rope_parameters`."""
    from transformers.modeling_rope_utils import RopeParameters

    assert {"factor", "rope_theta"} < set(RopeParameters.__annotations__)
    assert not {key for key in RopeParameters.__annotations__ if not ROPE_KEYS.known(key)}


@pytest.mark.parametrize(("name", "arch", "kind", "inner"), CLASSES, ids=NAMES)
def test_absent_keys_mean_what_transformers_assumes(name, arch, kind, inner):
    """Transformers leaves defaults of `text_config` out of the file, so a default of ours that differs would change the model."""
    kind = ALONE.get(name, kind)
    decoder = written(kind, **({"text_config": {"model_type": inner}} if inner else {}))
    full = {**decoder, "architectures": [name]}
    sizes = {key for key, _, _ in SIZE_LIMITS.values()} | {"n_embd", "n_layer", "n_head", "d_model", "n_layers", "n_heads"}
    needed = sizes - {"head_dim", "num_key_value_heads", "max_position_embeddings"} - set(arch.defaults)
    if inner:
        text = full["text_config"]
        kept = {key: text[key] for key in needed & set(text)} if kind == "gemma3" else {}
        least = {"architectures": [name], "text_config": {"model_type": inner, **kept}}
    else:
        least = {"architectures": [name], **{key: full[key] for key in needed & set(full)}}
    assert parse_config(least) == parse_config(full)


LAYERED = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def text(arch, kind, **changes):
    return {"architectures": [arch], "text_config": {**BASE, "model_type": kind, **changes}}


def plain(arch, **changes):
    return {**BASE, "architectures": [arch], **changes}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        # keys of Transformers' classes that are not implemented
        (plain("GemmaForCausalLM", use_bidirectional_attention=True), "use_bidirectional_attention is True; expected false or null"),
        (plain("Gemma2ForCausalLM", use_bidirectional_attention=True), "use_bidirectional_attention is True"),
        (plain("Gemma3ForCausalLM", attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0; expected null"),
        (text("Gemma3ForConditionalGeneration", "gemma3_text", final_logit_softcapping=30.0), "final_logit_softcapping is 30.0"),
        (plain("Gemma3ForCausalLM", _sliding_window_pattern=3), "_sliding_window_pattern is 3; expected 6"),
        (plain("GPT2LMHeadModel", add_cross_attention=True), "add_cross_attention is True; expected false"),
        (plain("DbrxForCausalLM", ffn_config={"uniform_expert_assignment": True}), "ffn_config: uniform_expert_assignment is True"),
        (plain("GemmaForCausalLM", hidden_activation="silu"), "hidden_activation is 'silu'; expected \"gelu_pytorch_tanh\""),
        (plain("MistralForCausalLM", sliding_window=None, layer_types=["sliding_attention"] * 2), "layer_types is"),
        (plain("LlamaForCausalLM", layer_types=["full_attention", "sliding_attention"]), "layer_types is"),
        (plain("Qwen2MoeForCausalLM", num_experts=0, layer_types=["sliding_attention"] * 2), "layer_types is"),
        # keys of the original implementations
        (plain("QWenLMHeadModel", seq_length=64, no_bias=False), "no_bias is False; expected true"),
        (plain("QWenLMHeadModel", seq_length=64, rotary_pct=0.5), "rotary_pct is 0.5; expected 1"),
        (plain("Cohere2ForCausalLM", use_parallel_block=False), "use_parallel_block is False; expected true"),
        (plain("Phi3ForCausalLM", full_attn_mod=2), "full_attn_mod is 2; expected 1"),
        (plain("Starcoder2ForCausalLM", norm_type="rms_norm"), "norm_type is 'rms_norm'"),
        (plain("MiniCPMForCausalLM", sparse_config={"kernel_size": 32}), "sparse_config is"),
        # unknown keys whose names suggest arithmetic
        (plain("LlamaForCausalLM", embedding_multiplier=12.0), "embedding_multiplier is 12.0; expected no such key.*remove it"),
        (plain("LlamaForCausalLM", final_logit_softcapping=30.0), "final_logit_softcapping is 30.0"),
        (plain("LlamaForCausalLM", attn_temperature_tuning=4), "attn_temperature_tuning is 4"),
        (plain("LlamaForCausalLM", use_qk_norm=True), "use_qk_norm is True"),
        (plain("LlamaForCausalLM", no_rope_layers=[1, 0]), r"no_rope_layers is \[1, 0\]"),
        (plain("LlamaForCausalLM", sliding_window=16), "sliding_window is 16"),
        (plain("LlamaForCausalLM", clip_qkv=8), "clip_qkv is 8"),
        (plain("LlamaForCausalLM", residual_multiplier=0.22), "residual_multiplier is 0.22"),
        (plain("LlamaForCausalLM", norm_type="layer"), "norm_type is 'layer'"),
        (plain("LlamaForCausalLM", layer_norm_eps=1e-3), "layer_norm_eps is 0.001"),
        (plain("LlamaForCausalLM", activation_function="gelu"), "activation_function is 'gelu'"),
        (plain("LlamaForCausalLM", swiglu_limit=7.0), "swiglu_limit is 7.0"),
        (plain("LlamaForCausalLM", gate_soft_cap=15), "gate_soft_cap is 15"),
        (plain("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, scoring_func="sigmoid"), "scoring_func is 'sigmoid'"),
        (plain("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, routed_scaling_factor=2.5), "routed_scaling_factor is 2.5"),
        (plain("MiniCPMForCausalLM", use_mup=False), "use_mup is False; expected true"),
        (plain("LlamaForCausalLM", mup_scale_factor=2.0), "mup_scale_factor is 2.0"),
        (plain("Cohere2ForCausalLM", use_qk_norm=True), "use_qk_norm is True"),
        # inside of rope_scaling and rope_parameters every unknown key is refused
        (plain("LlamaForCausalLM", rope_scaling={"type": "dynamic", "factor": 2.0, "alpha": 1000.0}), "rope_scaling: alpha is 1000.0"),
        (plain("LlamaForCausalLM", rope_parameters={**YARN, "attn_factor": 0.5}), "rope_parameters: attn_factor is 0.5"),
        (plain("LlamaForCausalLM", rope_scaling={"factor": 4.0}), "rope_type is None; expected a RoPE type beside factor 4.0"),
        (plain("MistralForCausalLM", rope_parameters={**YARN, "llama_4_scaling_beta": 0.1}), "llama_4_scaling_beta is 0.1; expected 0 or"),
        (plain("Gemma3ForCausalLM", rope_parameters={**LAYERED, "full_attention": {"fope": 2}}), "full_attention: fope is 2"),
        (text("Qwen2VLForConditionalGeneration", "qwen2_vl_text", rope_scaling={"mrope_interleaved": True}), "mrope_interleaved is True"),
        (text("Qwen3VLForConditionalGeneration", "qwen3_vl_text", rope_scaling={"mrope_interleaved": False}), "mrope_interleaved is False"),
        (text("Qwen3VLForConditionalGeneration", "qwen3_vl_text", use_sliding_window=True), "text_config: use_sliding_window is True"),
        (plain("DbrxForCausalLM", rope_parameters={"rope_theta": 1e4}, attn_config={"rope_theta": 5e5}), "attn_config: rope_theta is"),
        # a key of the decoder outside of text_config
        ({**text("LlavaForConditionalGeneration", "llama"), "rope_scaling": YARN}, "rope_scaling is"),
        ({**text("LlavaForConditionalGeneration", "llama", rope_theta=1e4), "rope_theta": 5e5}, "rope_theta is 500000.0"),
    ],
)
def test_keys_that_change_the_result_are_refused(raw, words):
    with pytest.raises(ConfigError, match=words):
        parse_config(raw)


@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        ("Mistral3ForConditionalGeneration", "llama"),
        ("Mistral3ForConditionalGeneration", "mistral4"),
        ("LlavaForConditionalGeneration", "ministral3"),
        ("LlavaForConditionalGeneration", "qwen3"),
        ("Gemma3ForConditionalGeneration", "gemma2"),
        ("Gemma3ForConditionalGeneration", "gemma3n_text"),
        ("Qwen2VLForConditionalGeneration", "qwen2"),
        ("Qwen3VLForConditionalGeneration", "qwen3_vl_moe_text"),
    ],
)
def test_a_decoder_of_another_type_is_refused(arch, kind):
    with pytest.raises(UnknownArchitecture, match=rf"model_type is '{kind}'; expected .*{arch}.*Transformers"):
        parse_config(text(arch, kind))


PUBLISHED = {
    "Cohere2ForCausalLM": {
        "attention_bias": False, "cache_implementation": "hybrid", "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "rope_scaling": None, "rotary_pct": 1.0, "use_embedding_sharing": True,
        "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True, "sliding_window_pattern": 4,
    },
    "Starcoder2ForCausalLM": {
        "activation_function": "gelu", "hidden_act": "gelu_pytorch_tanh", "attention_softmax_in_fp32": True, "layer_norm_epsilon": 1e-5,
        "norm_epsilon": 1e-5, "mlp_type": "default", "norm_type": "layer_norm", "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True, "attention_dropout": 0.1, "residual_dropout": 0.1,
    },
    "Phi3ForCausalLM": {
        "attention_bias": False, "embd_pdrop": 0.0, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
        "original_max_position_embeddings": 4096, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    },
    "Gemma2ForCausalLM": {
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096, "sliding_window_size": 4096,
        "cache_implementation": "hybrid",
    },
    "GemmaForCausalLM": {"hidden_act": "gelu", "hidden_activation": None},
    "QWenLMHeadModel": {
        "attn_dropout_prob": 0.0, "bf16": True, "no_bias": True, "onnx_safe": None, "rotary_pct": 1.0, "scale_attn_weights": True,
        "seq_length": 512, "softmax_in_fp32": False, "use_cache_kernel": False, "use_cache_quantization": False, "use_dynamic_ntk": True,
        "use_flash_attn": "auto", "use_logn_attn": True, "kv_channels": 16, "num_key_value_heads": 4,
    },
    "LlamaForCausalLM": {
        "_name_or_path": "x", "attention_bias": False, "attention_dropout": 0.1, "pretraining_tp": 1, "rope_interleaved": False,
        "is_llama_config": True, "unsloth_fixed": True, "unsloth_version": "2025.1", "use_cache": True, "temperature": 0.6, "top_p": 0.9,
        "_attn_implementation_autoset": True, "max_window_layers": 28, "use_sliding_window": False, "sliding_window": 4096,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "finetuned": True},
        "use_fused_rms_norm": True, "num_logits_to_keep": 1, "neftune_noise_alpha": 5,
        "layer_types": ["full_attention"] * 2, "logit_scale": 1.0, "transformers.js_config": {"dtype": "q4"}, "embedding_multiplier": 1,
    },
    "Qwen2ForCausalLM": {"use_mrope": False, "sliding_window": 131072, "max_window_layers": 28, "use_sliding_window": False},
    "Qwen3MoeForCausalLM": {
        "max_window_layers": 48, "router_aux_loss_coef": 0.001, "output_router_logits": False, "num_experts": 4, "num_experts_per_tok": 2,
        "mlp_only_layers": [], "sliding_window": None,
    },
    "GPT2LMHeadModel": {
        "n_ctx": 1024, "summary_type": "cls_index", "reorder_and_upcast_attn": False, "attn_pdrop": 0.1, "num_key_value_heads": None,
        "task_specific_params": {"text-generation": {"do_sample": True}},
    },
    "DbrxForCausalLM": {
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "model_type": "", "rope_theta": 500000},
        "ffn_config": {"ffn_hidden_size": 96, "moe_jitter_eps": 0.01, "moe_loss_weight": 0.05, "moe_num_experts": 4, "moe_top_k": 4,
                       "model_type": "", "uniform_expert_assignment": False},
    },
}  # fmt: skip


@pytest.mark.parametrize("arch", PUBLISHED)
def test_harmless_keys_of_published_files_are_accepted(arch):
    """These models load without a word, and the keys do not change them."""
    config = parse_config(plain(arch, **PUBLISHED[arch]))
    assert config.architecture == arch


def test_keys_of_the_decoder_may_be_repeated_outside():
    """Files of Qwen2.5-VL that were saved again have the decoder's keys twice, and leave defaults out of `text_config`."""
    sections = {"mrope_section": [4, 2, 2]}
    raw = text("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", rope_parameters={"rope_type": "default", **sections})
    outside = {
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", **sections},
        "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28, "vision_token_id": 5, "hidden_size": 64,
    }  # fmt: skip
    assert parse_config({**raw, **outside}) == parse_config(raw)
    for key, value in {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 2.0, **sections}}.items():
        with pytest.raises(ConfigError, match=f"{key} is"):
            parse_config({**raw, **outside, key: value})


def test_dbrx_keeps_its_rope_scaling_beside_a_nested_theta():
    raw = plain("DbrxForCausalLM", attn_config={"rope_theta": 5e5}, rope_scaling={"type": "linear", "factor": 2.0})
    rope = parse_config(raw).rope
    assert (rope.type, rope.factor, rope.theta) == ("linear", 2.0, 5e5)


def test_mixtral_reads_both_names_of_its_experts():
    assert parse_config(plain("MixtralForCausalLM", num_experts=4)).moe.num_experts == 4
    assert parse_config(plain("MixtralForCausalLM", num_local_experts=6)).moe.num_experts == 6


def test_mistral3_assumes_the_window_of_its_decoder():
    """A `text_config` without the key has the default of its class, which is a window for mistral and none for ministral3."""
    outer = "Mistral3ForConditionalGeneration"
    assert parse_config(text(outer, "mistral", max_position_embeddings=8192)).windows == (4096, 4096)
    assert parse_config(text(outer, "mistral", sliding_window=None)).windows == (0, 0)
    assert parse_config(text(outer, "ministral3")).windows == (0, 0)


@pytest.mark.parametrize(
    ("arch", "vision", "words"),
    [
        (
            "Mistral3ForConditionalGeneration",
            {"model_type": "siglip_vision_model"},
            "model_type is 'siglip_vision_model'; expected pixtral",
        ),
        ("Mistral3ForConditionalGeneration", {"model_type": "pixtral", "head_dim": 4}, "head_dim is 4; expected .* 8"),
        ("Mistral3ForConditionalGeneration", {"model_type": "pixtral", "use_qk_norm": True}, "use_qk_norm is True"),
        ("Mistral3ForConditionalGeneration", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'; expected \"default\""),
        ("Gemma3ForConditionalGeneration", {"model_type": "clip_vision_model"}, "model_type is 'clip_vision_model'"),
        ("Gemma3ForConditionalGeneration", {"num_channels": 1}, "num_channels is 1; expected 3"),
        ("Qwen2VLForConditionalGeneration", {"model_type": "qwen2_5_vl"}, "model_type is 'qwen2_5_vl'; expected qwen2_vl"),
        ("LlavaForConditionalGeneration", {"model_type": "clip_vision_model", "layer_scale": 0.5}, "layer_scale is 0.5"),
    ],
)
def test_keys_of_a_vision_encoder_are_refused(arch, vision, words, tmp_path):
    vision = {"hidden_size": 16, "embed_dim": 16, "num_attention_heads": 2, "num_heads": 2, "image_size": 28, "patch_size": 14, **vision}
    with pytest.raises(ConfigError, match=words):
        read_vision(arch, {"vision_config": vision}, tmp_path)


# ---- keys whose effect begins at a length


@pytest.mark.parametrize("name", ["ministral3", "mistral3-ministral3"])
def test_ministral3_equals_transformers_up_to_its_original_context(name, tmp_path):
    """The factor of the queries is exactly 1 there; one token further Transformers computes something else, and we refuse."""
    rope = {**MINISTRAL3_ROPE, "original_max_position_embeddings": 48, "llama_4_scaling_beta": 2.0}
    model = build(name, rope_parameters=rope)
    directory = write(name, model, tmp_path)
    ours = load_model(directory)
    assert ours.context == ours.config.context_limit == 48
    ids = ids_of(131, 1, 96)
    want = truth(model, ids)[0]
    assert error(run(ours, ids[0, :48]), want[:48]) < 1e-4
    rope["llama_4_scaling_beta"] = 0.0
    unscaled = build(name, rope_parameters=rope)
    unscaled.load_state_dict(model.state_dict())
    assert torch.equal(truth(unscaled, ids)[0][:48], want[:48])
    assert error(truth(unscaled, ids)[0], want) > 1e-2  # the key does change the logits beyond
    with pytest.raises(ConfigError, match=r"context is 49 tokens; expected at most 48.*llama_4_scaling_beta 2.*context=48"):
        load_model(directory, context=49)
    with pytest.raises(ConfigError, match="expected at most 48"):
        load_model(directory, context=49, rope=RopeOverride(scaling={"rope_type": "linear", "factor": 2.0}))


def test_ministral3_without_the_factor_has_its_whole_context():
    rope = {key: value for key, value in MINISTRAL3_ROPE.items() if key != "llama_4_scaling_beta"}
    config = parse_config(plain("Ministral3ForCausalLM", rope_parameters=rope))
    assert (config.context_limit, config.max_position_embeddings) == (0, 512)
    config.check_context(10_000)


def test_qwen_ends_where_its_scaling_would_begin():
    """`max_position_embeddings` of the published files is larger than `seq_length`, from which on RoPE and scores change."""
    raw = plain("QWenLMHeadModel", num_key_value_heads=4, seq_length=128)
    config = parse_config(raw)
    assert (config.max_position_embeddings, config.context_limit) == (128, 128)
    with pytest.raises(ConfigError, match="expected at most 128.*use_dynamic_ntk and use_logn_attn"):
        config.check_context(129)
    free = parse_config({**raw, "use_dynamic_ntk": False, "use_logn_attn": False})
    assert (free.max_position_embeddings, free.context_limit) == (512, 0)

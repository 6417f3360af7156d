"""config.json: sizes, RoPE, windows and experts of every architecture; each wrong value is named."""

import json
from pathlib import Path

import pytest

import exl2nb
from exl2nb.core.errors import ConfigError, UnknownArchitecture
from exl2nb.model.archs import ARCHS, parse_config

from .tiny import BASE, CASES

LLAMA = {**BASE, "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 128, "rms_norm_eps": 1e-5}


def test_demo_model():
    raw = json.loads((Path(exl2nb.__file__).parent / "demo_model/config.json").read_text())
    config = parse_config(raw)
    assert (config.num_layers, config.hidden_size, config.head_dim, config.q_per_kv) == (12, 256, 64, 2)
    assert config.windows == (0,) * 12
    assert config.rope.type == "default"
    assert hash(config) == hash(parse_config(raw))


def test_unknown_architecture_lists_the_known_ones():
    with pytest.raises(UnknownArchitecture, match=r"config.json: unknown architecture 'GPT9'; known: .*Llama.*Mistral.*Qwen2"):
        parse_config({**LLAMA, "architectures": ["GPT9"]})
    assert {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"} < set(ARCHS)


@pytest.mark.parametrize("names", [None, [], ["LlamaForCausalLM", "MistralForCausalLM"], "LlamaForCausalLM", [3]])
def test_exactly_one_architecture(names):
    with pytest.raises(ConfigError, match="architectures"):
        parse_config({**LLAMA, "architectures": names})
    with pytest.raises(ConfigError, match="expected a JSON object"):
        parse_config([names])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "64"}, "hidden_size is '64'; expected an integer from 8"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": 10**400}, "hidden_size is an integer of 1329 bits"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000; expected an integer from 1 to 4194304"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": None}, "key 'num_hidden_layers' is missing"),
        ({"intermediate_size": [96]}, "intermediate_size"),
        ({"num_attention_heads": 3}, "multiple of num_attention_heads 3"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"num_key_value_heads": 8}, "not a multiple"),
        ({"head_dim": 20}, "multiple of 8"),
        ({"head_dim": 4096}, "head_dim is 4096"),
        ({"max_position_embeddings": 1 << 60}, "max_position_embeddings"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"hidden_act": "swish2"}, "hidden_act is 'swish2'; expected one of gelu, gelu_new"),
        ({"hidden_act": 4}, "hidden_act is 4"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; expected true or false"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_scaling": 4}, "rope_scaling: is a int"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_type is 'mrope'; expected one of default, dynamic, linear, llama3, longrope, yarn"),
        ({"rope_scaling": {"type": "linear"}}, "key 'factor' is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": {"type": "dynamic", "factor": float("inf")}}, "factor is inf"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}, "more than low_freq_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 0}}, "original_max_position_embeddings is 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 0.5}}, "at least beta_slow"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "truncate": "no"}}, "truncate"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one set of RoPE parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": "exl2"}, "quantization_config: is a str"),
        ({"quantization_config": {"quant_method": 4}}, "quant_method"),
    ],
)
def test_wrong_value_is_named(change, words):
    with pytest.raises(ConfigError, match=words):
        parse_config({**LLAMA, **change}, where="dir/config.json")


@pytest.mark.parametrize(
    ("arch", "change", "words"),
    [
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0] * 8}}, "short_factor is"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [0] * 8}}, "long_factor is"),
        ("Glm4ForCausalLM", {"partial_rotary_factor": 0.1, "head_dim": 8}, "partial_rotary_factor is 0.1"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [2, 0]}, "no_rope_layers is"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types is"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; expected false or null"),
        ("Mistral3ForConditionalGeneration", {}, "'text_config' is missing"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("GPTBigCodeForCausalLM", {"multi_query": False}, "multi_query is False"),
        ("IndexForCausalLM", {"norm_head": "yes"}, "norm_head is 'yes'"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling is 0"),
        ("MixtralForCausalLM", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; expected an integer from 1 to 8"),
        ("GemmoeForCausalLM", {"num_local_experts": "8"}, "num_local_experts is '8'"),
        ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 1}, "shared_expert_intermediate_size is 1"),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 1 << 30}, "moe_intermediate_size is"),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
    ],
)
def test_wrong_value_of_an_architecture_is_named(arch, change, words):
    with pytest.raises(ConfigError, match=words):
        parse_config({**BASE, "architectures": [arch], **change})


def test_missing_size_is_named():
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        with pytest.raises(ConfigError, match=f"dir/config.json: key '{key}' is missing"):
            parse_config({k: v for k, v in LLAMA.items() if k != key}, where="dir/config.json")


def test_mistral_window_default_and_null():
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert parse_config(mistral).windows == (4096, 4096)
    assert parse_config({**mistral, "sliding_window": None}).windows == (0, 0)
    assert parse_config({**mistral, "sliding_window": 7}).windows == (7, 7)
    with pytest.raises(ConfigError, match="sliding_window is 0"):
        parse_config({**mistral, "sliding_window": 0})


def test_qwen2_windows():
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "max_window_layers": 1}
    assert parse_config(qwen).windows == (0, 0)
    assert parse_config({**qwen, "use_sliding_window": True}).windows == (0, 9)
    kinds = ["sliding_attention", "full_attention"]
    assert parse_config({**qwen, "use_sliding_window": True, "layer_types": kinds}).windows == (9, 0)
    with pytest.raises(ConfigError, match="layer_types"):
        parse_config({**qwen, "layer_types": kinds})
    with pytest.raises(ConfigError, match="layer_types"):
        parse_config({**qwen, "layer_types": ["full_attention"]})
    assert parse_config(qwen).qkv_bias
    assert not parse_config(qwen).o_bias


def test_every_architecture_is_registered():
    assert {kind for kind, _ in CASES.values()} <= {ARCHS[name].model_type for name in ARCHS}


def test_patterns_of_old_configs():
    base = {**BASE, "num_hidden_layers": 8, "num_key_value_heads": 4}
    gemma = parse_config({**base, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 5, "rope_local_base_freq": 7.0,
                          "rope_scaling": {"rope_type": "linear", "factor": 8.0}})  # fmt: skip
    assert gemma.windows == (5, 5, 5, 5, 5, 0, 5, 5)
    assert gemma.local_rope is not None
    assert (gemma.rope.theta, gemma.rope.factor, gemma.local_rope.theta, gemma.local_rope.type) == (1e6, 8.0, 7.0, "default")
    assert parse_config({**base, "architectures": ["Gemma2ForCausalLM"]}).windows == (4096, 0) * 4
    assert parse_config({**base, "architectures": ["Cohere2ForCausalLM"], "sliding_window_pattern": 2}).windows == (4096, 0) * 4
    smol = parse_config({**base, "architectures": ["SmolLM3ForCausalLM"]})
    assert smol.rope_kinds == ("main", "main", "main", "none") * 2 and smol.rope.theta == 2e6
    assert parse_config({**base, "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu"}).activation == "gelu_tanh"
    glm = parse_config({**base, "architectures": ["Glm4ForCausalLM"]})
    assert glm.rope.rotary_dim == glm.head_dim // 2 == 64


def test_sparse_layers():
    raw = {**BASE, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2}
    for arch in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):

        def sparse(arch=arch, **changes):
            moe = parse_config({**raw, "architectures": [arch], **changes}).moe
            return None if moe is None else moe.layers

        assert sparse() == (True,) * 4
        assert sparse(decoder_sparse_step=2) == (False, True, False, True)
        assert sparse(mlp_only_layers=[1, 3], decoder_sparse_step=2) is None
        assert sparse(mlp_only_layers=[0]) == (False, True, True, True)
        assert sparse(num_experts=0) is None
        with pytest.raises(ConfigError, match="mlp_only_layers is"):
            sparse(mlp_only_layers=[4])

import json
from pathlib import Path

import pytest

import exl2nb
from exl2nb.core.errors import ConfigError, UnknownArchitecture
from exl2nb.model.archs import ARCHS, parse_config

from .tiny import CASES

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def test_demo_model():
    config = parse_config(json.loads((Path(exl2nb.__file__).parent / "demo_model/config.json").read_text()))
    assert (config.num_layers, config.hidden_size, config.head_dim, config.q_per_kv) == (12, 256, 64, 2)
    assert config.windows == (0,) * 12
    assert config.rope.type == "default"
    assert hash(config) == hash(parse_config(json.loads((Path(exl2nb.__file__).parent / "demo_model/config.json").read_text())))


def test_unknown_architecture_lists_the_known_ones():
    with pytest.raises(UnknownArchitecture, match=r"config.json: unknown architecture 'GPT9'; known: .*Llama.*Mistral.*Qwen2"):
        parse_config({**LLAMA, "architectures": ["GPT9"]})
    assert {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"} < set(ARCHS)


@pytest.mark.parametrize("names", [None, [], ["LlamaForCausalLM", "MistralForCausalLM"], "LlamaForCausalLM", [3]])
def test_exactly_one_architecture(names):
    with pytest.raises(ConfigError, match="architectures"):
        parse_config({**LLAMA, "architectures": names})


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
    raw = {key: value for key, value in {**LLAMA, **change}.items()}
    with pytest.raises(ConfigError, match=words):
        parse_config(raw, where="dir/config.json")


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"])
def test_missing_size_is_named(key):
    with pytest.raises(ConfigError, match=f"dir/config.json: key '{key}' is missing"):
        parse_config({k: v for k, v in LLAMA.items() if k != key}, where="dir/config.json")


def test_not_an_object():
    with pytest.raises(ConfigError, match="expected a JSON object"):
        parse_config([1, 2])


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

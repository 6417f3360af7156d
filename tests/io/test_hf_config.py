import json
import os
from pathlib import Path

import pytest

from exl2nb.core.errors import ConfigError, ModelNotFound
from exl2nb.io.hf_config import LIMIT_BYTES, READABLE_METHODS, foreign_format, read_config, read_json, refuse, with_quantization


def put(directory, value):
    (directory / "config.json").write_text(value if isinstance(value, str) else json.dumps(value))


def test_good(tmp_path):
    put(tmp_path, {"architectures": ["A"], "vocab_size": 4, "head_dim": None, "text_config": {"hidden_size": 3}})
    assert read_config(tmp_path)["vocab_size"] == 4


def test_not_a_model(tmp_path):
    with pytest.raises(ModelNotFound, match="no such directory"):
        read_config(tmp_path / "x")
    with pytest.raises(ModelNotFound, match="it is empty"):
        read_config(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelNotFound, match=r"no config.json \(it has notes.txt\)"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("", "an empty file"),
        ("[]", "found a JSON list"),
        ('{"a": 1, "a": 2}', "the key 'a' twice"),
        ('{"a": NaN}', "constant NaN"),
        ('{"a": -Infinity}', "constant -Infinity"),
        ('{"a":' + "[" * 100000, "invalid JSON"),
        ('{"a":' + "9" * 5000 + "}", "invalid JSON"),
        ({}, "architectures is None"),
        ({"architectures": []}, r"architectures is \[\]"),
        ({"architectures": ["A", "B"]}, "exactly one class name"),
        ({"architectures": "A"}, "exactly one class name"),
        ({"architectures": [7]}, "exactly one class name"),
        ({"architectures": ["A"], "hidden_size": "64"}, "hidden_size is '64'; expected a JSON integer"),
        ({"architectures": ["A"], "hidden_size": True}, "hidden_size is 'True'"),
        ({"architectures": ["A"], "tie_word_embeddings": 1}, "expected a JSON boolean"),
        ({"architectures": ["A"], "text_config": []}, "expected a JSON object"),
        ({"architectures": ["A"], "text_config": {"vocab_size": 1.5}}, "vocab_size is '1.5'"),
    ],
)
def test_refusals(tmp_path, value, text):
    put(tmp_path, value)
    with pytest.raises(ConfigError, match=text) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_many_keys_are_checked_in_one_pass(tmp_path):
    """One pass over the keys: 40,000 took 35 s when each was searched for in the list of all, and 200,000 would take 15 minutes."""
    keys = [f'"k{i}": 0' for i in range(200_000)]
    put(tmp_path, "{" + ", ".join([*keys, '"k199999": 1']) + "}")
    with pytest.raises(ConfigError, match="the key 'k199999' twice"):
        read_config(tmp_path)


def test_pipes_and_devices_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_json(path)


def test_size_limit(tmp_path):
    (tmp_path / "config.json").write_bytes(b" " * (LIMIT_BYTES + 1))
    with pytest.raises(ConfigError, match="found more than"):
        read_config(tmp_path)


# ---- quantization_config


def files(directory, **contents):
    for name, content in contents.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_plain_and_exl2_models(tmp_path):
    assert with_quantization(tmp_path, {"a": 1}) == {"a": 1}
    exl2 = {"quantization_config": {"quant_method": "exl2", "bits": 4.0}}
    assert with_quantization(tmp_path, exl2) == exl2


def test_settings_of_older_tools(tmp_path):
    files(tmp_path, quantize_config={"bits": 4, "group_size": 128, "desc_act": True})
    found = with_quantization(tmp_path, {})["quantization_config"]
    assert found == {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
    both = {"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}}
    merged = with_quantization(tmp_path, both)["quantization_config"]
    assert (merged["bits"], merged["checkpoint_format"]) == (4, "gptq_v2")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"checkpoint_format": "gptq"}, {"checkpoint_format": "gptq_v2"}),
        ({"checkpoint_format": "gptq"}, {"format": "gptq_v2"}),
        ({"format": "gptq_v2"}, {"checkpoint_format": "gptq"}),
        ({"bits": 8}, {"bits": 4}),
        ({"bits": 8}, {"w_bit": 4}),
        ({"bits": 8}, {"wbits": 4}),
        ({"group_size": 128}, {"group_size": -1}),
        ({"group_size": 128}, {"q_group_size": 32}),
        ({"sym": True}, {"sym": False}),
        ({"desc_act": True}, {"desc_act": False}),
        ({"pack_dtype": "int32"}, {"pack_dtype": "int16"}),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, {"dynamic": {"+:.*up.*": {"bits": 8}}}),
    ],
)
@pytest.mark.parametrize("files_of_both", [("config", "quantize_config"), ("config", "quant_config"), ("quantize_config", "quant_config")])
def test_settings_that_two_files_state_differently(tmp_path, first, second, files_of_both):
    one, other = files_of_both
    blocks = {one: {"quant_method": "gptq", **first}, other: {"quant_method": "gptq", **second}}
    config = {"quantization_config": blocks.pop("config")} if one == "config" else {}
    files(tmp_path, **blocks)
    with pytest.raises(ConfigError) as caught:
        with_quantization(tmp_path, config)
    for file, stated in ((one, first), (other, second)):
        ((name, value),) = stated.items()
        assert f"{file}.json says {name} {value}" in str(caught.value)


def test_one_file_with_two_names_of_a_setting(tmp_path):
    block = {"quant_method": "gptq", "checkpoint_format": "gptq", "format": "gptq_v2"}
    with pytest.raises(ConfigError, match="config.json says checkpoint_format gptq, config.json says format gptq_v2"):
        with_quantization(tmp_path, {"quantization_config": block})


def test_a_null_states_nothing(tmp_path):
    nulls = {"bits": None, "group_size": None, "sym": None, "desc_act": None, "checkpoint_format": None, "format": None, "dynamic": None}
    stated = {"bits": 4, "group_size": 32, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2", "pack_dtype": "torch.int32"}
    files(tmp_path, quantize_config=nulls | {"pack_dtype": "int32"})
    merged = with_quantization(tmp_path, {"quantization_config": {"quant_method": "gptq", **stated}})["quantization_config"]
    assert {name: merged[name] for name in stated if name != "pack_dtype"} == {k: v for k, v in stated.items() if k != "pack_dtype"}
    files(tmp_path, quantize_config=stated)
    merged = with_quantization(tmp_path, {"quantization_config": {"quant_method": "gptq", **nulls}})["quantization_config"]
    assert {name: merged[name] for name in stated} == stated


def test_quantizers_that_unpack_zeros_differently(tmp_path):
    files(tmp_path, quantize_config={"bits": 4, "meta": {"quantizer": ["gptqmodel:1.1.0"]}})
    own = {"quant_method": "gptq", "bits": 4, "meta": {"quantizer": ["optimum:1.2"]}}
    with pytest.raises(ConfigError, match="meta.quantizer .*optimum.*meta.quantizer .*gptqmodel"):
        with_quantization(tmp_path, {"quantization_config": own})
    own["meta"] = {"quantizer": ["gptqmodel:2.0"]}
    assert with_quantization(tmp_path, {"quantization_config": own})["quantization_config"]["bits"] == 4


@pytest.mark.parametrize(
    ("name", "block", "words"),
    [
        (
            "config",
            {"quant_method": "awq"},
            r"config.json: .* format AWQ \(awq\); expected exl2, gptq or plain .*take a GPTQ or EXL2 version",
        ),
        ("config", {"quant_method": "bitsandbytes", "load_in_4bit": True}, "format bitsandbytes .*take the original"),
        ("config", {"load_in_8bit": True}, "format bitsandbytes"),
        ("config", {"quant_method": "fp8", "activation_scheme": "dynamic"}, "format FP8 .*bf16 version"),
        ("config", {"quant_method": "fbgemm_fp8"}, "format FP8"),
        ("config", {"quant_method": "gguf"}, "format GGUF .*llama.cpp"),
        ("config", {"quant_method": "compressed-tensors"}, "format compressed-tensors"),
        ("config", {"quant_method": "aqlm"}, "format AQLM"),
        ("config", {"quant_method": "hqq"}, "format HQQ"),
        ("config", {"quant_method": "exl3"}, "format EXL3 .*ExLlamaV3"),
        ("config", {"quant_method": "intel/auto-round"}, "format AutoRound .*GPTQ format"),
        ("config", {"quant_method": "something-new"}, "'something-new'.*take the original"),
        ("config", {"some": "thing"}, "an unnamed one"),
        ("quantize_config", {"quant_method": "awq", "bits": 4}, "quantize_config.json: .*AWQ"),
        ("quant_config", {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}, "quant_config.json: .*AWQ"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path, name, block, words):
    config = {"quantization_config": block} if name == "config" else {}
    if name != "config":
        files(tmp_path, **{name: block})
    with pytest.raises(ConfigError, match=words):
        with_quantization(tmp_path, config)


def test_files_that_name_different_methods(tmp_path):
    files(tmp_path, quantize_config={"bits": 4})
    with pytest.raises(ConfigError, match=r"config.json says awq, quantize_config.json says gptq; expected one method"):
        with_quantization(tmp_path, {"quantization_config": {"quant_method": "awq"}})


def test_tensors_give_formats_away():
    assert foreign_format(["a.weight", "model.layers.0.mlp.up_proj.weight_packed"]) == "compressed-tensors"
    assert foreign_format(["a.weight.absmax"]) == "bitsandbytes"
    assert foreign_format(["a.weight", "a.qweight"]) is None
    assert all(refuse("x", method) is None for method in READABLE_METHODS)

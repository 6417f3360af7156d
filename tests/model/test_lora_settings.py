"""Every option of PEFT that changes what an adapter means is followed, or refused by its name."""

import dataclasses

import pytest
import torch

from exl2nb.core.errors import ConfigError, FormatError
from exl2nb.model.loader import load_model
from exl2nb.model.lora import adapter_bytes, read_lora
from exl2nb.model.lora_settings import CHANGED_BASE, FOLLOWED_SETTINGS, PLAIN_INITS, REFUSED_SETTINGS, WITHOUT_EFFECT

from .test_lora import LLAMA, Q, adapted, edited

ATTENTION = ["q_proj", "v_proj"]
V0 = "base_model.model.model.layers.0.self_attn.v_proj.lora_{}.weight"


def adapter(tmp_path, arch="llama", **options):
    adapted(arch, {"target_modules": ATTENTION, **options}, tmp_path)
    return load_model(tmp_path / "model").config


def refused(folder, config, words, kind=FormatError):
    for read in (read_lora, adapter_bytes):
        with pytest.raises(kind, match=words):
            read(folder / "lora", config)


def without(*parts):
    """Remove tensors whose names hold one of these parts."""
    return lambda found: {name: None for name in found if any(part in name for part in parts)}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "use_dora is true, but module .* has no lora_magnitude_vector"),
        ({"lora_bias": True}, "lora_bias is true, but module .* has no bias of lora_B"),
        ({"modules_to_save": ["norm"]}, "modules_to_save names 'norm', but the file has no tensor"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save names 'lm_head'"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save names 'embed_tokens'"),
        ({"modules_to_save": ["self_attn"], "target_modules": LLAMA}, "target_modules names 'k_proj'"),
        ({"modules_to_save": ["input_layernorm"]}, "modules_to_save names 'input_layernorm'"),
        ({"r": 8}, "has rank 5, but r and rank_pattern say 8"),
        ({"rank_pattern": {"q_proj": 3}}, "q_proj.*rank 5, but r and rank_pattern say 3"),
        ({"rank_pattern": {r".*\.1\.self_attn\.v_proj": 3}}, "layers.1.self_attn.v_proj.*say 3"),
        ({"target_modules": ["q_proj"]}, "v_proj' is adapted, but target_modules does not name it"),
        ({"target_modules": [*ATTENTION, "o_proj"]}, "target_modules names 'o_proj', but the file has no tensor"),
        ({"exclude_modules": ["v_proj"]}, "v_proj' is adapted, but exclude_modules names it"),
        ({"layers_to_transform": [0]}, "layer 1 is adapted, but layers_to_transform"),
        ({"layers_to_transform": 1}, "layer 0 is adapted, but layers_to_transform"),
        ({"bias": "some"}, "bias is 'some'; expected none, all or lora_only"),
        *(({"init_lora_weights": name}, f"init_lora_weights is '{name}', which changes the base model") for name in CHANGED_BASE),
        ({"init_lora_weights": "pissa_niter_16"}, "pissa_niter_16.*path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "OLoRA"}, "changes the base model"),
        ({"init_lora_weights": "something_new"}, "'something_new', which is not known"),
        *(({name: {"a": 1}}, f"{name} is set") for name in REFUSED_SETTINGS),
        ({"use_something": True}, "use_something is set"),
        ({"something_config": {"alpha": 1}}, "something_config is set"),
        *(({"peft_type": name}, name) for name in ("ADALORA", "LOHA", "LOKR", "VERA", "OFT", "X")),
    ],
)
def test_options_that_the_file_does_not_follow(tmp_path, settings, words):
    config = adapter(tmp_path)
    edited(tmp_path, settings)
    refused(tmp_path, config, words)


@pytest.mark.parametrize(
    "settings",
    [
        *({"init_lora_weights": name} for name in (True, False, *PLAIN_INITS)),
        *({name: {"alpha": 1}} for name in WITHOUT_EFFECT),
        *({name: None} for name in (*REFUSED_SETTINGS, *FOLLOWED_SETTINGS, "r", "target_modules", "modules_to_save", "bias")),
        *({name: False} for name in REFUSED_SETTINGS if name.startswith("use_")),
        {"modules_to_save": ["classifier", "score"]},  # PEFT names them for classifiers, which this model has not
        {"exclude_modules": ["o_proj"]},
        {"target_modules": [*ATTENTION, "no_such_module"]},
        {"target_modules": "all-linear"},
        {"layers_to_transform": [0, 1]},
        {"fan_in_fan_out": True},  # PEFT switches it off for these linears
        {"ensure_weight_tying": True},
        {"inference_mode": True, "lora_dropout": 0.1, "peft_version": "0.99", "unsloth_fixed": True},
    ],
)
def test_options_that_change_nothing(tmp_path, settings):
    config = adapter(tmp_path)
    before = read_lora(tmp_path / "lora", config)
    edited(tmp_path, settings)
    assert read_lora(tmp_path / "lora", config).digest == before.digest


def test_dora_without_some_of_its_magnitudes(tmp_path):
    config = adapter(tmp_path, use_dora=True)
    assert all(target.magnitude is not None for target in read_lora(tmp_path / "lora", config).targets.values())
    edited(tmp_path, None, without("layers.1.self_attn.v_proj.lora_magnitude"))
    refused(tmp_path, config, "layers.1.self_attn.v_proj' has no lora_magnitude_vector")
    edited(tmp_path, {"use_dora": False})
    refused(tmp_path, config, "use_dora is false, but module .* has a lora_magnitude_vector")
    edited(tmp_path, {"use_dora": "yes"})
    refused(tmp_path, config, "use_dora", ConfigError)


def test_biases_that_are_missing(tmp_path):
    config = adapter(tmp_path / "a", lora_bias=True)
    edited(tmp_path / "a", {"lora_bias": None})
    refused(tmp_path / "a", config, "lora_bias is false, but module .* has a bias of lora_B")
    config = adapter(tmp_path / "b", "qwen2", bias="all")
    edited(tmp_path / "b", None, without("base_layer.bias", "_proj.bias"))
    refused(tmp_path / "b", config, "bias is 'all', but the file has no bias of")
    edited(tmp_path / "b", {"bias": "lora_only"})
    refused(tmp_path / "b", config, "bias is 'lora_only', but the file has no bias of")


def test_embeddings_that_share_one_adapter_with_the_head(tmp_path):
    config = adapter(tmp_path, target_modules=["embed_tokens", "q_proj"])
    edited(tmp_path, {"ensure_weight_tying": True})
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    refused(tmp_path, tied, "ensure_weight_tying")
    read_lora(tmp_path / "lora", dataclasses.replace(config, tie_word_embeddings=False))


def test_embeddings_with_dora(tmp_path):
    config = adapter(tmp_path, target_modules=["embed_tokens"])
    edited(tmp_path, {"use_dora": True})
    refused(tmp_path, config, "embed_tokens' has no lora_magnitude_vector")


def test_a_rank_in_the_pattern_is_that_of_the_tensors(tmp_path):
    config = adapter(tmp_path, rank_pattern={"v_proj": 3})
    assert {target.rank for target in read_lora(tmp_path / "lora", config).targets.values()} == {5, 3}
    edited(tmp_path, None, {V0.format("A"): torch.zeros(4, 64), V0.format("B"): torch.zeros(32, 4), Q.format("A"): torch.zeros(5, 64)})
    with pytest.raises(FormatError):
        read_lora(tmp_path / "lora", config)

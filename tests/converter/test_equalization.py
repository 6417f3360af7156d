"""Scalings before rounding: the model computes the same, unequal channels cost less, what is not in proportion is left alone."""

import dataclasses

import pytest
import torch

from exl2nb.converter.equalization import MAX_CHANNEL_SCALE, equalize
from exl2nb.converter.quantization import Rounding
from exl2nb.converter.weights import DenseWeights
from exl2nb.io import safetensors
from exl2nb.model import reference
from exl2nb.model.loader import read_model_config
from exl2nb.model.store import open_store
from tests.model.tiny import edit

from .test_conversion_job import convert, output, write_model

IDS = torch.randint(3, 90, (6, 24), generator=torch.Generator().manual_seed(0))
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 4,
    "attention_bias": False,
}  # fmt: skip


def logits(weights):
    x = reference.embed(weights.config, ends := weights.ends(), IDS)
    for layer in range(weights.config.num_layers):
        x = reference.block(weights.config, layer, weights.layer(layer), x)
    return reference.head(weights.config, ends, reference.final_norm(weights.config, ends, x))


@pytest.mark.parametrize("changes", [{}, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}, MIXTRAL])
def test_the_model_computes_the_same(tmp_path, changes):
    source = write_model(tmp_path / "tiny", **changes)
    config = read_model_config(source)
    with open_store(config, source) as store, torch.no_grad():
        weights = DenseWeights(config, store)
        wanted, steps = logits(weights), []
        factors = equalize(weights, IDS, steps.append)
        weights.scale(factors)
        assert weights.scaled
        found = logits(weights)
    assert len(steps) == 3
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-3)  # biases are stored in fp16
    assert all(float(f.min()) > 0 and 1 / MAX_CHANNEL_SCALE <= float(f.max()) <= MAX_CHANNEL_SCALE for f in factors.values())
    assert not any("q_proj" in name or "k_proj" in name or "gate" in name for name in factors)
    assert any("o_proj" in name for name in factors)
    assert max(float(f.max()) for f in factors.values()) > 1.05


def test_what_is_clipped_is_not_scaled(weights):
    weights.config = dataclasses.replace(weights.config, clip_qkv=3.0)
    assert {name.split(".")[4] for name in equalize(weights, IDS)} == {"up_proj", "down_proj"}


def test_unequal_channels_cost_less(tmp_path):
    source = write_model(tmp_path / "tiny")
    with safetensors.SafetensorsFile(source / "model.safetensors") as file:
        tensors = {name: file.read(name).float() for name in file.names() if "up_proj" in name or "down_proj" in name}
    sizes = torch.logspace(-1.7, 1.7, 96)[torch.randperm(96, generator=torch.Generator().manual_seed(0))]
    edit(source, {name: (tensor * sizes[:, None] if "up_proj" in name else tensor / sizes).half() for name, tensor in tensors.items()})
    folded, plain = (convert(source, tmp_path / f"{on}", bpw=4.5, rounding=Rounding(folded=on)) for on in (True, False))
    assert folded.quality.kl < 0.8 * plain.quality.kl
    for name in ("again", "resumed"):
        again = convert(source, tmp_path / name, bpw=4.5, rounding=Rounding(folded=True), work_dir=tmp_path / "w")
        assert output(again.path) == output(folded.path)

"""Experts in a conversion: few tokens, or none, must not spoil one."""

import json

import pytest
import torch

from exl2nb.converter.experts import SAMPLE_TOKENS, Sample, level, share_of_sample
from exl2nb.converter.hessian import input_of
from exl2nb.converter.job import ConversionJob
from exl2nb.converter.peer import PeerMeasurement
from exl2nb.model import reference
from exl2nb.model.layout import layer_linears
from exl2nb.model.sources import DenseWeights
from exl2nb.model.store import open_store

from .zoo import build_wide, config_of, write, write_tokenizer

TEXT = " ".join(f"w{(i * i + 7 * i) % 90}" for i in range(2000))


def dense(directory):
    config = config_of(directory)
    with open_store(config, directory) as store:
        return {key: value.float() for key, value in DenseWeights(config, store).items()}


def test_an_expert_that_nobody_chose(tmp_path):
    """It is named, and rounded about as well as the others: its Hessian and its weight come from a sample of all tokens."""
    source = write("mixtral-window", build_wide("mixtral-window"), tmp_path / "dense")
    write_tokenizer(source)
    done = ConversionJob(source, tmp_path / "exl2", bpw=5.0, calibration=[TEXT], rows=4, length=32).run()
    counts = done.expert_tokens
    assert set(counts) == {0, 1} and all(len(c) == 8 and sum(c) == 3 * 32 for c in counts.values()), "3 of 4 rows are for Hessians"
    unseen = {
        f"model.layers.{layer}.block_sparse_moe.experts.{e}.w{w}"
        for layer, c in counts.items()
        for e, n in enumerate(c)
        if n == 0
        for w in (1, 2, 3)
    }
    assert unseen and set(done.unseen) == unseen
    assert "matrices of experts without a calibration token" in str(done)
    assert json.loads((done.path / "conversion.json").read_text())["unseen"] == list(done.unseen)
    before, after = dense(source), dense(done.path)
    worst = {key: float((after[f"{key}.weight"] - before[f"{key}.weight"]).norm() / before[f"{key}.weight"].norm()) for key in
             (m.key for m in done.matrices if "." in m.role)}  # fmt: skip
    assert max(worst[key] for key in unseen) < 2 * max(worst[key] for key in set(worst) - unseen)
    # exllamav2 has one option for all experts of a layer
    done.measurement.save(tmp_path / "m.json")
    table = json.loads((tmp_path / "m.json").read_text())
    option = table["measurement"]["model.layers.1.block_sparse_moe"][3]
    assert {name for name, part in option.items() if isinstance(part, dict)} == {"w1", "w2", "w3"}
    assert table["exl2nb"]["calibration"]["expert_tokens"] == {str(layer): c for layer, c in counts.items()}
    groups = PeerMeasurement.load(tmp_path / "m.json").solve(config_of(source), 5.0)
    experts = [groups[m.key] for m in done.matrices if m.role.startswith("down.") and m.layer == 1]
    assert len(experts) == 8 and len(set(experts)) == 1
    assert done.measurement.solve(8, frozen=groups).bpw <= 5.1


def test_inputs_of_a_sparse_layer():
    config = config_of_zoo("qwen2_moe")
    names = input_of(layer_linears(config, 1))
    assert names["up.3"] == "gate.3" and names["down.3"] == "down.3" and names["shared_up"] == "shared_gate" and names["v"] == "q"
    stages = reference.stages(config, 1)
    assert [stage[0] for stage in stages] == ["q", "o", "router", "shared_gate", "shared_down"]
    assert all(names[role] == stage[0] for stage in stages if stage != ("router",) for role in stage)


def config_of_zoo(name):
    from exl2nb.model.archs import parse_config

    from .tiny import raw_config

    return parse_config(raw_config(build_wide(name)))


@pytest.mark.parametrize(("tokens", "size", "share"), [(0, 64, 1.0), (32, 64, 0.25), (64, 64, 0.0), (1000, 64, 0.0)])
def test_share_of_the_sample(tokens, size, share):
    assert share_of_sample(tokens, size) == share


def test_the_sample_completes_what_is_missing():
    config = config_of_zoo("mixtral")
    g = torch.Generator().manual_seed(0)
    weights = {f"{linear.key}.weight": torch.randn(linear.shape, generator=g) for linear in layer_linears(config, 0).values()}
    x = torch.randn(2 * SAMPLE_TOKENS, config.hidden_size, generator=g)
    sample = Sample(config, 0, len(x))
    sample.see({config.names.at(0, "router"): x})
    own = torch.eye(config.hidden_size, dtype=torch.float64)
    found = sample.complete(weights, {"q": own, "gate.1": own}, {"gate.1": 1000})
    assert found["q"] is own and torch.equal(found["gate.1"], own)
    part = x[::2]
    torch.testing.assert_close(found["gate.0"], (part.T @ part).double() / len(part))
    assert set(found) == {"q", *(f"{role}.{e}" for role in ("gate", "down") for e in range(5))}
    assert all(torch.linalg.eigvalsh(found[f"down.{e}"]).min() > -1e-6 for e in range(5))


def test_no_expert_counts_nothing():
    roles = {"a": "gate.0", "b": "gate.1", "c": "q"}
    found = level({"a": torch.zeros(3), "b": torch.ones(3), "c": torch.ones(2)}, roles)
    assert (found["a"] > 0).all() and torch.equal(found["c"], torch.ones(2))
    assert found["b"].sum() > found["a"].sum() * 20

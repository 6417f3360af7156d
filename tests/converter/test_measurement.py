"""Solving from a measurement: budgets kept, bytes exact, overrides and frozen choices honoured, files read back, bad ones named."""

import json

import pytest

from exl2nb.converter.measurement import ANCHORS, Measured, Measurement
from exl2nb.converter.options import group_rows
from exl2nb.converter.peer import RECIPES, PeerMeasurement
from exl2nb.converter.sizes import CacheShape, Other, parse_bytes
from exl2nb.core.errors import ConversionError, OptionError
from exl2nb.model.archs import parse_config
from exl2nb.model.layout import linears
from exl2nb.quant.bits import group_layout, stored_bits

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def measured(linear):
    scale = 1e-3 * (1 + linear.layer) * linear.in_features / 64
    anchors = {
        (bits, size): [scale * 3.7**-bits * (1 + size / 512) * 0.8**g for g in range(len(group_rows(linear.in_features, size)))]
        for bits, size in ANCHORS
    }
    return Measured(linear.in_features, linear.out_features, 0.5, anchors, linear.role, linear.layer, linear.bias)


@pytest.fixture(scope="module")
def found():
    config = parse_config(CONFIG)
    others = (Other("model.layers.0.input_layernorm.weight", (128,), True), Other("model.embed_tokens.weight", (200, 128), False))
    table = {linear.key: measured(linear) for linear in linears(config)}
    return Measurement(key="k", linears=table, fingerprint="f", others=others, cache=CacheShape(2, 2, 32))


@pytest.mark.parametrize("bpw", [2.6, 3.0, 4.37, 6.0, 8.0])
def test_budget_of_bits(found, bpw):
    plan = found.solve(bpw)
    assert bpw - 0.06 < plan.bpw <= bpw
    assert plan.head_bpw == pytest.approx(found.solve(bpw, head_bits=6).head_bpw)
    assert sum(c.share for c in plan.choices) == pytest.approx(1)
    assert plan.predicted_kl == pytest.approx(sum(c.predicted_kl for c in plan.choices))
    assert all(stored_bits(c.groups, c.out_features + -c.out_features % 32) == 8 * c.nbytes for c in plan.choices)
    shared = found.solve(bpw, head_bits="auto")
    assert shared.nbytes <= plan.nbytes + 1000  # what a fixed head leaves unspent, and digits of the header
    assert plan.groups() == found.solve(bpw).groups()
    assert len(plan.to_frame()) == len(json.loads(json.dumps(plan.to_dict()))["choices"]) == 15


def test_more_bits_cost_less_kl(found):
    kls = [found.solve(b / 4, head_bits="auto").predicted_kl for b in range(11, 32)]
    assert kls == sorted(kls, reverse=True)


def test_budget_of_bytes_and_of_a_memory(found):
    for size in (200_000, 250_000):
        assert size - 3000 < found.solve(bytes=size).nbytes <= size
    whole = found.solve(fits="400kB")
    assert whole.nbytes <= 384_000
    assert found.solve(fits="400kB", context=256).nbytes <= whole.nbytes - 256 * 2 * 2 * 32 * 2 * 2 + 3000
    with pytest.raises(ConversionError, match="at least"):
        found.solve(bytes=60_000)
    with pytest.raises(ConversionError, match="reaches 2"):
        found.solve(2.0)
    for wrong in ({}, {"bpw": 3, "bytes": 9}, {"fits": "much"}, {"bpw": 9}, {"bpw": 4, "head_bits": 7}, {"bpw": 4, "head_bits": "six"}):
        with pytest.raises(OptionError):
            found.solve(**wrong)
    assert parse_bytes("24GiB", where="x") == 24 << 30


def test_overrides_and_frozen(found):
    plan = found.solve(5, overrides={"layer 1": 3, "v": (6, 8), "*.down_proj": [(8, 32), (4, 320)]})
    for choice in plan.choices[:-1]:
        mean = sum(b * r for b, r in choice.groups) / choice.in_features
        if choice.layer == 1:
            assert mean <= 3
        elif choice.role == "v":
            assert 6 <= mean <= 8
        elif choice.role == "down":
            assert choice.groups == ((8, 32), (4, 320))
    kept = {key: groups for key, groups in plan.groups().items() if ".0." in key}
    again = found.solve(5, frozen=kept)
    assert {key: groups for key, groups in again.groups().items() if key in kept} == kept
    for wrong in ({"nothing.*": 4}, {"q": 1}, {"q": (7.9, 7.95)}, {"q": "4"}, {"q": [(3, 32), (4, 96)]}, {"q": [(4, 64)]}):
        with pytest.raises(OptionError):
            found.solve(4, overrides=wrong)


def test_saved_and_loaded(found, tmp_path):
    found.save(tmp_path / "m.json")
    loaded = Measurement.load(tmp_path / "m.json")
    assert loaded == found
    assert loaded.solve(3.3).groups() == found.solve(3.3).groups()
    content = json.loads((tmp_path / "m.json").read_text())
    del content["exl2nb"]["linears"]["lm_head"]["anchors"]["4/32"]
    (tmp_path / "m.json").write_text(json.dumps(content))
    with pytest.raises(ConversionError, match="measure again"):
        Measurement.load(tmp_path / "m.json")


def test_the_other_reader_finds_what_it_needs(found, tmp_path):
    """The rules under which exllamav2 0.3.2 takes a measurement, and its own exact optimum."""
    found.save(tmp_path / "m.json")
    content = json.loads((tmp_path / "m.json").read_text())
    assert set(content["measurement"]) == {f"model.layers.{i}.{p}" for i in (0, 1) for p in ("self_attn", "mlp")} | {
        "model.norm.norm",
        "lm_head.linear",
    }
    assert content["last_module_idx"] == 6
    for module, options in content["measurement"].items():
        if options is None:
            continue
        assert len(options) == len(RECIPES)
        for option in options:
            assert 1e-6 <= option["accuracy"] < 1
            parts = {name: part for name, part in option.items() if isinstance(part, dict)}
            assert set(parts) == ({"q_proj", "k_proj", "v_proj", "o_proj"} if "attn" in module else {"gate_proj", "up_proj", "down_proj"})
            bits = 0
            for name, part in parts.items():
                assert sum(part["bits_prop"]) == 1
                shape = found.linears[f"{module}.{name}"]
                bits += stored_bits(
                    group_layout(shape.in_features, part["bits"], part["bits_prop"], part["group_size"]), shape.out_features
                )
            assert option["total_bits"] == bits
        assert options[-1]["accuracy"] > options[0]["accuracy"]
    peer = PeerMeasurement.load(tmp_path / "m.json")
    groups = peer.solve(parse_config(CONFIG), 4.5)
    assert set(groups) == set(found.linears) - {"lm_head"}
    assert found.solve(8, frozen=groups).bpw <= 4.6
    for broken in ({}, {"measurement": {}}, {"measurement": {"model.layers.0.mlp": [{"accuracy": 2}]}}):
        (tmp_path / "p.json").write_text(json.dumps(broken))
        with pytest.raises(ConversionError):
            PeerMeasurement.load(tmp_path / "p.json")


def test_the_packaged_measurement_is_of_the_packaged_model():
    from exl2nb.converter.api import DEMO, demo_measurement
    from exl2nb.converter.weights import DenseWeights
    from exl2nb.model.loader import read_model_config
    from exl2nb.model.store import open_store

    found, config = demo_measurement(), read_model_config(DEMO.parent)
    with open_store(config, DEMO.parent) as store:
        assert found.fingerprint == DenseWeights(config, store).fingerprint()
    assert DEMO.stat().st_size < 320_000
    plans = [found.solve(bpw, head_bits="auto") for bpw in (2.5, 3, 4, 6)]
    assert [plan.predicted_kl for plan in plans] == sorted((plan.predicted_kl for plan in plans), reverse=True)
    assert plans[1].head_bpw < 5 < plans[1].bpw + 2

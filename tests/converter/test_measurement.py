"""Solving from a measurement: Pareto fronts, the knapsack against brute force, budgets, overrides, files read back; bad ones named."""

import itertools
import json
import random

import numpy as np
import pytest

from exl2nb.converter.allocation import allocate_bits, group_rows, pareto_fronts
from exl2nb.converter.measurement import ANCHOR_CODINGS, Measured, Measurement
from exl2nb.converter.peer import EXLLAMAV2_RECIPES, PeerMeasurement
from exl2nb.converter.sizes import CacheShape, Other, parse_bytes
from exl2nb.core.errors import ConversionError, OptionError
from exl2nb.model.archs import parse_config
from exl2nb.model.layout import model_linears
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
        for bits, size in ANCHOR_CODINGS
    }
    return Measured(linear.in_features, linear.out_features, 0.5, anchors, linear.role, linear.layer, linear.bias)


@pytest.fixture(scope="module")
def found():
    config = parse_config(CONFIG)
    others = (Other("model.layers.0.input_layernorm.weight", (128,), True), Other("model.embed_tokens.weight", (200, 128), False))
    table = {linear.key: measured(linear) for linear in model_linears(config)}
    return Measurement(key="k", linears=table, fingerprint="f", others=others, cache=CacheShape(2, 2, 32))


@pytest.mark.parametrize("bpw", [2.6, 3.0, 4.37, 6.0, 8.0])
def test_budget_of_bits(found, bpw):
    allocation = found.solve(bpw)
    assert bpw - 0.06 < allocation.bpw <= bpw
    assert allocation.head_bpw == pytest.approx(found.solve(bpw, head_bits=6).head_bpw)
    assert sum(c.share for c in allocation.choices) == pytest.approx(1)
    assert allocation.predicted_kl == pytest.approx(sum(c.predicted_kl for c in allocation.choices))
    assert all(stored_bits(c.groups, c.out_features + -c.out_features % 32) == 8 * c.nbytes for c in allocation.choices)
    shared = found.solve(bpw, head_bits="auto")
    assert shared.nbytes <= allocation.nbytes + 1000  # what a fixed head leaves unspent, and digits of the header
    assert allocation.groups() == found.solve(bpw).groups()
    assert len(allocation.to_frame()) == len(json.loads(json.dumps(allocation.to_dict()))["choices"]) == 15


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
    allocation = found.solve(5, overrides={"layer 1": 3, "v": (6, 8), "*.down_proj": [(8, 32), (4, 320)]})
    for choice in allocation.choices[:-1]:
        mean = sum(b * r for b, r in choice.groups) / choice.in_features
        if choice.layer == 1:
            assert mean <= 3
        elif choice.role == "v":
            assert 6 <= mean <= 8
        elif choice.role == "down":
            assert choice.groups == ((8, 32), (4, 320))
    kept = {key: groups for key, groups in allocation.groups().items() if ".0." in key}
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
        assert len(options) == len(EXLLAMAV2_RECIPES)
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
    from exl2nb.converter.conversion_job import DEMO_MEASUREMENT_FILE, demo_measurement
    from exl2nb.converter.weights import DenseWeights
    from exl2nb.model.loader import read_model_config
    from exl2nb.model.store import open_store

    found, config = demo_measurement(), read_model_config(DEMO_MEASUREMENT_FILE.parent)
    with open_store(config, DEMO_MEASUREMENT_FILE.parent) as store:
        assert found.fingerprint == DenseWeights(config, store).fingerprint()
    assert DEMO_MEASUREMENT_FILE.stat().st_size < 320_000
    allocations = [found.solve(bpw, head_bits="auto") for bpw in (2.5, 3, 4, 6)]
    predicted = [allocation.predicted_kl for allocation in allocations]
    assert predicted == sorted(predicted, reverse=True)
    assert allocations[1].head_bpw < 5 < allocations[1].bpw + 2


def brute(options, budget):
    totals = [(sum(o[1] for o in pick), sum(o[0] for o in pick)) for pick in itertools.product(*options)]
    return min(error for error, bits in totals if bits <= budget)


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force(seed):
    rng = random.Random(seed)
    options = [
        [(rng.randint(1, 60), rng.random() * 10 ** rng.randint(-3, 0)) for _ in range(rng.randint(1, 6))] for _ in range(rng.randint(1, 5))
    ]
    least, most = sum(min(o[0] for o in m) for m in options), sum(max(o[0] for o in m) for m in options)
    budget = rng.randint(least, most)
    picks = allocate_bits(options, budget)
    assert sum(m[i][0] for m, i in zip(options, picks)) <= budget
    assert sum(m[i][1] for m, i in zip(options, picks)) == pytest.approx(brute(options, budget), rel=1e-12)
    assert picks == allocate_bits(options, budget)


def test_equal_errors_and_zero_errors_are_fine():
    options = [[(10, 0.0), (20, 0.0)], [(5, 1.0), (6, 1.0)]]
    assert allocate_bits(options, 15) == [0, 0]


def test_large_instances_stay_exact_enough_and_fast():
    rng = random.Random(1)
    sizes = range(2, 9)
    options = [[(b * 1000 + rng.randint(0, 300), rng.uniform(0.5, 2) * 4.0**-b) for b in sizes for _ in range(12)] for _ in range(200)]
    budget = 4_100_000 // 4
    picks = allocate_bits(options, budget)
    bits = sum(m[i][0] for m, i in zip(options, picks))
    assert budget - 300 <= bits <= budget


def test_out_of_reach_names_the_range():
    with pytest.raises(ConversionError, match="at least 12 .up to 25"):
        allocate_bits([[(10, 1.0), (20, 0.1)], [(2, 1.0), (5, 0.0)]], 11)


def anchors(k, seed=0):
    rng = random.Random(seed)
    table = {}
    for bits in (2, 3, 4, 5, 6, 8):
        for size in (32, 128):
            table[bits, size] = []
            for first in range(0, k, size):
                size_of_inputs = sum(1.0 / (1 + row) for row in range(first, min(k, first + size)))
                table[bits, size].append(size_of_inputs * (1 + size / 500) * 4.0**-bits * rng.uniform(0.9, 1.1))
    return table


@pytest.mark.parametrize("k", [32, 96, 256, 352])
def test_front_is_legal_dense_and_undominated(k):
    front = pareto_fronts(k, [(64, anchors(k), False)])[0]
    options = [front.groups(i) for i in range(len(front))]
    for groups, bits in zip(options, front.bits):
        widths = [width for width, _ in groups]
        assert widths == sorted(widths, reverse=True)
        assert sum(rows for _, rows in groups) == k
        assert all(rows % 32 == 0 for _, rows in groups)
        assert bits == stored_bits(groups, 64)
    assert (np.diff(front.bits) > 0).all() and (np.diff(front.error) < 0).all(), "what is beaten is left out"
    assert {bits for bits, _ in options[0]} == {2}
    assert {bits for bits, _ in options[-1]} == {8}
    assert len(options) >= 6


def test_uniform_options_cost_what_was_measured():
    table = anchors(256)
    front = pareto_fronts(256, [(64, table, False)])[0]
    index = [front.groups(i) for i in range(len(front))].index(((8, 32),) * 8)
    assert front.error[index] == pytest.approx(sum(table[8, 32]))

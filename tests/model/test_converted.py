"""Models of every architecture through the converter and back; experts with few calibration tokens, or none."""

import json
from functools import partial

import pytest
import torch

from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.converter.experts import SAMPLE_TOKENS, RoutedSample, level_expert_gradients, share_of_sample
from exl2nb.converter.hessian import role_inputs
from exl2nb.converter.peer import PeerMeasurement
from exl2nb.io.shards import TensorStore
from exl2nb.model import reference
from exl2nb.model.archs import parse_config
from exl2nb.model.inspection import inspect
from exl2nb.model.layout import layer_linears, model_linears, vector_shapes
from exl2nb.model.loader import load_model
from exl2nb.model.sources import ReconstructedWeights
from exl2nb.model.store import open_store

from .test_model import error, run
from .tiny import ids_of, raw_config, truth
from .zoo import ZOO, build_wide, config_of, write, write_tokenizer

TEXT = " ".join(f"w{(i * i + 7 * i) % 90}" for i in range(2000))


def dense_weights(directory):
    """Its config and weights in fp32."""
    config = config_of(directory)
    with open_store(config, directory) as store, torch.no_grad():
        return config, {key: value.float() for key, value in ReconstructedWeights(config, store).items()}


def tolerance(config):
    """Rounding weights once more to fp16 and activations to int16 adds up over layers and experts; post norms magnify it."""
    return 6e-3 if config.post_norm else (1e-3 if config.moe is None else 1.5e-3) * max(2, config.num_layers)


def fused(weights, config):
    """Phi-3's own matrices out of ours."""
    out = dict(weights)
    for layer in range(config.num_layers):
        stem = f"model.layers.{layer}"
        for whole, module, parts in (("qkv_proj", "self_attn", "qkv"), ("gate_up_proj", "mlp", ("gate", "up"))):
            out[f"{stem}.{module}.{whole}.weight"] = torch.cat([out.pop(f"{stem}.{module}.{part}_proj.weight") for part in parts])
    return out


def routed(weights, config):
    """Experts stacked into one tensor a role, as Transformers holds them."""
    out = dict(weights)
    for layer in range(config.num_layers):
        moe, at = config.experts(layer), partial(config.names.at, layer)
        if moe is None:
            continue
        stem, experts = f"model.layers.{layer}.mlp", range(moe.num_experts)
        gate, up, down = ([out.pop(f"{at(f'{role}.{e}')}.weight") for e in experts] for role in ("gate", "up", "down"))
        out[f"{stem}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up)])
        out[f"{stem}.experts.down_proj"] = torch.stack(down)
        out[f"{stem}.gate.weight"] = out.pop(f"{at('router')}.weight")
    return out


def dbrx(weights, config):
    """DBRX's stacked tensors and its own names."""
    out = dict(weights)
    for layer in range(config.num_layers):
        moe, stem = config.experts(layer), f"model.layers.{layer}"
        out[f"{stem}.self_attn.Wqkv.weight"] = torch.cat([out.pop(f"{stem}.self_attn.{part}_proj.weight") for part in "qkv"])
        for part in ("w1", "v1", "w2"):
            parts = [out.pop(f"{stem}.block_sparse_moe.experts.{e}.{part}.weight") for e in range(moe.num_experts)]
            out[f"{stem}.block_sparse_moe.experts.{part}"] = torch.cat([p.T if part == "w2" else p for p in parts])
    for old, new in reversed(config.files.renames):
        out = {name.replace(new, old): value for name, value in out.items()}
    return out


# what Transformers calls the tensors, where it can be said in a line
THEIRS = {"phi3": fused, "gemma2": lambda w, _: w, "cohere": lambda w, _: w, "olmo2": lambda w, _: w, "qwen3": lambda w, _: w,
          "mixtral": routed, "gemmoe": routed, "qwen2_moe": routed, "qwen3_moe": routed, "dbrx": dbrx}  # fmt: skip


def _check_passed(source, made):
    with TensorStore(source) as before, TensorStore(made) as after:
        passed = [name for name in after.names() if name.startswith(TOWERS)]
        renamed = {
            name.removeprefix("model.").replace("mm_input_projection_weight", "mm_input_projection.weight"): name for name in before.names()
        }
        assert len(passed) == sum(any(part in name for part in ("vision", "projector", "visual")) for name in before.names()) >= 5
        for name in passed:
            want, got = before.read(renamed[name]), after.read(name)
            assert want.dtype == got.dtype and torch.equal(want, got)


TOWERS = ("vision_tower.", "multi_modal_projector.", "visual.")

# one of every kind; the others run with the slow tests
FAST = {"phi3", "gemma2", "cohere", "olmo2", "qwen3", "gpt2-published", "starcoder2", "gemma3-multimodal", "qwen3_vl", "index"}
FAST |= {"mixtral", "qwen2_moe", "dbrx"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in ZOO])
def test_there_and_back(name, tmp_path):
    twin = build_wide(name)
    source = write(name, twin, tmp_path / "dense")
    write_tokenizer(source)
    done = ConversionJob(source, tmp_path / "exl2", bpw=5.0, calibration=[TEXT], rows=4, length=32, seed=2).run()
    assert done.bpw <= 5.0
    config, weights = dense_weights(done.path)
    with TensorStore(done.path) as plain:  # canonical names, each vector in the shape that exllamav2 writes
        stored = {name: plain.info(name).shape for name in plain.names() if not name.rpartition(".")[2].startswith("q_")}
        quantised = {name.removesuffix(".q_weight") for name in plain.names() if name.endswith(".q_weight")}
    if config.files.passed:  # the vision tower, bit for bit
        _check_passed(source, done.path)
        stored = {key: shape for key, shape in stored.items() if not key.startswith(TOWERS)}
    biases = {f"{linear.key}.bias": (linear.out_features,) for linear in model_linears(config) if linear.bias}
    assert stored == {**vector_shapes(config), **biases}
    assert quantised == {linear.key for linear in model_linears(config)}
    assert inspect(done.path).layers == config.num_layers

    # another seed for experts: with 0, rounding decides which of two equally probable experts the second token gets
    model, ids = load_model(done.path), ids_of(config.vocab_size, 1, 60, seed=0 if config.moe is None else 1)
    with torch.no_grad():
        want = reference.logits(config, weights, ids)[0]
    got = run(model, ids[0])
    assert error(got, want) < tolerance(config)
    # it is still that model: nothing is scrambled
    correlation = torch.corrcoef(torch.stack([got.flatten(), truth(twin, ids)[0].flatten()]))[0, 1]
    assert correlation > (0.95 if config.moe is None else 0.9)  # noise sends a token to another expert now and then
    if name in THEIRS:
        twin.config.tie_word_embeddings = False
        twin.lm_head.weight = torch.nn.Parameter(twin.lm_head.weight.detach().clone())
        theirs = {key: value.squeeze() if value.dim() != 2 else value for key, value in THEIRS[name](weights, config).items()}
        own = twin.state_dict()
        theirs = {key: value[0] if value.dim() == 2 and own[key].dim() == 1 else value for key, value in theirs.items()}
        assert set(theirs) == set(own)
        twin.load_state_dict(theirs)
        assert error(got, truth(twin, ids)[0]) < tolerance(config)
    assert json.loads((done.path / "config.json").read_text())["quantization_config"]["quant_method"] == "exl2"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt2-published", "olmo2", "cohere"])
def test_the_same_bytes_twice_on_a_gpu(name, tmp_path):
    source = write(name, build_wide(name), tmp_path / "dense")
    write_tokenizer(source)
    options = {"bpw": 5.0, "calibration": [TEXT], "rows": 16, "length": 32}
    first, second, cpu = (
        ConversionJob(source, tmp_path / str(i), device=on, **options).run() for i, on in enumerate(("cuda", "cuda", "cpu"))
    )
    assert (first.path / "output.safetensors").read_bytes() == (second.path / "output.safetensors").read_bytes()
    assert first.quality.kl < 2 * cpu.quality.kl  # of few rows; a token more or less that changes its expert is most of it


def test_experts_without_a_calibration_token(tmp_path):
    """They are named, and rounded about as well as the others: their Hessians and weights come from a sample of all tokens."""
    source = write("mixtral-window", build_wide("mixtral-window"), tmp_path / "dense")
    write_tokenizer(source)
    done = ConversionJob(source, tmp_path / "exl2", bpw=5.0, calibration=[TEXT], rows=4, length=32).run()
    counts = done.expert_tokens
    assert set(counts) == {0, 1} and all(len(c) == 8 and sum(c) == 3 * 32 for c in counts.values()), "3 of 4 rows are for Hessians"
    idle = [f"model.layers.{layer}.block_sparse_moe.experts.{e}" for layer, c in counts.items() for e, n in enumerate(c) if n == 0]
    unseen = {f"{expert}.w{w}" for expert in idle for w in (1, 2, 3)}
    assert unseen and set(done.unseen) == unseen
    assert "matrices of experts without a calibration token" in str(done)
    assert json.loads((done.path / "conversion.json").read_text())["unseen"] == list(done.unseen)
    before, after = dense_weights(source)[1], dense_weights(done.path)[1]
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
    names = role_inputs(layer_linears(config, 1))
    assert names["up.3"] == "gate.3" and names["down.3"] == "down.3" and names["shared_up"] == "shared_gate" and names["v"] == "q"
    stages = reference.stages(config, 1)
    assert [stage[0] for stage in stages] == ["q", "o", "router", "shared_gate", "shared_down"]
    assert all(names[role] == stage[0] for stage in stages if stage != ("router",) for role in stage)


def config_of_zoo(name):
    return parse_config(raw_config(build_wide(name)))


@pytest.mark.parametrize(("tokens", "size", "share"), [(0, 64, 1.0), (32, 64, 0.25), (64, 64, 0.0), (1000, 64, 0.0)])
def test_share_of_the_sample(tokens, size, share):
    assert share_of_sample(tokens, size) == share


def test_the_sample_completes_missing_hessians():
    config = config_of_zoo("mixtral")
    g = torch.Generator().manual_seed(0)
    weights = {f"{linear.key}.weight": torch.randn(linear.shape, generator=g) for linear in layer_linears(config, 0).values()}
    x = torch.randn(2 * SAMPLE_TOKENS, config.hidden_size, generator=g)
    sample = RoutedSample(config, 0, len(x))
    sample.see({config.names.at(0, "router"): x})
    own = torch.eye(config.hidden_size, dtype=torch.float64)
    found = sample.complete(weights, {"q": own, "gate.1": own}, {"gate.1": 1000})
    assert found["q"] is own and torch.equal(found["gate.1"], own)
    part = x[::2]
    torch.testing.assert_close(found["gate.0"], (part.T @ part).double() / len(part))
    assert set(found) == {"q", *(f"{role}.{e}" for role in ("gate", "down") for e in range(5))}
    assert all(torch.linalg.eigvalsh(found[f"down.{e}"]).min() > -1e-6 for e in range(5))


def test_every_expert_counts():
    roles = {"a": "gate.0", "b": "gate.1", "c": "q"}
    found = level_expert_gradients({"a": torch.zeros(3), "b": torch.ones(3), "c": torch.ones(2)}, roles)
    assert (found["a"] > 0).all() and torch.equal(found["c"], torch.ones(2))
    assert found["b"].sum() > found["a"].sum() * 20

"""Models that are built otherwise than Llama, through the converter and back."""

import json
from functools import partial

import pytest
import torch

from exl2nb.converter.job import ConversionJob
from exl2nb.io.shards import TensorStore
from exl2nb.model import reference
from exl2nb.model.inspect import inspect
from exl2nb.model.layout import linears, vectors
from exl2nb.model.loader import load_model
from exl2nb.model.sources import DenseWeights
from exl2nb.model.store import open_store

from .test_model import error, run
from .tiny import ids_of, truth
from .zoo import ZOO, build_wide, config_of, write, write_tokenizer


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
        passed = [name for name in after.names() if name.startswith(("vision_tower.", "multi_modal_projector."))]
        renamed = {
            name.removeprefix("model.").replace("mm_input_projection_weight", "mm_input_projection.weight"): name for name in before.names()
        }
        assert len(passed) == sum("vision" in name or "projector" in name for name in before.names()) >= 5
        for name in passed:
            want, got = before.read(renamed[name]), after.read(name)
            assert want.dtype == got.dtype and torch.equal(want, got)


# one of every kind; the others run with the slow tests
FAST = (
    "phi3",
    "gemma2",
    "cohere",
    "olmo2",
    "qwen3",
    "gpt2-published",
    "starcoder2",
    "gemma3-multimodal",
    "index",
    "mixtral",
    "qwen2_moe",
    "dbrx",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in ZOO])
def test_there_and_back(name, tmp_path):
    twin = build_wide(name)
    source = write(name, twin, tmp_path / "dense")
    write_tokenizer(source)
    text = " ".join(f"w{(i * i + 7 * i) % 90}" for i in range(2000))
    done = ConversionJob(source, tmp_path / "exl2", bpw=5.0, calibration=[text], rows=4, length=32, seed=2).run()
    assert done.bpw <= 5.0
    config = config_of(done.path)
    with TensorStore(done.path) as plain:  # canonical names, each vector in the shape that exllamav2 writes
        stored = {name: plain.info(name).shape for name in plain.names() if not name.rpartition(".")[2].startswith("q_")}
        quantised = {name.removesuffix(".q_weight") for name in plain.names() if name.endswith(".q_weight")}
    if config.files.passed:  # the vision tower, bit for bit
        _check_passed(source, done.path)
        stored = {key: shape for key, shape in stored.items() if not key.startswith(("vision_tower.", "multi_modal_projector."))}
    biases = {f"{linear.key}.bias": (linear.out_features,) for linear in linears(config) if linear.bias}
    assert stored == {**vectors(config), **biases}
    assert quantised == {linear.key for linear in linears(config)}
    assert inspect(done.path).layers == config.num_layers

    # another seed for experts: with 0, rounding decides which of two equally probable experts the second token gets
    model, ids = load_model(done.path), ids_of(config.vocab_size, 1, 60, seed=0 if config.moe is None else 1)
    with open_store(config, done.path) as store, torch.no_grad():
        weights = {key: value.float() for key, value in DenseWeights(config, store).items()}
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
    options = {"bpw": 5.0, "calibration": [" ".join(f"w{(i * i + 7 * i) % 90}" for i in range(2000))], "rows": 16, "length": 32}
    first, second, cpu = (
        ConversionJob(source, tmp_path / str(i), device=on, **options).run() for i, on in enumerate(("cuda", "cuda", "cpu"))
    )
    assert (first.path / "output.safetensors").read_bytes() == (second.path / "output.safetensors").read_bytes()
    assert first.quality.kl < 2 * cpu.quality.kl  # of few rows; a token more or less that changes its expert is most of it

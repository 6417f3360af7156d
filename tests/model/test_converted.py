"""Models that are built otherwise than Llama, through the converter and back."""

import json

import pytest
import torch

from exl2nb.converter.job import ConversionJob
from exl2nb.io.shards import TensorStore
from exl2nb.model import reference
from exl2nb.model.dense import DenseWeights
from exl2nb.model.inspect import inspect
from exl2nb.model.layout import linears, vectors
from exl2nb.model.loader import load_model
from exl2nb.model.store import open_store

from .test_model import error, run
from .tiny import ids_of, truth
from .zoo import build_wide, config_of, write, write_tokenizer


def fused(weights, config):
    """Phi-3's own matrices out of ours."""
    out = dict(weights)
    for layer in range(config.num_layers):
        stem = f"model.layers.{layer}"
        for whole, module, parts in (("qkv_proj", "self_attn", "qkv"), ("gate_up_proj", "mlp", ("gate", "up"))):
            out[f"{stem}.{module}.{whole}.weight"] = torch.cat([out.pop(f"{stem}.{module}.{part}_proj.weight") for part in parts])
    return out


# what Transformers calls the tensors, where it can be said in a line
THEIRS = {"phi3": fused, "gemma2": lambda w, _: w, "cohere": lambda w, _: w, "olmo2": lambda w, _: w, "qwen3": lambda w, _: w}


@pytest.mark.parametrize(
    "name", ["phi3", "gemma2", "cohere", "olmo2", "qwen3", "gpt2-published", "starcoder2", "gemma3-multimodal", "index"]
)
def test_there_and_back(name, tmp_path):
    twin = build_wide(name)
    source = write(name, twin, tmp_path / "dense")
    write_tokenizer(source)
    text = " ".join(f"w{(i * i + 7 * i) % 90}" for i in range(2000))
    done = ConversionJob(source, tmp_path / "exl2", bpw=5.0, calibration=[text], rows=4, length=32).run()
    assert done.bpw <= 5.0
    config = config_of(done.path)
    with TensorStore(done.path) as plain:  # canonical names, each vector in the shape that exllamav2 writes
        stored = {name: plain.info(name).shape for name in plain.names() if not name.rpartition(".")[2].startswith("q_")}
        quantised = {name.removesuffix(".q_weight") for name in plain.names() if name.endswith(".q_weight")}
    biases = {f"{linear.key}.bias": (linear.out_features,) for linear in linears(config) if linear.bias}
    assert stored == {**vectors(config), **biases}
    assert quantised == {linear.key for linear in linears(config)}
    assert inspect(done.path).layers == config.num_layers

    model, ids = load_model(done.path), ids_of(config.vocab_size, 1, 60)
    with open_store(config, done.path) as store, torch.no_grad():
        weights = {key: value.float() for key, value in DenseWeights(config, store).items()}
        want = reference.logits(config, weights, ids)[0]
    got = run(model, ids[0])
    assert error(got, want) < (6e-3 if config.post_norm else 2e-3)
    # it is still that model: nothing is scrambled
    correlation = torch.corrcoef(torch.stack([got.flatten(), truth(twin, ids)[0].flatten()]))[0, 1]
    assert correlation > 0.95
    if name in THEIRS:
        twin.config.tie_word_embeddings = False
        twin.lm_head.weight = torch.nn.Parameter(twin.lm_head.weight.detach().clone())
        theirs = {key: value.squeeze() if value.dim() != 2 else value for key, value in THEIRS[name](weights, config).items()}
        own = twin.state_dict()
        theirs = {key: value[0] if value.dim() == 2 and own[key].dim() == 1 else value for key, value in theirs.items()}
        assert set(theirs) == set(own)
        twin.load_state_dict(theirs)
        assert error(got, truth(twin, ids)[0]) < (6e-3 if config.post_norm else 2e-3)
    assert json.loads((done.path / "config.json").read_text())["quantization_config"]["quant_method"] == "exl2"

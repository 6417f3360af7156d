"""Every architecture against Transformers, on the zoo's tiny random models."""

import functools
import itertools

import pytest
import torch

from exl2nb.cache.pool import KVCache
from exl2nb.core.errors import FormatError, OptionError
from exl2nb.io.safetensors import save as save_tensors
from exl2nb.model import reference
from exl2nb.model.archs import ARCHS
from exl2nb.model.batch import Batch, SequenceSlice
from exl2nb.model.inspection import inspect
from exl2nb.model.layout import model_linears
from exl2nb.model.loader import load_model
from exl2nb.model.sources import ReconstructedWeights
from exl2nb.model.store import open_store

from .test_model import error, run, same
from .tiny import configure, ids_of, truth
from .zoo import LONGROPE, SIZES, ZOO, build, build_wide, config_of, write, write_exl2


def test_every_architecture_has_a_model():
    assert {entry.arch for entry in ZOO.values()} == set(ARCHS)


@pytest.mark.parametrize("seed", range(len(SIZES)))
@pytest.mark.parametrize("name", ZOO)
def test_logits_equal_transformers(name, seed, tmp_path):
    twin = build(name, seed=seed)
    model = load_model(write(name, twin, tmp_path))
    ids = ids_of(model.config.vocab_size, 1, 270 if seed == 0 else 60, seed)
    want = truth(twin, ids)[0]
    assert error(run(model, ids[0]), want) < 1e-4
    assert error(run(model, ids[0], mode="fp16", pages=[3, 1]), want) < 5e-3
    with open_store(model.config, tmp_path) as store, torch.no_grad():
        assert error(reference.logits(model.config, ReconstructedWeights(model.config, store), ids)[0], want) < 1e-4


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """Name -> a model of random EXL2 matrices, ids, and their logits in one step; made once."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp(name)
        model = load_model(write_exl2(write(name, build_wide(name), folder / "dense"), folder / "exl2"))
        ids = ids_of(model.config.vocab_size, 1, 270)[0]
        return model, ids.tolist(), run(model, ids, mode="fp16")

    return make


@pytest.mark.parametrize("name", ZOO)
def test_any_cut_gives_the_same_bits(name, quantised):
    model, ids, once = quantised(name)
    assert same(run(model, torch.tensor(ids), mode="fp16", forward="forward_by_ops"), once)
    for bounds in ([0, 1, 3, 64, 255, 258, 270], list(range(41))):
        cache = KVCache(model.cache_spec(512))
        rows = [
            model.forward(Batch.single(ids[a:b], start=a, pages=[0, 1], logit_rows="all"), cache) for a, b in itertools.pairwise(bounds)
        ]
        assert same(torch.cat(rows), once[: bounds[-1]])


@pytest.mark.parametrize("name", ZOO)
def test_any_batch_gives_the_same_bits(name, quantised):
    model, ids, once = quantised(name)
    spans = [SequenceSlice(ids=ids[:n], start=0, pages=[page], logit_rows="all") for page, n in enumerate((20, 1, 33))]
    for logits in model.forward(Batch.build(spans), KVCache(model.cache_spec(768))).split([20, 1, 33]):
        assert same(logits, once[: len(logits)])


@pytest.mark.parametrize("name", ZOO)
def test_fused_steps_on_threads_give_the_same_bits(name, quantised):
    """Six texts, one token each: `draw_ahead` where the model allows it, and a step of the usual kind."""
    model, ids, _ = quantised(name)
    texts = [ids[: 3 + i] for i in range(6)]
    alone = [model.forward(Batch.single(text, start=0, pages=[0]), KVCache(model.cache_spec(256))) for text in texts]
    cache = KVCache(model.cache_spec(6 * 256))
    model.forward(Batch.build([SequenceSlice(ids=text[:-1], start=0, pages=[page]) for page, text in enumerate(texts)]), cache)
    batch = Batch.build([SequenceSlice(ids=text[-1:], start=len(text) - 1, pages=[page]) for page, text in enumerate(texts)])
    assert same(model.forward(batch, cache), torch.cat(alone))
    if model.capabilities.draws_ahead:
        step = model.draw_ahead(batch, cache, (torch.tensor([[0.0, 0, 1, 0, 0]] * 6, dtype=torch.float64), 0, None))
        step.join()
        assert same(step.logits, torch.cat(alone))
        assert step.drawn[:, 0].tolist() == torch.cat(alone).argmax(1).tolist()


@pytest.mark.parametrize("name", ZOO)
def test_exl2_equals_the_reconstructed_weights(name, tmp_path):
    directory = write_exl2(write(name, build_wide(name), tmp_path / "dense"), tmp_path / "exl2")
    model, config = load_model(directory), config_of(directory)
    ids = ids_of(config.vocab_size, 1, 60)
    with open_store(config, directory) as store, torch.no_grad():
        want = reference.logits(config, ReconstructedWeights(config, store), ids)[0]
    # reconstructing rounds every weight once more to fp16; norms behind each half magnify that
    assert error(run(model, ids[0]), want) < (6e-3 if config.post_norm else 2e-3)
    assert error(run(load_model(directory, weights="fp32"), ids[0]), want) < 1e-4
    found = inspect(directory)
    assert found.layers == config.num_layers
    assert {matrix.key for matrix in found.decoder} == {linear.key for linear in model_linears(config) if linear.role != "head"}


@pytest.mark.parametrize("name", ZOO)
def test_inspect_sees_every_matrix_of_a_checkpoint(name, tmp_path):
    directory = write(name, build(name), tmp_path)
    config, found = config_of(directory), inspect(directory)
    assert found.layers == config.num_layers
    assert {matrix.key for matrix in found.decoder} == {linear.key for linear in model_linears(config) if linear.role != "head"}


@pytest.mark.parametrize("context", [128, 512])
def test_longrope_takes_its_factors_from_the_length(context, tmp_path):
    """Short ones up to the switch, long ones beyond it, in one batch, cut anyhow; the converter's reference likewise."""
    twin = build("phi3", rope_parameters=dict(LONGROPE), original_max_position_embeddings=128, sliding_window=None)
    model = load_model(write("phi3", twin, tmp_path), context=context)
    assert model.rope_switch == (128 if context > 128 else None)
    rows = [ids_of(131, 1, length, 2)[0] for length in (100, 128, 129, 300) if length <= context]
    wants = [truth(twin, row[None])[0] for row in rows]
    spans = [
        SequenceSlice(ids=row.tolist(), start=0, pages=[2 * i, 2 * i + 1], logit_rows="all", long=len(row) > 128)
        for i, row in enumerate(rows)
    ]
    for name in ("forward", "forward_by_ops"):
        logits = getattr(model, name)(Batch.build(spans), KVCache(model.cache_spec(8 * 256, mode="fp32")))
        for got, want in zip(logits.split([len(row) for row in rows]), wants):
            assert error(got, want) < 1e-4
    last, cache = rows[-1].tolist(), KVCache(model.cache_spec(512, mode="fp32"))
    parts = [
        model.forward(Batch.single(last[a : a + 50], start=a, pages=[0, 1], logit_rows="all", long=len(last) > 128), cache)
        for a in range(0, len(last), 50)
    ]
    assert same(torch.cat(parts), logits[-len(last) :])
    with open_store(model.config, tmp_path) as store, torch.no_grad():
        for row, want in zip(rows, wants):
            assert error(reference.logits(model.config, ReconstructedWeights(model.config, store), row[None])[0], want) < 1e-4
    if context > 128:  # the factors do differ
        assert error(run(model, rows[0]), wants[0]) > 1e-2


def test_learned_positions_end(tmp_path):
    directory = write("gpt2", build("gpt2"), tmp_path)
    with pytest.raises(OptionError, match="context is 600; expected at most 512"):
        load_model(directory, context=600)
    assert load_model(directory, context=512).context == 512


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_qwen3_head_norms_are_rms_norms(name, tmp_path):
    """A LayerNorm there, which is what exllamav2 computes, would give other logits."""
    twin = build(name)
    model, ids = load_model(write(name, twin, tmp_path)), ids_of(131, 1, 50)
    want = truth(twin, ids)[0]
    assert error(run(model, ids[0]), want) < 1e-4
    for layer in twin.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.forward = lambda x, weight=norm.weight: torch.nn.functional.layer_norm(x, x.shape[-1:], weight, None, 1e-6)
    assert error(truth(twin, ids)[0], want) > 1e-2


def test_cohere2_rotates_on_sliding_layers_only(tmp_path):
    """RoPE on the global layers too, which is what exllamav2 does, would give other logits."""
    twin = build("cohere2")
    model, ids = load_model(write("cohere2", twin, tmp_path)), ids_of(131, 1, 50)
    assert model.config.rope_kinds == ("main", "main", "main", "none")
    assert model.config.windows == (13, 13, 13, 0)
    want = truth(twin, ids)[0]
    assert error(run(model, ids[0]), want) < 1e-4
    # the last layer turns like the others, and still sees everything
    last = twin.model.layers[3].self_attn
    assert last.sliding_window is None
    last.sliding_window = 10_000
    assert error(truth(twin, ids)[0], want) > 1e-2


def test_a_fused_matrix_of_another_shape_is_named(tmp_path):
    directory = configure(write("phi3", build("phi3"), tmp_path / "phi3"), num_key_value_heads=4)
    with pytest.raises(FormatError, match=r"qkv_proj.weight': found shape \(128, 64\), expected \(192, 64\)"):
        load_model(directory)
    other = write("yi", build("yi"), tmp_path / "yi")
    save_tensors(other / "more.safetensors", {"model.layers.0.input_layernorm.weight": torch.ones(64)})
    with pytest.raises(FormatError, match="which is the same one"):
        load_model(other)

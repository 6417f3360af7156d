"""Models of the Llama family against Transformers; the same bits however steps are cut and batched; batches; the reference."""

import dataclasses
import itertools
import random

import pytest
import torch

from exl2nb.cache.pages import PageAllocator
from exl2nb.cache.pool import KVCache
from exl2nb.core.errors import ContextOverflow, EngineClosed, OptionError
from exl2nb.io.shards import TensorStore
from exl2nb.model import reference
from exl2nb.model.archs import parse_config
from exl2nb.model.batch import Batch, SequenceSlice
from exl2nb.model.layout import model_linears
from exl2nb.model.loader import load_model, read_model_config
from exl2nb.model.sources import ReconstructedWeights
from exl2nb.ops import _load

from .tiny import CASES, ids_of, raw_config, save, save_exl2, truth, twin

COMPILED = "cpu" in _load.load_libraries().loaded


def same(got, want):
    """Whether bits are equal, with the kernels; torch's own matrix product, which answers without them, depends on the number of rows."""
    return torch.equal(got, want) if COMPILED else error(got, want) < 1e-2


def run(model, ids, *, mode="fp32", pages=None, forward="forward"):
    """All logits of one sequence (1-D ids), run at once in a fresh cache."""
    pages = pages or list(range(-(-len(ids) // 256)))
    cache = KVCache(model.cache_spec((max(pages) + 1) * 256, mode=mode))
    return getattr(model, forward)(Batch.single(ids.tolist(), start=0, pages=pages, logit_rows="all"), cache)


def error(got, want):
    """Largest difference in units of the logits' standard deviation."""
    return float((got - want).abs().max() / want.std())


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path):
    """Of the engine, and of the reference that the converter runs, on two rows."""
    kind, changes = CASES[case]
    twin_model = twin(kind, seed=3, **changes)
    model = load_model(save(twin_model, tmp_path))
    ids = ids_of(model.config.vocab_size, 1, 300, seed=5)
    rows = ids[0].view(4, 75)
    with torch.no_grad():
        assert error(reference.logits(model.config, twin_model.state_dict(), rows), truth(twin_model, rows)) < 1e-4
    want = truth(twin_model, ids)[0]
    assert error(run(model, ids[0]), want) < 1e-4
    assert error(run(model, ids[0], mode="fp16", pages=[3, 1]), want) < 5e-3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "vocab"), [(1, 1, 40, 17), (6, 3, 24, 333), (8, 2, 8, 1001), (4, 1, 128, 64)])
def test_odd_sizes(heads, kv_heads, head_dim, vocab, seed, tmp_path):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab}
    twin_model = twin("llama", seed=seed, hidden_size=24 * heads, intermediate_size=51, num_hidden_layers=3, **sizes)
    model = load_model(save(twin_model, tmp_path))
    ids = ids_of(vocab, 1, 40, seed)
    assert error(run(model, ids[0]), truth(twin_model, ids)[0]) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights", ["auto", "fp32"])
def test_half_precision_files(dtype, weights, tmp_path):
    twin_model = twin("qwen2", seed=1, tie_word_embeddings=True)
    save(twin_model, tmp_path, dtype=dtype)
    model = load_model(tmp_path, weights=weights)
    ids = ids_of(model.config.vocab_size, 1, 60)
    assert error(run(model, ids[0]), truth(twin_model, ids)[0]) < 1e-4
    wide = load_model(tmp_path, weights="fp32").weight_bytes
    assert model.weight_bytes == wide if weights == "fp32" else model.weight_bytes < 0.65 * wide


def test_dynamic_ntk_past_the_switch(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    twin_model = twin("llama", seed=2, max_position_embeddings=64, rope_parameters=rope)
    ids = ids_of(131, 1, 300)
    model = load_model(save(twin_model, tmp_path), context=300)
    assert error(run(load_model(tmp_path), ids[0, :64]), truth(twin_model, ids[:, :64])[0]) < 1e-4
    assert error(run(model, ids[0]), truth(twin_model, ids)[0]) < 1e-4  # from here on Transformers keeps the new base


def test_sliding_window_longer_than_a_page(tmp_path):
    twin_model = twin("mistral", seed=2, sliding_window=270, max_position_embeddings=1024)
    ids = ids_of(131, 1, 700)
    model = load_model(save(twin_model, tmp_path))
    assert error(run(model, ids[0]), truth(twin_model, ids)[0]) < 1e-4


@pytest.mark.parametrize("mode", ["fp32", "fp16", "q6", "fp8"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "exl2"])
def test_chunks_equal_at_once_equal_token_by_token(kind, mode, tmp_path):
    changes = {"sliding_window": 150} if kind == "mistral" else {}
    twin_model = twin("mistral" if kind == "mistral" else "llama", seed=4, max_position_embeddings=600, **changes)
    model = load_model(save_exl2(twin_model, tmp_path) if kind == "exl2" else save(twin_model, tmp_path))
    ids = ids_of(131, 1, 330, seed=1)[0].tolist()
    pages = [2, 0]

    def cut(bounds):
        cache = KVCache(model.cache_spec(768, mode=mode))
        steps = itertools.pairwise(bounds)
        rows = [model.forward(Batch.single(ids[a:b], start=a, pages=pages, logit_rows="all"), cache) for a, b in steps]
        return torch.cat(rows), cache

    once, cache = cut([0, 330])
    for bounds in ([0, 1, 3, 64, 191, 255, 258, 330], [0, 256, 330], list(range(331))):
        logits, other = cut(bounds)
        assert same(logits, once)
        for mine, theirs in zip(cache.k + cache.v, other.k + other.v):
            assert same(*(pool.float() if pool.dim() == 4 else pool.view(torch.uint8).float() for pool in (theirs, mine)))


EXL2_CASES = {
    "mixed": ("llama", {}, (8, 6, 5, 4, 3, 2), True),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}, (5, 3), True),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}, (6, 4, 2), True),
    "tied-head-not-in-the-file": ("qwen2", {"tie_word_embeddings": True}, (4,), False),
    "dense-head": ("llama", {}, (4, 3), False),
    "mistral": ("mistral", {"sliding_window": 20}, (8, 2), True),
}


@pytest.mark.parametrize("case", EXL2_CASES)
def test_exl2_equals_transformers_on_the_reconstructed_weights(case, tmp_path):
    kind, changes, widths, head = EXL2_CASES[case]
    twin_model = twin(kind, seed=8, **changes)
    directory = save_exl2(twin_model, tmp_path, widths=widths, head=head)
    model, ids = load_model(directory), ids_of(131, 1, 120, seed=3)
    want = truth(twin_model, ids)[0]
    assert want.shape == (120, 131)
    assert error(run(model, ids[0], mode="fp16"), want) < 5e-3
    assert error(run(model, ids[0]), want) < 2e-3
    assert error(run(load_model(directory, weights="fp32"), ids[0]), want) < 1e-4
    config = read_model_config(directory)
    with TensorStore(directory) as store:
        weights = ReconstructedWeights(config, store)
        assert set(weights) >= {"model.layers.1.mlp.down_proj.weight", "model.norm.weight"}
        assert not any(".q_weight" in name for name in weights)
        assert error(reference.logits(config, weights, ids)[0], want) < 1e-4


def test_logit_rows(tmp_path):
    model = load_model(save(twin("llama"), tmp_path))
    cache, ids = KVCache(model.cache_spec(256)), ids_of(131, 1, 9)[0].tolist()
    everything = model.forward(Batch.single(ids, start=0, pages=[0], logit_rows="all"), cache)
    assert same(model.forward(Batch.single(ids, start=0, pages=[0]), cache), everything[-1:])
    none = model.forward(Batch.single(ids, start=0, pages=[0], logit_rows="none"), cache)
    assert none.shape == (0, 131)


def test_misuse_is_named_and_the_model_stays_usable(tmp_path):
    model = load_model(save(twin("llama"), tmp_path), context=40)
    cache, good = KVCache(model.cache_spec(40)), Batch.single([1, 2], start=0, pages=[0])
    want = model.forward(good, cache)
    with pytest.raises(ContextOverflow, match="sequence of 41 tokens; the model was loaded for 40"):
        model.forward(Batch.single([1], start=40, pages=[0]), cache)
    other = KVCache(load_model(save(twin("llama", num_hidden_layers=3), tmp_path / "b")).cache_spec(40))
    with pytest.raises(OptionError, match=r"is \(3, 2, 16\); expected \(2, 2, 16\)"):
        model.forward(good, other)
    for wrong in (Batch.single([131], start=0, pages=[0]), Batch.single([-1], start=0, pages=[0]), Batch.single([1], start=0, pages=[9])):
        with pytest.raises((RuntimeError, ValueError)):
            model.forward(wrong, cache)
    assert torch.equal(model.forward(good, cache), want)
    assert "context 40" in repr(model)
    model.close()
    with pytest.raises(EngineClosed, match="load it again"):
        model.forward(good, cache)
    model.close()
    assert "closed" in repr(model)


def test_tables_grow_with_use_not_with_the_config(tmp_path):
    model = load_model(save(twin("llama", max_position_embeddings=1 << 24), tmp_path))
    assert model.context == 1 << 24
    cache, ids = KVCache(model.cache_spec(2304)), ids_of(131, 1, 2100)[0]
    first = run(model, ids[:50])
    assert model.rope_rows == 1024
    for start in range(0, 2100, 300):
        batch = Batch.single(ids[start : start + 300].tolist(), start=start, pages=list(range(9)), logit_rows="all")
        model.forward(batch, cache)
    assert model.rope_rows == 4096
    assert torch.equal(run(model, ids[:50]), first)


@pytest.mark.parametrize(("seed", "mode"), [(0, "fp16"), (1, "q4"), (2, "fp16"), (3, "q4")])
def test_any_schedule_gives_the_same_logits(seed, mode, tmp_path):
    """Sequences cut and interleaved at random, on pages handed out as needed, against each one alone at once."""
    choice = random.Random(seed)
    model = load_model(save_exl2(twin("llama", seed=seed, num_hidden_layers=1, vocab_size=64), tmp_path))
    lengths = [choice.choice([1, 40, 256, 257, 300, 511]) for _ in range(3)]
    texts = [ids_of(64, 1, n, seed=seed + n)[0].tolist() for n in lengths]
    pages, cache = PageAllocator(8), KVCache(model.cache_spec(8 * 256, mode=mode))
    done, tables, seen = [0] * 3, [[] for _ in range(3)], [[] for _ in range(3)]
    while any(a < n for a, n in zip(done, lengths)):
        spans, who = [], []
        for i in choice.sample(range(3), choice.randint(1, 3)):
            n = min(choice.choice([1, 1, 7, 64, 130]), lengths[i] - done[i])
            if n > 0:
                tables[i] += pages.allocate(-(-(done[i] + n) // 256) - len(tables[i]))
                spans.append(SequenceSlice(ids=texts[i][done[i] : done[i] + n], start=done[i], pages=tables[i], logit_rows="all"))
                who.append(i)
                done[i] += n
        if spans:
            for i, logits in zip(who, model.forward(Batch.build(spans), cache).split([len(span.ids) for span in spans])):
                seen[i].append(logits)
    for text, logits in zip(texts, seen):
        assert same(torch.cat(logits), run(model, torch.tensor(text), mode=mode))
    for table in tables:
        pages.free(table)
    assert pages.num_free == 8


# ---- Batches


def test_batch_of_one_sequence():
    batch = Batch.single([5, 6, 7], start=255, pages=[4, 2], logit_rows="all")
    assert batch.input_ids.tolist() == [5, 6, 7]
    assert batch.positions.tolist() == [255, 256, 257]
    assert batch.slot_mapping.tolist() == [4 * 256 + 255, 2 * 256, 2 * 256 + 1]
    assert batch.block_table.tolist() == [[4, 2]]
    assert batch.cu_seqlens.tolist() == [0, 3]
    assert batch.context_lens.tolist() == [258]
    assert batch.logit_rows.tolist() == [0, 1, 2]
    assert Batch.single([5, 6], start=0, pages=[0], logit_rows="last").logit_rows.tolist() == [1]
    assert {getattr(batch, f.name).dtype for f in dataclasses.fields(batch) if f.name not in ("long", "adapters", "pictures")} == {
        torch.int32
    }
    assert batch.long is None and Batch.single([5], start=0, pages=[0], long=False).long.tolist() == [0]


def test_batch_pads_short_block_tables():
    batch = Batch.build([SequenceSlice(ids=[1], start=300, pages=[7, 8]), SequenceSlice(ids=[2, 3], start=0, pages=[1], logit_rows="none")])
    assert batch.block_table.tolist() == [[7, 8], [1, 0]]
    assert batch.cu_seqlens.tolist() == [0, 1, 3]
    assert batch.logit_rows.tolist() == [0]
    assert batch.slot_mapping.tolist() == [8 * 256 + 44, 256, 257]


def test_wrong_batches_are_assertions():
    with pytest.raises(AssertionError, match="3 tokens do not fit 0 pages"):
        Batch.single([1], start=2, pages=[])
    with pytest.raises(AssertionError, match="a span has tokens"):
        Batch.single([], start=0, pages=[1])
    with pytest.raises(AssertionError, match="a batch is int32"):
        dataclasses.replace(Batch.single([1], start=0, pages=[0]), positions=torch.zeros(1, dtype=torch.int64))


def test_selected_spans_of_a_batch():
    spans = [
        SequenceSlice(ids=[5, 6, 7], start=0, pages=[1], logit_rows="all"),
        SequenceSlice(ids=[8], start=300, pages=[2, 3]),
        SequenceSlice(ids=[9, 10], start=4, pages=[4], logit_rows="none", long=False),
        SequenceSlice(ids=[11], start=9, pages=[5]),
    ]
    whole, want = Batch.build(spans), Batch.build([spans[0], spans[3]])
    got, tokens, rows = whole.select([0, 3])
    assert tokens.tolist() == [0, 1, 2, 6]
    assert rows.tolist() == [0, 1, 2, 4]
    for name in ("input_ids", "positions", "slot_mapping", "cu_seqlens", "context_lens", "logit_rows"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert torch.equal(got.block_table[:, :1], want.block_table)
    assert whole.select([1, 2])[0].logit_rows.tolist() == [0]


def test_a_batch_cut_by_tokens_is_the_spans_cut():
    long = [*range(20)]
    spans = [
        SequenceSlice(ids=long, start=250, pages=[1, 3]),
        SequenceSlice(ids=[8], start=300, pages=[2, 3], adapter=2),
        SequenceSlice(ids=long, start=0, pages=[4], logit_rows="all"),
    ]
    want = [
        [SequenceSlice(ids=long[:16], start=250, pages=[1, 3], logit_rows="none")],
        [
            SequenceSlice(ids=long[16:], start=266, pages=[1, 3]),
            spans[1],
            SequenceSlice(ids=long[:11], start=0, pages=[4, 0], logit_rows="all"),
        ],
        [SequenceSlice(ids=long[11:], start=11, pages=[4, 0], logit_rows="all")],
    ]
    whole, seen = Batch.build(spans), []
    for (first, end), expected in zip(((0, 16), (16, 32), (32, 41)), want, strict=True):
        piece, rows = whole.cut(first, end)
        seen += rows.tolist()
        expected = Batch.build(expected)
        for name in ("input_ids", "positions", "slot_mapping", "block_table", "cu_seqlens", "context_lens", "logit_rows"):
            assert torch.equal(getattr(piece, name), getattr(expected, name)), name
        assert torch.equal(piece.adapters, whole.adapters[first:end])
    assert seen == list(range(len(whole.logit_rows)))


# ---- The reference, which the converter runs


def test_reference_captures_the_input_of_every_linear():
    model = twin("qwen2")
    config, weights, seen = parse_config(raw_config(model)), model.state_dict(), {}
    hooks = {name: value for name, value in model.named_modules() if isinstance(value, torch.nn.Linear)}
    want = {}
    for name, module in hooks.items():
        module.register_forward_pre_hook(lambda _, args, name=name: want.__setitem__(name, args[0].detach()))
    ids = ids_of(config.vocab_size, 2, 20)
    truth(model, ids)
    with torch.no_grad():
        x = reference.embed(config, weights, ids)
        for layer in range(config.num_layers):
            x = reference.block(config, layer, weights, x, capture=seen.__setitem__)
        reference.head(config, weights, reference.final_norm(config, weights, x), capture=seen.__setitem__)
    assert list(seen) == [linear.key for linear in model_linears(config)] == list(want)
    for name, value in want.items():
        torch.testing.assert_close(seen[name], value, atol=1e-4, rtol=1e-4)


def test_reference_gradients_flow_to_weights_and_input():
    model = twin("llama")
    config = parse_config(raw_config(model))
    weights = {name: value.detach().requires_grad_() for name, value in model.state_dict().items()}
    x = torch.randn(1, 9, config.hidden_size, requires_grad=True)
    reference.block(config, 0, weights, x).square().sum().backward()
    assert x.grad is not None
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for name, value in weights.items() if "layers.0" in name)


def test_reference_softcaps():
    model = twin("llama")
    config = dataclasses.replace(parse_config(raw_config(model)), logit_softcap=2.0, attention_softcap=1e4)
    ids = ids_of(config.vocab_size, 1, 30)
    want = 2.0 * torch.tanh(truth(model, ids) / 2.0)
    with torch.no_grad():
        torch.testing.assert_close(reference.logits(config, model.state_dict(), ids), want, atol=1e-3, rtol=0)
    q = torch.randn(1, 2, 5, 8)
    plain, capped = (reference.attend(q, q, q, scale=1.0, softcap=cap) for cap in (1e5, 0.5))
    torch.testing.assert_close(plain, reference.attend(q, q, q, scale=1.0), atol=1e-4, rtol=0)
    assert (plain - capped).abs().max() > 0.05

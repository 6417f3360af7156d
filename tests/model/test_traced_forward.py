"""The forward pass that is seen and edited: the engine's bits, Transformers' hidden states and attentions, edits at every point."""

import functools

import pytest
import torch

from exl2nb.cache.pool import KVCache
from exl2nb.core.errors import OptionError
from exl2nb.eval.trace import continued, trace
from exl2nb.model.batch import Batch
from exl2nb.model.loader import load_model
from exl2nb.model.points import Edits, match_points
from exl2nb.ops import kv_codes

from .test_model import error, run, same
from .tiny import ids_of, twin
from .tiny import save as save_tiny
from .zoo import ZOO, build, build_wide, write, write_exl2


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Name -> Transformers' model of eager attention, and ours; made once."""

    @functools.cache
    def make(name):
        theirs = build(name)
        theirs.set_attn_implementation("eager")
        return theirs, load_model(write(name, theirs, tmp_path_factory.mktemp(name)))

    return make


@pytest.mark.parametrize("name", ZOO)
def test_hidden_states_and_attentions_equal_transformers(name, made):
    """Every layer's input and pattern, the last norm, the logits; and nothing changes because somebody looks."""
    theirs, model = made(name)
    ids = ids_of(model.config.vocab_size, 1, 40)
    with torch.no_grad():
        want = theirs(ids, use_cache=False, output_hidden_states=True, output_attentions=True)
    found = trace(model, ids[0].tolist(), ["blocks.*.hook_resid_pre", "*.hook_pattern", "ln_final.*", "logits"])
    assert same(found.logits, run(model, ids[0]))
    everything = trace(model, ids[0].tolist(), "*")
    assert set(everything) == set(model.points) - {"logits"} and same(everything.logits, found.logits)
    for layer in range(model.config.num_layers):
        assert error(found[f"blocks.{layer}.hook_resid_pre"], want.hidden_states[layer][0].float()) < 1e-4
        if want.attentions and want.attentions[layer] is not None:
            assert (found[f"blocks.{layer}.attn.hook_pattern"] - want.attentions[layer][0]).abs().max() < 1e-4
    assert error(found["ln_final.hook_normalized"], want.hidden_states[-1][0].float()) < 1e-4
    assert error(found.logits, want.logits[0].float()) < 1e-4
    last = everything.lens(model.config.num_layers - 1)
    assert same(last, found.logits)


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "gpt2", "qwen3_moe", "granite", "dbrx"])
def test_every_point_can_be_edited(name, made):
    """What a function leaves as it is changes nothing (but rounding); what it turns round changes the logits."""
    _, model = made(name)
    ids = ids_of(model.config.vocab_size, 1, 20)[0].tolist()
    before = trace(model, ids, "logits").logits
    for point, about in model.points.items():
        if point == "logits" or about.layer > 1:
            continue
        kept = trace(model, ids, "logits", patch={point: lambda value, hook: None}).logits
        assert error(kept, before) < 1e-4, point
        if not about.whole:
            changed = trace(model, ids, "logits", patch={point: lambda value, hook: value.flip(-1)}).logits
            assert error(changed, before) > 1e-4, point


def test_a_head_without_its_output_equals_transformers_without_it(made):
    theirs, model = made("llama")
    ids, D = ids_of(131, 1, 30), model.config.head_dim

    def ablate(module, inputs):
        value = inputs[0].clone()
        value[..., D : 2 * D] = 0
        return (value,)

    hook = theirs.model.layers[1].self_attn.o_proj.register_forward_pre_hook(ablate)
    seen = {}
    theirs.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda module, inputs: seen.update(post=inputs[0][0]))
    with torch.no_grad():
        want = theirs(ids, use_cache=False).logits[0]
    hook.remove()

    def edit(z, hook):
        assert (hook.name, hook.layer, hook.start) == ("blocks.1.attn.hook_z", 1, 0)
        z[:, 1] = 0

    found = trace(model, ids[0].tolist(), ["logits", "blocks.0.mlp.hook_post"], patch={"blocks.1.attn.hook_z": edit})
    assert error(found.logits, want) < 1e-4
    assert error(found["blocks.0.mlp.hook_post"], seen["post"]) < 1e-4


def test_tensors_numbers_and_layers_of_another_model(tmp_path):
    """Pasted streams and borrowed layers of the dense model take the quantised one back to it."""
    dense, quantised = write("llama", build_wide("llama"), tmp_path / "dense"), tmp_path / "exl2"
    exact, low = load_model(dense), load_model(write_exl2(dense, quantised))
    ids = ids_of(131, 1, 24)[0].tolist()
    want = trace(exact, ids, ["logits", "blocks.*.hook_resid_post"])
    last = f"blocks.{low.config.num_layers - 1}.hook_resid_post"
    pasted = trace(low, ids, "logits", patch={last: want[last]}).logits
    assert same(pasted, low.unembed(want[last]))
    every = dict.fromkeys(range(low.config.num_layers), exact)
    borrowed = trace(low, ids, ["logits", "hook_embed", last], layers=every)
    assert error(borrowed[last], trace(exact, ids, last, patch={"hook_embed": borrowed["hook_embed"]})[last]) < 1e-5
    row = torch.zeros(low.config.hidden_size)
    assert same(
        trace(low, ids, "logits", patch={"blocks.1.hook_mlp_out": row}).logits,
        trace(low, ids, "logits", patch={"blocks.1.hook_mlp_out": 0}).logits,
    )
    assert trace(exact, ids, "logits").kl(trace(low, ids, "logits")).min() >= 0


@pytest.mark.parametrize("mode", ["fp32", "q8", "q4"])
def test_keys_and_values_are_those_of_the_cache(mode, tmp_path):
    model = load_model(save_tiny(twin("llama", head_dim=32), tmp_path))
    ids = ids_of(131, 1, 50)[0]
    spec = model.cache_spec(len(ids), mode=mode)
    cache = KVCache(spec)
    found = trace(model, ids.tolist(), ["*.hook_rot_k", "*.hook_v", "*.hook_pattern", "*.hook_z", "logits"], cache=mode)
    logits = model.forward(Batch.single(ids.tolist(), start=0, pages=[0], logit_rows="all"), cache)
    assert same(found.logits, logits) and found.cache == mode
    for layer in range(2):
        stored = kv_codes.read_pages(cache.k[layer], torch.tensor([0]), 32)[0].transpose(0, 1)[: len(ids)]
        assert torch.equal(found[f"blocks.{layer}.attn.hook_rot_k"], stored)
        values = found[f"blocks.{layer}.attn.hook_v"].repeat_interleave(2, 1)
        z = torch.einsum("hqk,khd->qhd", found[f"blocks.{layer}.attn.hook_pattern"], values)
        assert error(z, found[f"blocks.{layer}.attn.hook_z"]) < 1e-4


def test_a_long_text_in_steps_and_pooled(tmp_path, monkeypatch):
    """Steps leave the same tensors, edits of whole tensors too; pooled patterns still add up to 1."""
    model = load_model(save_tiny(twin("mistral", sliding_window=50), tmp_path))
    ids = ids_of(131, 1, 300)[0].tolist()
    half = torch.rand(300, 64, generator=torch.Generator().manual_seed(0))
    patch = {"blocks.0.hook_mlp_out": half, "blocks.1.attn.hook_pattern": torch.full((4, 300, 300), 1 / 300).tril()}
    once = trace(model, ids, "*", patch=patch)
    monkeypatch.setattr("exl2nb.eval.trace.CHUNK_TOKENS", 70)
    cut = trace(model, ids, "*", patch=patch)
    for name in once:
        assert torch.allclose(once[name], cut[name], atol=1e-5), name
    whole, pooled = (trace(model, ids, "*.hook_pattern", pattern_size=size)["blocks.0.attn.hook_pattern"] for size in (None, 25))
    assert whole.shape == (4, 300, 300) and pooled.shape == (4, 25, 25)
    assert torch.allclose(pooled, whole.view(4, 25, 12, 25, 12).sum(4).mean(2), atol=1e-6)
    assert torch.allclose(pooled.sum(-1), torch.ones(4, 25), atol=1e-5)


def test_greedy_continuation_under_edits(made):
    _, model = made("llama")
    ids = ids_of(131, 1, 9)[0].tolist()
    plain, row = [], list(ids)
    for _ in range(6):
        plain.append(int(run(model, torch.tensor(row))[-1].argmax()))
        row.append(plain[-1])
    assert continued(model, ids, max_tokens=6) == plain
    assert continued(model, ids, max_tokens=6, patch={"blocks.0.hook_mlp_out": 0.0}) != plain
    assert continued(model, ids, max_tokens=6, stop=plain[2:3])[-1] == plain[2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"capture": "blocks.*.hook_mlp_post"}, "no point 'blocks.*.hook_mlp_post'; known: hook_embed"),
        ({"capture": [3]}, "no point 3"),
        ({"capture": "*", "max_bytes": 100_000}, r"need \d+ bytes .* more than max_bytes 100000 .* the largest is logits"),
        ({"capture": "*.hook_pattern", "max_bytes": 9000}, "pattern_size=512 averages"),
        ({"capture": "*.hook_pattern", "pattern_size": 1}, "pattern_size is 1; expected"),
        ({"patch": {"logits": 0}}, "the logits are the result"),
        ({"patch": {"blocks.0.hook_mlp_out": torch.zeros(3, 64)}}, r"given \(3, 64\); expected what broadcasts to \(20, 64\)"),
        ({"patch": {"blocks.0.hook_mlp_out": "none"}}, "given 'none'; expected a number, a tensor, or a function"),
        ({"patch": {"blocks.0.hook_mlp_out": lambda value, hook: value[:1]}}, r"returned \(1, 64\); expected a tensor \(20, 64\)"),
        ({"patch": {"blocks.7.hook_mlp_out": 0}}, "no point 'blocks.7.hook_mlp_out'"),
        ({"cache": "q5"}, "unknown cache mode"),
    ],
)
def test_refusals(call, message, made):
    _, model = made("llama")
    with pytest.raises(OptionError, match=message):
        trace(model, ids_of(131, 1, 20)[0].tolist(), **{"capture": (), **call})


def test_layers_of_another_shape_are_refused(made):
    (_, one), (_, other) = made("llama"), made("qwen2_moe")
    with pytest.raises(OptionError, match="layer 0 of another model cannot run here: it has num_layers 4 and not 2"):
        trace(one, [1, 2], layers={0: other})
    with pytest.raises(OptionError, match="no layer 5; expected blocks.0 to blocks.1"):
        trace(one, [1, 2], layers={5: one})
    with pytest.raises(OptionError, match="how many tokens there will be is not known"):
        continued(one, [1, 2], max_tokens=2, patch={"blocks.0.hook_mlp_out": torch.zeros(2, 64)})


def test_patterns_of_names_keep_the_running_order(made):
    _, model = made("llama")
    names = [point.name for point in match_points(model.points, ["blocks.1.*", "hook_embed"], where="x")]
    assert names[0] == "hook_embed" and names == [name for name in model.points if name in names]
    edits = Edits(model.points, {"*.hook_z": 0.0}, 4)
    assert edits.any(["blocks.0.attn.hook_z"]) and "blocks.0.hook_mlp_out" not in edits


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3_moe"])
def test_every_point_can_be_edited_on_a_gpu(name, tmp_path):
    """The same edits as on the CPU give nearly its logits, also where they take the place of what the GPU's own op would make."""
    folder = write(name, build_wide(name), tmp_path)
    host, gpu = load_model(folder), load_model(folder, device="cuda")
    ids = ids_of(host.config.vocab_size, 1, 20)[0].tolist()
    for point, about in host.points.items():
        if point == "logits" or about.layer > 1:
            continue
        for edit in (lambda value, hook: None, lambda value, hook: value.flip(-1)) if not about.whole else (lambda value, hook: None,):
            want, found = (trace(model, ids, "logits", patch={point: edit}).logits for model in (host, gpu))
            assert error(found, want) < 0.03, point

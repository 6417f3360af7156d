"""Models on the GPU against the same models on the CPU. Marked gpu: `make test-gpu` on a machine that has one."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import exl2nb as ex
from exl2nb.cache.pool import KVCache
from exl2nb.core.errors import ConfigError, DeviceError
from exl2nb.io.safetensors import SafetensorsFile
from exl2nb.model import reference
from exl2nb.model.batch import Batch, SequenceSlice
from exl2nb.model.gpu_forward import cache_formats
from exl2nb.model.loader import load_model

from .gptq_maker import put_on_grid, write_gptq
from .test_gptq import RECIPES
from .tiny import save, twin
from .zoo import ZOO, build_wide, write, write_exl2, write_tokenizer

pytestmark = pytest.mark.gpu
DATA = Path(__file__).parents[1] / "data"
FIXTURE = DATA / "demo-exl2-4.0bpw"
IDS = torch.randint(3, 4000, (300,), generator=torch.Generator().manual_seed(1)).tolist()


def fed(model, texts, lengths=(1,), *, mode="fp16"):
    """Logits `(T, V)` of every text, fed beside the others in pieces of these lengths, the last one repeated."""
    cache, out = KVCache(model.cache_spec(512 * len(texts), mode=mode), model.device), [[] for _ in texts]
    bounds = [0, *itertools.accumulate(lengths)]
    while bounds[-1] < max(map(len, texts)):
        bounds.append(bounds[-1] + lengths[-1])
    for first, end in itertools.pairwise(bounds):
        running = [i for i, ids in enumerate(texts) if len(ids) > first]
        spans = [SequenceSlice(ids=texts[i][first:end], start=first, pages=[2 * i + 1, 2 * i], logit_rows="all") for i in running]
        logits = model.forward(Batch.build(spans), cache).cpu()
        for i, rows in zip(running, logits.split([len(span.ids) for span in spans])):
            out[i].append(rows)
    return [torch.cat(rows) for rows in out]


def logits(model, ids, *, mode="fp16", chunk=None):
    """Of one text, at once or in chunks."""
    return fed(model, [ids], [chunk or len(ids)], mode=mode)[0]


@pytest.fixture(scope="module")
def both():
    return load_model(FIXTURE), load_model(FIXTURE, device="cuda")


@pytest.mark.parametrize("chunk", [None, 1, 8, 100])
@pytest.mark.parametrize("mode", ["fp16", "fp32"])
def test_demo_is_the_cpus(both, mode, chunk):
    cpu, cuda = both
    assert float((logits(cpu, IDS, mode=mode) - logits(cuda, IDS, mode=mode, chunk=chunk)).abs().max()) < 0.05


def test_single_steps_in_a_row_are_the_same_each_time(both):
    """What a step leaves behind for the next one's kernels (persistent_gemm.cuh) does not depend on which CTA of it comes last."""
    _, cuda = both
    first = logits(cuda, IDS, chunk=1)
    for _ in range(12):
        assert torch.equal(logits(cuda, IDS, chunk=1), first)


def test_demo_is_near_exllamav2s_logits(both):
    file = SafetensorsFile(DATA / "demo-logits.safetensors")
    names = {name: file.read(name) for name in file.names()}
    ids = next(t for t in names.values() if not t.is_floating_point()).long()
    want = next(t for t in names.values() if t.is_floating_point()).float()
    for row, expected in zip(ids.reshape(-1, ids.shape[-1]), want.reshape(-1, *want.shape[-2:])):
        got = logits(both[1], row.tolist())[-len(expected) :]
        assert float((got - expected).abs().max()) < 0.15


FAR = {"fp8": 0.004, "q8": 0.0005, "q6": 0.015, "q4": 0.04, "k16v8": 0.0005, "k8v16": 0.0005, "k16v4": 0.015, "k4v16": 0.03, "k4v8": 0.03}


@pytest.mark.parametrize("mode", FAR)
@pytest.mark.parametrize("chunk", [1, 100])
def test_quantised_caches_agree(both, mode, chunk):
    """Codes flip where CPU and GPU differ in the last bit, so only the distributions are near. In chunks, prefill reads pages back."""
    cpu, cuda = (logits(model, IDS, mode=mode, chunk=chunk).log_softmax(-1) for model, chunk in zip(both, (None, chunk)))
    assert float((cpu.exp() * (cpu - cuda)).sum(-1).mean()) < FAR[mode]


@pytest.mark.parametrize("mode", ["k16v8", "k16v4", "k8v16", "k4v16", "k4v8"])
def test_bits_of_k_and_v_apart_through_the_engine(mode, tmp_path):
    """Decodes in graphs, alone and beside others the same; pages that were copied, saved and read back go on as if they were its own."""
    prompt, asked = "It was a dark night and " * 60, {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    with ex.load(FIXTURE, device="cuda", cache=mode, deterministic=True, progress=None) as llm:
        alone = [llm.generate(text, **asked).text for text in (prompt, "She said")]
        assert [one.text for one in llm.generate([prompt, "She said", prompt], **asked)] == [alone[0], alone[1], alone[0]]
        llm.cache.save(tmp_path / "pages.safetensors")
        llm.cache.clear()
        llm.cache.load(tmp_path / "pages.safetensors")
        again = llm.generate(prompt, **asked)
        assert again.text == alone[0]
        assert again.timings.reused_tokens >= 256


@pytest.mark.parametrize("mode", ["fp16", "fp32", "fp8", "q8", "q4"])
@pytest.mark.parametrize("lengths", [[9], [64], [16, 40, 64, 20], [100], [128, 12]], ids=str)
def test_short_prompts_in_step_kernels(both, mode, lengths):
    """Near what prefill gives, the same bits each time; every piece reads those before it from the cache."""
    cuda, ids = both[1], IDS[:140]
    assert cuda.gpu.prompt_tokens >= 64
    found = [fed(cuda, [ids], lengths, mode=mode)[0] for _ in range(2)]
    assert torch.equal(*found)
    usual, cuda.gpu.prompt_tokens = cuda.gpu.prompt_tokens, 0
    try:
        want = fed(cuda, [ids], lengths, mode=mode)[0].log_softmax(-1)
    finally:
        cuda.gpu.prompt_tokens = usual
    got = found[0].log_softmax(-1)
    assert float((want.exp() * (want - got)).sum(-1).mean()) < (5e-4 if mode in ("fp16", "fp32") else FAR[mode])


def test_bits_do_not_depend_on_the_step(both):
    one, eight = (logits(both[1], IDS, chunk=chunk) for chunk in (1, 8))
    assert torch.equal(one, eight)


def test_bits_do_not_depend_on_small_batches(both):
    """Of up to eight tokens in all. Below: of any number where every batch size has to give the same bits."""
    cuda, lengths = both[1], (3, 1, 4)
    spans = [SequenceSlice(ids=IDS[:n], start=0, pages=[page], logit_rows="all") for page, n in enumerate(lengths)]
    together = cuda.forward(Batch.build(spans), KVCache(cuda.cache_spec(2048), "cuda")).cpu()
    for got in together.split(lengths):
        assert torch.equal(got, logits(cuda, IDS[: len(got)]))


@pytest.mark.parametrize("count", [9, 20, 40, 64])
def test_more_than_eight_sequences(both, count):
    """They go through kernels of their own, unless every batch size has to give the same bits."""
    spans = [SequenceSlice(ids=IDS[i : i + 1 + i % 2], start=0, pages=[i], logit_rows="last") for i in range(count)]
    batch = Batch.build(spans)
    for deterministic in (False, True):
        cuda = load_model(FIXTURE, device="cuda", deterministic=deterministic)
        got = cuda.forward(batch, KVCache(cuda.cache_spec(256 * count), "cuda")).cpu()
        alone = torch.cat([logits(cuda, span.ids)[-1:] for span in spans])
        assert float((got - alone).abs().max()) < 0.03
        assert torch.equal(got, alone) or not deterministic


@pytest.mark.parametrize("decoding", [1, 4, 12])
def test_prompts_beside_decoding_sequences(both, decoding):
    """From four sequences on they are two launches; the logits come in the batch's order."""
    cuda = both[1]
    cache, texts = KVCache(cuda.cache_spec(4096), "cuda"), [IDS[i : i + 30] for i in range(decoding)]
    cuda.forward(Batch.build([SequenceSlice(ids=ids[:-1], start=0, pages=[page]) for page, ids in enumerate(texts)]), cache)
    parts = [(SequenceSlice(ids=ids[-1:], start=29, pages=[page]), logits(cuda, ids)[-1:]) for page, ids in enumerate(texts)]
    for at, n in ((0, 40), (2, 20)):
        ids = IDS[100 : 100 + n]
        parts.insert(at, (SequenceSlice(ids=ids, start=0, pages=[decoding + at], logit_rows="all"), logits(cuda, ids)))
    got = cuda.forward(Batch.build([span for span, _ in parts]), cache).cpu()
    assert float((got - torch.cat([want for _, want in parts])).abs().max()) < 0.03


@pytest.mark.parametrize("count", [9, 16, 17, 33, 64])
def test_steps_of_many_sequences_in_graphs(both, count):
    """Captured and replayed a step has the bits of the same step launched alone, and is near what every sequence gives by itself."""
    cuda, lengths = both[1], [1 + i * 5 % 8 for i in range(count)]
    cache = KVCache(cuda.cache_spec(256 * count), "cuda")
    cuda.forward(
        Batch.build([SequenceSlice(ids=IDS[:n], start=0, pages=[page], logit_rows="last") for page, n in enumerate(lengths)]), cache
    )
    batch = Batch.build([SequenceSlice(ids=IDS[n : n + 1], start=n, pages=[page], logit_rows="last") for page, n in enumerate(lengths)])
    i, out = cuda.gpu.inputs(batch, None), torch.zeros(count, cuda.gpu.vocab, device="cuda")
    heads, kernels = (cache.spec.num_kv_heads, cache.spec.head_dim), cuda.gpu.step_kernels(count)
    inputs = i.ids, i.positions, i.block_table, i.cu_seqlens, i.context_lens, None, cache.k, cache.v, cache_formats(cache), heads, out
    graph = torch.cuda.CUDAGraph()
    kernels.run(*inputs)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(3):  # one behind the other, as the engine launches them: each must wait for the one before
            kernels.run(*inputs)
    once = cuda.forward(batch, cache)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, once)
    alone = torch.cat([logits(cuda, IDS[: n + 1])[-1:] for n in range(1, 9)])
    assert float((once.cpu() - alone[[n - 1 for n in lengths]]).abs().max()) < 0.03


@pytest.mark.parametrize("count", [9, 24, 64])
def test_many_sequences_write_what_one_writes(count):
    """The engine's own graphs: where the two best tokens are far enough apart, what a sequence alone writes."""
    prompts = [f"Once upon a time there were {i} kings, and" for i in range(count)]
    asked = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "top_logprobs": 2}
    with ex.load(FIXTURE, device="cuda", max_sequences=64, context=64, cache_tokens=64 * 256, progress=None) as llm:
        together = llm.generate(prompts, **asked)
        assert any(kind.rows == -(-count // 8) * 8 for kind in llm.engine.executor.captured.graphs)
        for prompt, one in zip(prompts, together):
            for token, other in zip(one.tokens, llm.generate(prompt, **asked).tokens):
                if other.top[0].logprob - other.top[1].logprob < 0.05:
                    break
                assert token.id == other.id


@pytest.mark.parametrize("name", ZOO)
def test_every_architecture(name, tmp_path):
    try:
        folder = write_exl2(write(name, build_wide(name), tmp_path / "dense"), tmp_path / "exl2")
    except ConfigError as error:  # another Transformers writes another config
        pytest.skip(str(error))
    cpu, cuda = load_model(folder), load_model(folder, device="cuda")
    ids = torch.randint(0, cpu.config.vocab_size, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    want = logits(cpu, ids)
    tolerance = 2e-2 if cpu.config.moe or cpu.config.post_norm else 1e-2
    cuda.gpu.prompt_tokens = min(cuda.gpu.prompt_tokens, 64)  # so that 70 tokens are prefill
    for chunk in (None, 40, 1):
        assert float((logits(cuda, ids, chunk=chunk) - want).abs().max() / want.std()) < tolerance


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 7}, {"seed": 3, "min_p": 0.1}]
)
def test_a_request_is_the_same_alone_and_among_others(options):
    prompts = ["Once upon a time", "The king", "In the middle of", "She said", "It was", "When he came home", "All the"]
    with ex.load(FIXTURE, device="cuda", deterministic=True, progress=None) as llm:
        together = llm.generate(prompts * 2, max_tokens=40, **options)
        alone = [llm.generate(prompt, max_tokens=40, **options) for prompt in prompts]
        assert [one.text for one in together] == [one.text for one in alone * 2]
        assert llm.engine.pages.num_free == llm.engine.pages.num_pages


def test_draws_on_the_gpu_equal_draws_on_the_host():
    """A bias that does nothing moves the draw to the host: the same tokens."""
    with ex.load(FIXTURE, device="cuda", deterministic=True, progress=None) as llm:
        for options in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.95, "seed": 11, "top_logprobs": 3}):
            device, host = (
                llm.generate("It was", max_tokens=60, ignore_eos=True, **options, **extra) for extra in ({}, {"logit_bias": {5: 1e-9}})
            )
            assert [t.id for t in device.tokens] == [t.id for t in host.tokens]
            assert max(abs(a.logprob - b.logprob) for a, b in zip(device.tokens, host.tokens)) < 1e-4


def test_out_of_memory_is_named_and_leaves_the_gpu_usable():
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-4)
    try:
        with pytest.raises(DeviceError, match="does not fit the GPU"):
            ex.load(FIXTURE, device="cuda", context=4096, cache_tokens=1 << 18, progress=None)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    with ex.load(FIXTURE, device="cuda", progress=None) as llm:
        assert llm.generate("It was", max_tokens=4, temperature=0).text


@pytest.mark.parametrize("path", [1, 2])
def test_the_paths_of_older_gpus(path):
    """cp.async (sm_80) and plain loads with the half-size product (sm_75), forced here."""
    tests = "test_products_for_any_number_of_rows or test_parts_side_by_side or test_demo_is_the_cpus or test_an_odd_number"
    files = [__file__, str(Path(__file__).parents[1] / "ops" / "test_cuda_weights.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "gpu", *files, "-k", tests]
    run = subprocess.run(command, env={**os.environ, "EXL2NB_CUDA_PATH": str(path)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_gptq_checkpoints(recipe, tmp_path):
    """Through the same kernels as EXL2, against the CPU's: codes, zero points and scales are the same numbers there."""
    model = twin("llama", hidden_size=256, intermediate_size=416, num_key_value_heads=2)
    put_on_grid(model, recipe)
    folder = write_gptq(save(model, tmp_path / "dense"), tmp_path / "gptq", recipe)
    cpu, cuda = load_model(folder), load_model(folder, device="cuda")
    assert cuda.weight_bytes < 1.3 * cpu.weight_bytes, "codes, not fp16"
    ids = torch.randint(0, cpu.config.vocab_size, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    want = logits(cpu, ids)
    for chunk in (None, 1, 8):
        assert float((logits(cuda, ids, chunk=chunk) - want).abs().max() / want.std()) < 1e-2


NORMS = ["starcoder2", "gpt2", "cohere2", "gemma2", "olmo2", "glm4"]  # LayerNorms, parallel blocks, norms behind attention and MLP
EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe-bias", "dbrx-norm2", "gemmoe"]


@pytest.mark.parametrize("name", [*NORMS, *EXPERTS])
def test_step_kernels_of_unlike_layers(name, tmp_path):
    """Token by token, eight at a time, alone and in a batch: the same bits, whichever kernel computes the norms; and near the CPU's."""
    folder = write_exl2(write(name, build_wide(name), tmp_path / "dense"), tmp_path / "exl2")
    cpu, cuda = load_model(folder), load_model(folder, device="cuda")
    ids = torch.randint(0, cpu.config.vocab_size, (24,), generator=torch.Generator().manual_seed(3)).tolist()
    want, single = logits(cpu, ids), logits(cuda, ids, chunk=1)
    assert float((single - want).abs().max() / want.std()) < 2e-2
    for chunk in (3, 8):
        assert torch.equal(logits(cuda, ids, chunk=chunk), single)
    exact = load_model(folder, device="cuda", deterministic=True)
    alone = logits(exact, ids, chunk=1)
    assert torch.equal(logits(exact, ids), alone)
    spans = [SequenceSlice(ids=ids[:n], start=0, pages=[page], logit_rows="all") for page, n in enumerate((8, 3, 1))]
    together = exact.forward(Batch.build(spans), KVCache(exact.cache_spec(2048), "cuda")).cpu()
    for got, n in zip(together.split([8, 3, 1]), (8, 3, 1)):
        assert torch.equal(got, alone[:n])
    beside = cuda.forward(Batch.build(spans), KVCache(cuda.cache_spec(2048), "cuda")).cpu()
    assert float((beside - together).abs().max() / want.std()) < 2e-2


def test_a_sparse_model_decodes_in_graphs(tmp_path):
    """The engine's captured steps give what single steps give."""
    name = "qwen2_moe"
    folder = write_exl2(write(name, build_wide(name), tmp_path / "dense"), tmp_path / "exl2")
    write_tokenizer(folder)
    model = load_model(folder, device="cuda", deterministic=True)
    with ex.load(folder, device="cuda", deterministic=True, context=64, progress=None) as llm:
        ids = llm.generate([5, 6, 7], max_tokens=24, temperature=0, ignore_eos=True).tokens
        assert llm.engine.executor.captured.graphs
        text = [5, 6, 7, *(token.id for token in ids)]
        assert logits(model, text).argmax(-1)[2:-1].tolist() == text[3:]


# ---- Texts of some length: near the CPU's, the same twice, and with deterministic=True the same however they are cut


MODELS = {
    "4 bits": FIXTURE,
    "dense": Path(ex.__file__).parent / "demo_model",
}
PROMPTS = [
    "It was a dark night", "The king said", "Once upon a time", "She opened the door and", "In the middle of the wood", "He had never seen",
    "\"Come here,\" said the old man", "The next morning", "There were three brothers", "I do not know why", "At last they came to the sea",
    "The wind", "Nobody answered", "When the war was over", "My father used to say that", "A long time ago, in a small house",
    "The captain looked at", "It is true that", "They walked for two days", "What shall we do",
]  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def written(request):
    """A model's folder and the texts that the CPU engine writes greedily, prompts included."""
    folder = MODELS[request.param]
    with ex.load(folder, device="cpu", progress=None) as llm:
        asked = {"max_tokens": 256, "temperature": 0, "ignore_eos": True}
        texts = [llm.tokenizer.encode(prompt) + [t.id for t in llm.generate(prompt, **asked).tokens] for prompt in PROMPTS]
    assert min(map(len, texts)) > 256
    return folder, texts


def test_teacher_forced_on_the_cpus_text(written):
    """Token by token, eight texts a step: what a chat's answers go through."""
    folder, texts = written
    cpu, cuda = load_model(folder), load_model(folder, device="cuda")
    clear_places, worst = 0, 0.0
    for some in (texts[:8], texts[8:16], texts[16:]):
        for ids, got in zip(some, fed(cuda, some), strict=True):
            (want,) = fed(cpu, [ids], [len(ids)])
            worst = max(worst, float((want - got).abs().max()))
            top = want.topk(2, dim=-1).values
            clear = top[:, 0] - top[:, 1] > 0.05
            clear_places += int(clear.sum())
            assert torch.equal(want.argmax(-1)[clear], got.argmax(-1)[clear])
    assert worst < 0.05
    assert clear_places > 0.9 * sum(map(len, texts)), "the comparison looked at most places"


def test_twice_the_same_bits(written):
    folder, texts = written
    cuda = load_model(folder, device="cuda")
    first = fed(cuda, texts[:8])
    again = fed(load_model(folder, device="cuda"), texts[:8])
    alone = [fed(cuda, [ids])[0] for ids in texts[:2]]
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, first, alone)), "nor do they depend on the texts beside them"
    prompt = logits(cuda, IDS)
    assert torch.equal(prompt, logits(cuda, IDS))


@pytest.fixture(scope="module")
def exact():
    """A deterministic model, and what it gives token by token."""
    model = load_model(MODELS["4 bits"], device="cuda", deterministic=True)
    return model, fed(model, [IDS])[0]


@pytest.mark.parametrize("lengths", [[300], [7], [8], [9], [64], [256, 3, 40], [1, 2, 3, 5, 8, 13, 21, 34, 55], [299, 1]], ids=str)
def test_deterministic_however_a_prompt_is_cut(exact, lengths):
    assert torch.equal(fed(exact[0], [IDS], lengths)[0], exact[1])


@pytest.mark.parametrize("count", [2, 7, 9, 16, 17, 33, 64, 70, 100])
def test_deterministic_whatever_runs_beside(exact, count):
    """Prompts and single tokens in one step, then one token of each."""
    model, want = exact
    sizes = [(1, 40, 8, 9, 2, 1, 1)[i % 7] for i in range(count)]
    cache = KVCache(model.cache_spec(256 * count), model.device)
    for starts in ([0] * count, sizes):
        parts = [IDS[start : size if start == 0 else start + 1] for start, size in zip(starts, sizes)]
        spans = [SequenceSlice(ids=ids, start=start, pages=[i], logit_rows="all") for i, (ids, start) in enumerate(zip(parts, starts))]
        rows = model.forward(Batch.build(spans), cache).cpu().split(list(map(len, parts)))
        for start, got in zip(starts, rows):
            assert torch.equal(got, want[start : start + len(got)])


@pytest.mark.parametrize("shape", [(3, 7, 64), (2, 4, 5, 96), (2, 300, 1000)])
def test_the_norm_of_the_reference(shape):
    """One kernel of torch's on a GPU: values and gradients of the formula, and the same bits every time."""
    generator = torch.Generator().manual_seed(0)
    x, weight, back = (torch.randn(size, generator=generator) for size in (shape, shape[-1:], shape))

    def norm(device, dtype):
        leaves = [tensor.to(device, dtype).requires_grad_() for tensor in (x, weight)]
        out = (
            reference.rms_norm(*leaves, 1e-5)
            if device == "cuda"
            else leaves[0] / (leaves[0] ** 2).mean(-1, True).add(1e-5).sqrt() * leaves[1]
        )
        return [out, *torch.autograd.grad((out * back.to(device, dtype)).sum(), leaves)]

    found, again, wanted = norm("cuda", torch.float32), norm("cuda", torch.float32), norm("cpu", torch.float64)
    for one, two, exact in zip(found, again, wanted):
        assert torch.equal(one, two)
        torch.testing.assert_close(one.cpu().double(), exact, rtol=1e-5, atol=1e-4)

"""Code written for exllamav2, call by call, on the demo model: what it does there, it does here."""

import asyncio
import importlib
import sys
import types
from pathlib import Path

import pytest
import torch

import exl2nb as ex
from exl2nb.core.errors import ContextOverflow, OptionError
from exl2nb.integrations import exllamav2 as ours
from exl2nb.model.lora import save_lora

pytestmark = pytest.mark.cpu
DEMO = str(Path(ex.__file__).parent / "demo_model")
EXL2 = str(Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw")
PROMPT = "Our story begins in the"


@pytest.fixture(scope="module", autouse=True)
def _installed():
    assert ours.install()
    yield
    ours.uninstall()
    assert "exllamav2" not in sys.modules


@pytest.fixture(scope="module")
def parts():
    from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer

    config = ExLlamaV2Config(DEMO)
    config.arch_compat_overrides()
    model = ExLlamaV2(config)
    cache = ExLlamaV2Cache(model, max_seq_len=8192, lazy=True)
    model.load_autosplit(cache)
    yield model, cache, ExLlamaV2Tokenizer(config)
    model.unload()


@pytest.fixture(scope="module")
def generator(parts):
    from exllamav2.generator import ExLlamaV2DynamicGenerator

    model, cache, tokenizer = parts
    generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)
    generator.warmup()
    return generator


def greedy(**options):
    from exllamav2.generator import ExLlamaV2Sampler

    return ExLlamaV2Sampler.Settings.greedy(**options)


def test_config_and_cache(parts):
    from exllamav2 import ExLlamaV2Cache_Q4

    model, cache, _ = parts
    config = model.config
    assert (config.max_seq_len, config.vocab_size, config.num_hidden_layers, config.eos_token_id) == (1024, 4096, 12, 2)
    assert model.llm.context == 1024 and model.llm.engine.spec.num_tokens == cache.max_seq_len == 8192
    config.max_input_len, config.max_attention_size = 512, 512**2
    assert ExLlamaV2Cache_Q4(model, max_seq_len=1000).max_seq_len == 1024
    assert ExLlamaV2Cache_Q4(model, batch_size=3).mode == "q4"
    assert model.forward(torch.tensor([[1, 5, 6]]), last_id_only=True).shape == (1, 1, 4096)


def test_generate_one_and_several(generator, llm):
    want = llm.generate(llm.tokenizer.encode(PROMPT), max_tokens=12, temperature=0, ignore_eos=True).text
    assert generator.generate(prompt=PROMPT, max_new_tokens=12, add_bos=True, gen_settings=greedy()) == PROMPT + want
    prompts = [PROMPT, "The secret to success is"]
    outputs = generator.generate(prompt=prompts, max_new_tokens=12, add_bos=True, gen_settings=greedy(), completion_only=True)
    assert outputs[0] == want and len(outputs) == 2
    once, again = (generator.generate(PROMPT, 12, seed=5) for _ in range(2))
    assert once == again != generator.generate(PROMPT, 12, seed=6)
    _, last = generator.generate(PROMPT, 4, return_last_results=True)
    assert last["new_tokens"] == 4 and last["eos_reason"] == "max_new_tokens"


def test_a_job_streams(generator, parts):
    from exllamav2.generator import ExLlamaV2DynamicJob

    ids = parts[2].encode(PROMPT, add_bos=True)
    job = ExLlamaV2DynamicJob(
        input_ids=ids,
        max_new_tokens=20,
        gen_settings=greedy(),
        identifier="mine",
        return_top_tokens=3,
        return_probs=True,
        return_logits=True,
    )
    generator.enqueue(job)
    results, eos = [], False
    while not eos:
        for result in generator.iterate():
            assert result["job"] == job and result["identifier"] == "mine"
            results.append(result)
            eos = result["eos"]
    assert results[0]["stage"] == "started"
    streaming = [one for one in results if one["stage"] == "streaming"]
    last = streaming[-1]
    assert "".join(one.get("text", "") for one in streaming) == last["full_completion"]
    tokens = torch.cat([one["token_ids"] for one in streaming if "token_ids" in one], -1)
    assert tokens.shape == (1, 20) and parts[2].decode(tokens)[0] == last["full_completion"]
    assert next(one for one in streaming if "top_k_tokens" in one)["top_k_tokens"].shape[-1] == 3
    assert last["logits"].shape == (1, 20, 4096)
    assert (last["eos_reason"], last["new_tokens"], last["prompt_tokens"]) == ("max_new_tokens", 20, ids.shape[-1])
    assert generator.num_remaining_jobs() == 0


def test_stop_conditions_and_cancelled_jobs(generator, parts):
    from exllamav2.generator import ExLlamaV2DynamicJob

    def run(**options):
        job = ExLlamaV2DynamicJob(parts[2].encode(PROMPT, add_bos=True), 60, gen_settings=greedy(), **options)
        generator.enqueue([job])
        while generator.num_remaining_jobs():
            results = generator.iterate()
        return results[-1]

    free = run()
    word = free["full_completion"].split()[3]
    stopped = run(stop_conditions=[parts[2].eos_token_id, word])
    assert stopped["eos_reason"] == "stop_string" and stopped["eos_triggering_string"] == word
    assert free["full_completion"].startswith(stopped["full_completion"])
    banned = run(banned_strings=[word])
    assert word.lower() not in banned["full_completion"].lower() and word.strip() in banned["suppressed_text"]
    job = ExLlamaV2DynamicJob(parts[2].encode(PROMPT), 500)
    generator.enqueue(job)
    generator.iterate()
    generator.cancel(job)
    assert generator.iterate() == [] and generator.llm.engine.wait_idle(10)


def test_equal_beginnings_are_computed_once(generator, parts):
    long = parts[2].encode("It was a dark and stormy night. " * 80, add_bos=True)
    from exllamav2.generator import ExLlamaV2DynamicJob

    cached = []
    for _ in range(2):
        generator.enqueue(ExLlamaV2DynamicJob(long, 2))
        while generator.num_remaining_jobs():
            cached.append(generator.iterate()[-1].get("cached_tokens"))
    assert cached[-1] >= 256


def test_filters(generator, parts):
    from exllamav2.generator.filters import ExLlamaV2Filter, ExLlamaV2PrefixFilter, ExLlamaV2SelectFilter

    model, _, tokenizer = parts
    made = generator.generate(
        PROMPT, 20, filters=[ExLlamaV2SelectFilter(model, tokenizer, [" small town", " dark wood"])], completion_only=True
    )
    assert made.lower() in (" small town", " dark wood")
    begins = [ExLlamaV2PrefixFilter(model, tokenizer, " year of grace")]
    made = generator.generate(PROMPT, 16, filters=begins, gen_settings=greedy(), completion_only=True)
    assert made.startswith(" year of grace") and len(made) > len(" year of grace")

    class Only(ExLlamaV2Filter):
        def begin(self, prefix_str):
            self.left = 3

        def feed(self, token):
            assert token.shape == (1, 1)
            self.left -= 1

        def next(self):
            return {42}, ({42} if self.left == 1 else set())

    answer, last = generator.generate(PROMPT, 12, filters=[Only(model, tokenizer)], return_last_results=True, completion_only=True)
    assert answer == tokenizer.inner.decode([42, 42, 42]) and last["eos_reason"] == "end_filter"


def test_guidance(generator, llm):
    pair = ("It was a", "He was a")
    outputs = generator.generate([pair] * 3, 8, gen_settings=[greedy(cfg_scale=s) for s in (1.0, 2.0, -1.0)], completion_only=True)
    plain = llm.tokenizer.encode(pair[0], add_special=False), llm.tokenizer.encode(pair[1], add_special=False)
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    assert outputs[0] == llm.generate(plain[0], **options).text
    assert outputs[1] == llm.generate(plain[0], negative_ids=plain[1], cfg_scale=2.0, **options).text
    assert outputs[2] == llm.generate(plain[1], negative_ids=plain[0], cfg_scale=2.0, **options).text


def test_speculation(parts, generator):
    from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config
    from exllamav2.generator import ExLlamaV2DynamicGenerator

    model, cache, tokenizer = parts
    want = generator.generate(PROMPT, 24, gen_settings=greedy())
    draft_model = ExLlamaV2(ExLlamaV2Config(EXL2))
    draft_cache = ExLlamaV2Cache(draft_model, max_seq_len=8192, lazy=True)
    draft_model.load_autosplit(draft_cache)
    drafted = ExLlamaV2DynamicGenerator(model, cache, tokenizer, draft_model=draft_model, draft_cache=draft_cache, num_draft_tokens=4)
    text, last = drafted.generate(PROMPT, 24, gen_settings=greedy(), return_last_results=True)
    assert text == want and last["accepted_draft_tokens"] > 0
    ngram = ExLlamaV2DynamicGenerator(model, cache, tokenizer, use_ngram_draft=True)
    assert ngram.generate(PROMPT, 24, gen_settings=greedy()) == want
    model.llm.engine.drafter.close()
    model.llm.engine.drafter = None
    draft_model.unload()


def test_the_older_generators(parts, generator):
    from exllamav2.generator import ExLlamaV2BaseGenerator, ExLlamaV2Sampler, ExLlamaV2StreamingGenerator

    settings = ExLlamaV2Sampler.Settings()
    settings.temperature, settings.top_k = 0.85, 50
    settings.disallow_tokens(parts[2], [parts[2].eos_token_id])
    base = ExLlamaV2BaseGenerator(*parts)
    base.warmup()
    assert base.generate_simple(PROMPT, settings, 12, seed=1234) == base.generate_simple(PROMPT, settings, 12, seed=1234)
    assert base.generate_text(PROMPT, max_new_tokens=5).startswith(PROMPT)
    streaming = ExLlamaV2StreamingGenerator(*parts)
    ids = parts[2].encode(PROMPT, add_bos=True)
    streaming.set_stop_conditions([])
    streaming.begin_stream_ex(ids, greedy(), return_probabilities=True)
    chunks, count, first = [], 0, None
    while count < 10:
        res = streaming.stream_ex()
        chunks.append(res["chunk"])
        first = int(res["chunk_token_ids"].flatten()[0]) if not count and res["chunk_token_ids"].numel() else first
        count += res["chunk_token_ids"].shape[-1]
        assert not res["eos"] and res["probs"].shape == res["chunk_token_ids"].shape
    want = generator.generate(PROMPT, 60, add_bos=True, gen_settings=greedy(), completion_only=True)
    assert want.startswith("".join(chunks))
    assert streaming.sequence_ids.shape[-1] == ids.shape[-1] + count
    streaming.set_stop_conditions([first])
    streaming.begin_stream_ex(ids, greedy())
    assert any(streaming.stream_ex()["eos"] for _ in range(20)), "a second stream did not end at its stop token"


def test_async_jobs(parts):
    from exllamav2.generator import ExLlamaV2DynamicGeneratorAsync, ExLlamaV2DynamicJobAsync

    model, cache, tokenizer = parts

    async def main():
        generator = ExLlamaV2DynamicGeneratorAsync(model=model, cache=cache, tokenizer=tokenizer)

        async def run(prompt, most):
            job, text = ExLlamaV2DynamicJobAsync(generator, input_ids=tokenizer.encode(prompt), max_new_tokens=60), ""
            async for result in job:
                text += result.get("text", "")
                if len(text) > most:
                    await job.cancel()
                    break
            return text

        texts = await asyncio.gather(run("It was", 10**6), run("She said", 20))
        await generator.close()
        return texts

    whole, cut = asyncio.run(main())
    assert len(whole) > 60 and cut
    assert model.llm.engine.wait_idle(10)


def test_tokenizer(parts):
    tokenizer = parts[2]
    ids = tokenizer.encode("It was<s>", add_bos=True, add_eos=True)
    assert ids.dtype == torch.int64 and ids[0, 0] == 1 and ids[0, -1] == 2 and (ids == 1).sum() == 1
    assert (tokenizer.encode("It was<s>", encode_special_tokens=True) == 1).sum() == 1
    both, offsets = tokenizer.encode(["It was", "She"], return_offsets=True)
    assert both.shape[0] == 2 and offsets.tolist() == [0, tokenizer.num_tokens("She") - both.shape[1]]
    alone, offset = tokenizer.encode("It was", return_offsets=True)
    assert alone.shape[0] == 1 and offset.tolist() == [0]
    assert tokenizer.decode(both) == ["It was", "She"]
    assert tokenizer.decode(tokenizer.encode("It was")[0]) == "It was"
    assert tokenizer.single_id("</s>") == 2 and tokenizer.single_token(7).tolist() == [[7]]
    assert len(tokenizer.get_id_to_piece_list()) == tokenizer.get_vocab_size() == tokenizer.tokenizer.vocab_size() == 4096
    assert tokenizer.extended_id_to_piece[tokenizer.bos_token_id] == tokenizer.bos_token
    assert tokenizer.tokenizer.id_to_piece(300) == tokenizer.get_id_to_piece_list()[300]


def test_settings_become_options():
    from exllamav2.generator import ExLlamaV2Sampler

    made = ExLlamaV2Sampler.Settings().options(4096)
    assert {**ex.sampling.SamplingParams.preset("exllamav2").changed}.items() <= made.items()
    full = ExLlamaV2Sampler.Settings(
        token_presence_penalty=0.5, token_repetition_range=64, token_repetition_decay=16, min_temp=0.5, max_temp=1.5, typical=0.9, tfs=0.8,
        mirostat=True, dry_multiplier=0.8, dry_sequence_breakers={5, 3}, xtc_probability=0.5, xtc_ignore_tokens=frozenset([2]),
    ).options(4096)  # fmt: skip
    ex.sampling.SamplingParams.of(**full)
    assert full["penalty_prompt"] and full["dry_breakers"] == [3, 5] and full["temperature"] == 1.0 and full["xtc_ignore"] == [2]
    few = ExLlamaV2Sampler.Settings()
    few.token_bias = torch.full((4096,), -torch.inf)
    few.token_bias[[7, 9]] = torch.tensor([0.0, 2.5])
    assert few.options(4096)["allowed_tokens"] == [7, 9] and few.options(4096)["logit_bias"] == {9: 2.5}


def test_adapters(parts, generator, tmp_path):
    from exllamav2 import ExLlamaV2Lora

    from exl2nb.core.errors import ModelNotFound

    llm = generator.llm
    g, hidden = torch.Generator().manual_seed(0), llm.config.hidden_size
    pairs = [
        {
            f"model.layers.{i}.self_attn.o_proj": (torch.randn(4, hidden, generator=g) / 9, torch.randn(hidden, 4, generator=g) / 2)
            for i in range(9)
        }
        for _ in range(2)
    ]
    one, other = (save_lora(tmp_path / name, pair) for name, pair in zip(("one", "other"), pairs))
    loras = [ExLlamaV2Lora.from_directory(parts[0], str(one)), ExLlamaV2Lora.from_directory(parts[0], str(other), 0.5)]
    plain = generator.generate("The old man", 8, gen_settings=greedy())
    generator.set_loras(loras)
    both = generator.generate("The old man", 8, gen_settings=greedy())
    generator.set_loras(loras[0])
    first = generator.generate("The old man", 8, gen_settings=greedy())
    assert len({plain, both, first}) == 3 and [*llm.loras] == [loras[0].name]
    options, ids = greedy().options(llm.config.vocab_size), parts[2].encode("The old man")[0].tolist()
    assert first == "The old man" + llm.generate(ids, lora=loras[0].name, max_tokens=8, **options).text
    generator.set_loras(None)
    assert generator.generate("The old man", 8, gen_settings=greedy()) == plain and not llm.loras.list()
    with pytest.raises(ModelNotFound, match="adapter_config"):
        ExLlamaV2Lora.from_directory(parts[0], str(tmp_path))


def test_what_is_refused_has_a_name(parts, generator):
    from exllamav2 import ExLlamaV2Cache_TP, ExLlamaV2Config
    from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler, ExLlamaV2StreamingGenerator

    model, cache, tokenizer = parts
    calls = [
        (lambda: generator.set_loras([object()]), "expected ExLlamaV2Lora"),
        (lambda: model.load_tp(), "tensor parallelism"),
        (lambda: ExLlamaV2Cache_TP(model), "tensor parallelism"),
        (lambda: model.load(gpu_split=[10, 10]), "gpu_split"),
        (lambda: ExLlamaV2StreamingGenerator(*parts).get_sd_stats(), "read accepted_draft_tokens"),
        (lambda: ExLlamaV2StreamingGenerator(*parts).stream_ex(ban_tokens=[5]), "ban_tokens is not taken while a stream runs"),
        (lambda: setattr(model.config, "max_sequence", 5), "no attribute 'max_sequence'"),
        (lambda: setattr(model.config, "load_in_q4", True), "load_in_q4"),
        (lambda: ExLlamaV2Config().prepare(), "model_dir is not set"),
        (lambda: ExLlamaV2DynamicGenerator(model, cache, tokenizer, max_bach=1), "unknown keyword 'max_bach'"),
        (lambda: ExLlamaV2DynamicJob(torch.tensor([[1]]), 5, embeddings=[1]), "expected what ExLlamaV2VisionTower makes"),
        (lambda: generator.generate("x", 5, gen_setings=None), "unknown keyword 'gen_setings'"),
        (lambda: generator.generate(("a", "b"), 5), "expected a pair with one"),
        (lambda: generator.generate("x", 5, filters=[5]), "expected objects with begin, feed and next"),
        (lambda: ExLlamaV2Sampler.Settings(post_sampling_hooks=[1]).options(10), "post_sampling_hooks"),
        (lambda: model.forward(torch.tensor([[1]]), cache), "cache is not taken here"),
    ]
    for call, message in calls:
        with pytest.raises(OptionError, match=message):
            call()
    assert generator.generate("It was", 2).startswith("It was")


def test_the_real_one_stays(monkeypatch):
    real = types.ModuleType("exllamav2")
    monkeypatch.setitem(sys.modules, "exllamav2", real)
    assert not ours.install()
    assert importlib.import_module("exllamav2") is real


def test_a_refused_job_leaves_none_of_its_list_running(generator, parts):
    from exllamav2.generator import ExLlamaV2DynamicJob

    ids = parts[2].encode(PROMPT, add_bos=True)
    running = ExLlamaV2DynamicJob(ids, 40, gen_settings=greedy())
    generator.enqueue(running)
    good, bad = ExLlamaV2DynamicJob(ids, 400, gen_settings=greedy()), ExLlamaV2DynamicJob(torch.zeros(1, 2000, dtype=torch.int64), 5)
    with pytest.raises(ContextOverflow, match="the prompt has 2000 tokens"):
        generator.enqueue([good, bad])
    assert generator.jobs == [running] and good.handle is None and bad.handle is None
    with pytest.raises(ContextOverflow):
        generator.generate(["It was", "x " * 3000], 400)
    assert generator.jobs == [running], "what ran before goes on"
    while generator.num_remaining_jobs():
        last = generator.iterate()[-1]
    assert last["job"] is running and last["new_tokens"] == 40
    assert generator.llm.engine.wait_idle(10), "the first job of the refused list does not go on either"

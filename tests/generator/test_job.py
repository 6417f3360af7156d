"""Many requests as one stream of events; callbacks; the prompt cache of a loaded model."""

import asyncio
import copy
import gc
import os
import pickle
import threading
import warnings

import pytest

import exl2nb as ex
from exl2nb.core.errors import ContextOverflow, EngineClosed, FormatError, GenerationError, ModelNotFound, OptionError
from exl2nb.io import safetensors

PROMPTS = ["It was", "The old man said", "She went " * 60, "He"]


def test_events_hold_the_whole_answer(fresh_llm):
    llm = fresh_llm
    job = llm.batch(PROMPTS, max_tokens=8, temperature=0, top_logprobs=2)
    events = list(job)
    assert [event.serial for event in events] == list(range(1, len(events) + 1))
    for i, prompt in enumerate(PROMPTS):
        mine = [event for event in events if event.id == i]
        alone = llm.generate(prompt, max_tokens=8, temperature=0, top_logprobs=2)
        assert "".join(event.text for event in mine) == alone.text
        assert [token for event in mine for token in event.tokens] == list(alone.tokens)
        assert [each for event in mine for each in zip(event.token_ids, event.token_probs)] == [(t.id, t.prob) for t in alone.tokens]
        assert [event.over for event in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].finish_reason == alone.finish_reason == "length"
        assert mine[-1].completion.text == alone.text
        progress = [event.prefilled for event in mine if event.stage in ("started", "prefill")]
        assert progress == sorted(progress)
        assert mine[0].stage == "started"
    assert {event.stage for event in events} <= {"started", "prefill", "streaming", "finished"}
    assert job.remaining == 0
    assert sorted(job.completions) == [0, 1, 2, 3]


def test_request_options_and_adding_inside_the_loop(llm):
    job = llm.batch({"a": "It was", "b": {"prompt": "She", "max_tokens": 2, "stream": False}}, max_tokens=4, temperature=0)
    lengths = {}
    for event in job:
        if event.over:
            lengths[event.id] = len(event.completion.tokens)
            if event.id == "a":
                assert job.add("He", max_tokens=3, temperature=0) == 0
    assert lengths == {"a": 4, "b": 2, 0: 3}
    with pytest.raises(OptionError, match="id 'a' is taken"):
        job.add("x", id="a")


def test_a_request_that_fails_is_an_event(llm, monkeypatch):
    def broken(draw):
        raise ValueError("callback")

    job = llm.job()
    job.add("It was", id="bad", max_tokens=4, post_sampling=(broken,))
    job.add("It was", id="good", max_tokens=4, temperature=0)
    assert sorted(job.run()) == ["good"]
    assert list(job.errors) == ["bad"]


def test_wrong_requests_are_refused_and_leave_nothing(llm):
    with pytest.raises(OptionError, match="expected a text, ids, or a dict"):
        llm.batch(["It was", {"text": "x"}])
    with pytest.raises(ContextOverflow):
        llm.batch(["It was", [5] * llm.context])


def test_cancel_break_and_drop(llm):
    job = llm.batch(PROMPTS, max_tokens=400, ignore_eos=True)
    for _ in job:
        break
    job.cancel()
    assert {completion.finish_reason for completion in job.run().values()} == {"cancelled"}
    job = llm.batch(PROMPTS, max_tokens=400, ignore_eos=True)
    next(iter(job))
    del job, _
    gc.collect()


def test_async(llm):
    async def work():
        return {event.id: event.completion.text async for event in llm.batch(PROMPTS, max_tokens=5, temperature=0) if event.over}

    assert asyncio.run(work()) == {i: llm.generate(p, max_tokens=5, temperature=0).text for i, p in enumerate(PROMPTS)}


def test_callback(llm):
    heard = []
    completion = llm.generate("It was", max_tokens=6, temperature=0, on_chunk=heard.append)
    assert "".join(chunk.text for chunk in heard) == completion.text
    assert completion.prompt == "It was"
    with pytest.raises(OptionError, match="llm.batch"):
        llm.generate(PROMPTS, on_chunk=heard.append)


def test_a_callback_that_raises_ends_its_request_and_nothing_else(llm):
    other = llm.stream("She", max_tokens=40, temperature=0, ignore_eos=True)

    def refuse(chunk):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        llm.generate("It was", max_tokens=4000, ignore_eos=True, on_chunk=refuse)
    assert len(other.result().tokens) == 40


def test_a_hook_may_not_call_its_model_but_may_close_it():
    """It runs inside the engine's step: waiting for another step there would be for ever."""
    with ex.demo(progress=None) as own:
        for call in (lambda: own.generate("He", max_tokens=2), lambda: own.score("He said"), lambda: own.cache.snapshot()):
            with pytest.raises(GenerationError, match="inside a step .* called its own model"):
                own.generate("It was", max_tokens=2, post_sampling=lambda draw, call=call: call() and None)
        assert own.generate("It was", max_tokens=2, temperature=0).text
        with pytest.raises(EngineClosed):
            own.generate("It was", max_tokens=200, ignore_eos=True, post_sampling=lambda draw: own.close())
        with pytest.raises(EngineClosed):
            own.generate("It was", max_tokens=2)


def test_two_threads_on_one_stream_share_it(llm):
    handle, got = llm.stream("It was", max_tokens=12, temperature=0), [[], []]
    threads = [threading.Thread(target=lambda mine=mine: mine.extend(token for chunk in handle for token in chunk.tokens)) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(got[0] + got[1]) == sorted(handle.result().tokens)


def test_a_forked_process_cannot_use_the_model(llm):
    for wrong in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(OptionError, match="neither be copied nor sent to another process"):
            wrong(llm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of threads
        child = os.fork()
    if not child:
        code = 1
        try:
            llm.generate("It was", max_tokens=2)
        except GenerationError as error:
            code = 0 if "of which this one is a fork; load it here" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_timeout(llm):
    for timeout_s in (0.05, 0.4, 3):  # a machine that has no time for it may not come to the first token
        completion = llm.generate("It was", max_tokens=3000, ignore_eos=True, temperature=0, timeout_s=timeout_s)
        assert completion.finish_reason == "timeout"
        if completion.tokens:
            break
    assert 0 < len(completion.tokens) < 3000
    with pytest.raises(OptionError, match="timeout_s"):
        llm.generate("It was", timeout_s=0)
    with pytest.raises(OptionError, match="priority"):
        llm.generate("It was", priority=1001)


class TestCache:
    TEXT = "The old man went down to the harbour and looked at the boats. " * 24

    def ask(self, llm, text=TEXT):
        return llm.generate(text, max_tokens=12, temperature=0)

    def test_the_same_bits_as_a_fresh_run(self, fresh_llm):
        """Tokens and log probabilities to the last bit, for all three ways a page is taken over."""
        tails = ["", " He", " It was late, and nobody had come back yet, said the boy who had been there since the morning."]
        llm = fresh_llm
        llm.cache.reuse = False
        fresh = [self.ask(llm, self.TEXT + tail) for tail in tails]
        assert [c.timings.reused_tokens for c in fresh] == [0, 0, 0]
        llm.cache.reuse = True
        for round_ in range(2):
            again = [self.ask(llm, self.TEXT + tail) for tail in tails]
            assert [c.tokens for c in again] == [c.tokens for c in fresh]
            assert all(c.timings.reused_tokens > 0.7 * c.timings.prompt_tokens for c in again[1 - round_ :])

    def test_snapshot(self, fresh_llm):
        llm = fresh_llm
        handle = llm.stream(self.TEXT, max_tokens=3000, ignore_eos=True, temperature=0)
        next(handle)
        running = llm.cache.snapshot()
        assert running.num("used") >= len(running.requests[0].pages) > 0
        assert running.requests[0].number == handle.number
        assert running.pages[running.requests[0].pages[0]].owners == (handle.number,)
        handle.cancel()
        handle.result()
        after = llm.cache.snapshot()
        assert after.num("used") == 0 < after.num("cached")
        assert len(after.chains()[0]) == sum(page.key is not None for page in after.pages)
        assert after.clock > 0
        for text in (str(after), repr(after), after._repr_html_(), repr(llm.cache)):
            assert "cached" in text
        assert str(running).count("request") == 1

    def test_save_and_load(self, fresh_llm, tmp_path):
        right = self.ask(fresh_llm)
        saved = fresh_llm.cache.save(tmp_path / "talk.cache")
        assert saved.tokens >= right.timings.prompt_tokens
        with ex.demo(progress=None) as other:
            loaded = other.cache.load(tmp_path / "talk.cache")
            assert (loaded.pages, loaded.tokens, loaded.skipped) == (saved.pages, saved.tokens, 0)
            assert other.cache.load(tmp_path / "talk.cache").skipped == saved.pages
            again = self.ask(other)
            assert again.tokens == right.tokens
            assert again.timings.reused_tokens == right.timings.prompt_tokens - 1
        with ex.demo(progress=None, cache_tokens=512, context=512) as small:
            assert small.cache.load(tmp_path / "talk.cache").skipped == max(0, saved.pages - small.engine.pages.num_pages)

    @pytest.mark.parametrize("cache", ["q4", "fp8", "k8v4"])
    def test_quantised_pages(self, cache, tmp_path):
        with ex.demo(progress=None, cache=cache) as one:
            right = self.ask(one)
            one.cache.save(tmp_path / "talk.cache")
            assert self.ask(one).tokens == right.tokens
            one.cache.clear()
            one.cache.load(tmp_path / "talk.cache")
            again = self.ask(one)
            assert again.tokens == right.tokens
            assert again.timings.reused_tokens == right.timings.prompt_tokens - 1

    def test_files_that_do_not_fit(self, fresh_llm, tmp_path):
        llm = fresh_llm
        with pytest.raises(OptionError, match="generate something first"):
            llm.cache.save(tmp_path / "empty")
        self.ask(llm)
        path = tmp_path / "talk.cache"
        llm.cache.save(path)
        with ex.demo(progress=None, cache="fp32") as other, pytest.raises(OptionError, match="mode 'fp16' .here 'fp32'"):
            other.cache.load(path)
        with pytest.raises(ModelNotFound):
            llm.cache.load(tmp_path / "none")
        with safetensors.SafetensorsFile(path) as file:
            tensors, head = {name: file.read(name) for name in file.names()}, dict(file.metadata or {})

        def refuse(error, match, change=None, **metadata):
            altered = {name: tensor.clone() for name, tensor in tensors.items()}
            if change:
                change(altered)
            safetensors.save(tmp_path / "altered", altered, {**head, **metadata})
            llm.cache.clear()
            with pytest.raises(error, match=match):
                llm.cache.load(tmp_path / "altered")
            assert llm.engine.pages.num_cached == 0
            assert llm.engine.pages.num_free == llm.engine.pages.num_pages

        refuse(FormatError, "was not made by cache.save", format="other")
        refuse(OptionError, "computed by another model", model="0" * 32)
        refuse(FormatError, "expected JSON", spec="{")
        refuse(FormatError, "expected a list of texts", salts="3")
        refuse(FormatError, "expected 1 to 256", lambda t: t["lengths"].fill_(257))
        refuse(FormatError, "holds ids of 4096 and more", lambda t: t["tokens"].fill_(1 << 20))
        refuse(FormatError, "expected a full page before it", lambda t: t["parents"].fill_(99))
        refuse(FormatError, "found none of that name", lambda t: t.pop("v.0"))
        refuse(FormatError, "not finite", lambda t: t["k.1"].fill_(float("nan")))
        refuse(FormatError, "'k.0': found", lambda t: t.update({"k.0": t["k.0"].float()}))
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(FormatError):
            llm.cache.load(path)
        assert self.ask(llm).finish_reason == "length"

    def test_closed(self):
        made = ex.demo(progress=None)
        made.close()
        with pytest.raises(EngineClosed):
            made.cache.snapshot()

"""`parallel="tensor"` with real processes: the same text, and what happens when one of them dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import exl2nb as ex
from exl2nb.core.errors import EngineClosed, GenerationError, OptionError
from exl2nb.model.parallel import COPY_PAGE_COMMAND, ParallelModel

DEMO = Path(ex.__file__).parent / "demo_model"
QUANTISED = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"


@pytest.fixture(scope="module")
def ranks() -> Iterator[ex.LLM]:
    with ex.load(DEMO, devices=["cpu", "cpu"], parallel="tensor", progress=None) as llm:
        yield llm


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone_within(processes: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, processes))


def _until(deadline: float, llm: ex.LLM) -> None:
    while time.monotonic() < deadline:
        llm.generate("The secret of life is", max_tokens=20)


def test_the_same_text_however_often(ranks: ex.LLM) -> None:
    prompts = ["The secret of life is", "It was a dark", "The secret of life was"]
    with ex.load(DEMO, device="cpu", progress=None) as whole:
        for options in ({"temperature": 0}, {"seed": 3, "top_k": 40}, {"seed": 5, "regex": "[a-z ]{4,20}"}):
            texts = []
            for llm in (whole, ranks, ranks):
                found = {event.id: event.completion.text for event in llm.batch(prompts, max_tokens=16, **options) if event.over}
                texts.append([found[index] for index in range(len(prompts))])
            assert texts[0] == texts[1] == texts[2]
        assert ranks.score("The old man").total == pytest.approx(whole.score("The old man").total, abs=1e-3)
        several = {"n": 3, "seed": 1, "max_tokens": 8}
        prompt = "Once upon a time there was a king who had three sons. " * 24  # more than a page, whose last one is copied for each
        assert [one.text for one in ranks.generate(prompt, **several)] == [one.text for one in whole.generate(prompt, **several)]


def test_stop_leaves_it_usable(ranks: ex.LLM) -> None:
    for number, _ in enumerate(ranks.stream("Once upon a time", max_tokens=200)):
        if number == 3:
            break
    assert ranks.generate("It was", max_tokens=2, temperature=0).finish_reason == "length"


def test_what_ranks_do_not_do_has_a_name(ranks: ex.LLM, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="the model runs as 2 ranks"):
        ranks.trace("It was", capture=["*"])
    for call in (ranks.cache.save, ranks.cache.load):
        with pytest.raises(OptionError, match="the model runs as several ranks"):
            call(tmp_path / "pages.safetensors")
    assert "each of 2 ranks" in repr(ranks.model)


def test_a_killed_rank_ends_in_a_named_error_and_leaves_nothing() -> None:
    llm = ex.load(QUANTISED, devices=["cpu", "cpu"], parallel="tensor", progress=None)
    assert isinstance(llm.model, ParallelModel)
    [process] = [one.pid for one in llm.model.processes]
    threading.Timer(0.3, os.kill, (process, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(GenerationError, match=r"tensor parallel: rank 1 ended \(exit code -9\); close the model and load it again"):
        _until(start + 60, llm)
    with pytest.raises(GenerationError, match="rank 1 ended"):
        llm.generate("Again")
    llm.close()
    assert not alive(process)
    with pytest.raises(EngineClosed):
        llm.generate("It was")


def test_a_rank_that_fails_says_why() -> None:
    with ex.load(QUANTISED, devices=["cpu", "cpu"], parallel="tensor", progress=None) as llm:
        assert isinstance(llm.model, ParallelModel)
        llm.model.tell(COPY_PAGE_COMMAND, 99, 0, 0)  # of a cache that no rank has
        with pytest.raises(GenerationError, match=r"tensor parallel: rank 1 ended \(KeyError: 99\)"):
            _until(time.monotonic() + 60, llm)


def test_ranks_end_with_the_process_that_started_them() -> None:
    code = f"""
import exl2nb as ex
llm = ex.load({str(QUANTISED)!r}, devices=["cpu", "cpu"], parallel="tensor", progress=None)
print(*[one.pid for one in llm.model.processes], flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        started = [int(word) for word in parent.stdout.readline().split()]
        assert started and all(map(alive, started))
        parent.kill()
    assert gone_within(started, 20)


# ---- on GPUs: with two ranks on one GPU where there is no second one


def gpus(count: int) -> list[str]:
    return [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize("path", [DEMO, QUANTISED], ids=["dense", "exl2"])
def test_ranks_on_gpus(path: Path) -> None:
    """The text of one GPU, the same one every time: captured steps of one request and of many, prompts, requests that the host draws."""
    if path == DEMO and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs, there is 1")
    prompts = ["The secret of life is", "It was a dark", "Once upon a time there was a king who had three sons. " * 8, "The"]
    penalised, structured = {"seed": 3, "top_k": 40, "presence_penalty": 0.5}, {"seed": 5, "regex": "[a-z ]{4,20}"}
    cases = ({"temperature": 0}, penalised, structured)

    def written(of: ex.LLM, texts: list[str], **options: Any) -> list[str]:
        of.cache.clear()  # a prompt of which pages are cached takes other kernels
        found = of.batch(texts, **options).run()
        return [found[number].text for number in range(len(texts))]

    with ex.load(path, device="cuda", progress=None) as whole, ex.load(path, devices=gpus(2), parallel="tensor", progress=None) as llm:
        for options in cases:
            texts = [written(of, prompts, max_tokens=12, **options) for of in (whole, llm, llm)]
            assert texts[1] == texts[2], "the same bits every time"
            assert sum(a[:12] == b[:12] for a, b in zip(texts[0], texts[1])) >= 3, "near ties may fall the other way"
        one, two = (written(llm, ["The old man"] * 20, max_tokens=4, seed=2) for _ in range(2))
        assert one == two, "one batch after the other: beside each other their steps would be of other sizes"
        several = list[list[str]]()
        for _ in range(2):
            llm.cache.clear()
            several.append([answer.text for answer in llm.generate(prompts[2], n=3, seed=1, max_tokens=8)])
        assert several[0] == several[1]
        assert llm.score("The old man").total == pytest.approx(whole.score("The old man").total, abs=0.05)
        assert "2 ranks on cuda" in repr(llm.model)


@pytest.mark.gpu
def test_a_killed_rank_on_a_gpu_ends_in_a_named_error() -> None:
    llm = ex.load(QUANTISED, devices=gpus(2), parallel="tensor", progress=None)
    [process] = [one.pid for one in llm.model.processes]
    llm.generate("It was", max_tokens=8)
    killed: list[float] = []
    threading.Timer(0.5, lambda: (killed.append(time.monotonic()), os.kill(process, signal.SIGKILL))).start()
    with pytest.raises(GenerationError, match=r"tensor parallel: rank 1 ended \(exit code -9\); close the model and load it again"):
        _until(time.monotonic() + 60, llm)
    assert time.monotonic() - killed[0] < 5
    with pytest.raises(GenerationError, match="rank 1 ended"):
        llm.generate("Again")
    llm.close()
    with ex.load(QUANTISED, device="cuda", progress=None) as again:
        assert again.generate("It was", max_tokens=2).finish_reason == "length"


def test_close_ends_the_ranks() -> None:
    llm = ex.load(QUANTISED, devices=["cpu"] * 2, parallel="tensor", progress=None)
    started = [one.pid for one in llm.model.processes]
    llm.close()
    assert gone_within(started, 10)


@pytest.mark.parametrize("devices", [None, "auto", ["cpu"], ["cpu", "cuda:1"], {"cpu": "rest"}])
def test_other_devices_are_refused_by_name(devices: object) -> None:
    with pytest.raises(OptionError, match="parallel='tensor' with devices="):
        ex.load(DEMO, devices=devices, parallel="tensor", progress=None)


def test_a_rank_that_cannot_load_says_why() -> None:
    with pytest.raises(OptionError, match="do not divide by 5"):
        ex.load(DEMO, devices=["cpu"] * 5, parallel="tensor", progress=None)

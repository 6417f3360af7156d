"""What a cell shows as its last line: every object a user holds has HTML without scripts and a plain twin, made without waiting."""

import re
from pathlib import Path

import numpy as np
import pytest

import exl2nb as ex
from exl2nb.converter.result import Conversion, QuantizedMatrix
from exl2nb.core.show import facts
from exl2nb.generator.request import MOST_TITLES, MOST_TOKENS, Completion, Timings, Token, TokenAlternative
from exl2nb.sampling.params import SamplingParams

QUANTISED = Path(__file__).parent / "data" / "demo-exl2-4.0bpw"
NASTY = "<script>alert(1)</script>"


def answer(count: int, text: str = " word") -> Completion:
    top = tuple(TokenAlternative(i, f"{text}{i}", -1.0, 0.3) for i in range(5))
    tokens = tuple(Token(1, text, -1.0, 0.3, 2, top) for _ in range(count))
    times = Timings(prompt_tokens=1, new_tokens=count, queue_s=0.0, first_token_s=0.1, prefill_s=0.1, decode_s=1.0)
    return Completion(text=text * count, tokens=tokens, finish_reason="length", timings=times, seed=1, prompt=NASTY)


def conversion(measurement) -> Conversion:
    """As `ex.convert` returns it, without a conversion."""
    plan = measurement.solve(bpw=4.0)
    matrices = tuple(
        QuantizedMatrix(c.key, c.role, c.layer, c.in_features, c.out_features, tuple(map(tuple, c.groups)), c.predicted_kl, 0.1)
        for c in plan.choices
    )
    return Conversion(
        path=Path(f"made/{NASTY}"), source=Path("demo_model"), target_bpw=4.0, bpw=plan.bpw, head_bits=6, nbytes=plan.nbytes,
        matrices=matrices, seconds={"quantize": 1.0}, calibration={}, resumed_layers=0, measurement=measurement,
    )  # fmt: skip


def everything(llm) -> dict:
    """What a user can have in hand, by name."""
    done = llm.generate("It was a dark night and a dark night and", max_tokens=12, top_logprobs=3, speculation="ngram", temperature=0)
    measurement = ex.demo_measurement()
    return {
        "model": llm,
        "config": llm.config,
        "cache": llm.cache,
        "pools": llm.engine.cache,
        "snapshot": llm.cache.snapshot(),
        "completion": done,
        "speculation": done.speculation,
        "score": llm.score("The old man went down to the sea."),
        "choice": llm.choose("The old man", [" sat", " xylophone"]),
        "comparison": ex.compare(llm, QUANTISED, rows=1, length=16, progress=None),
        "measurement": measurement,
        "conversion": conversion(measurement),
        "allocation": measurement.solve(bpw=4.0),
        "memory plan": ex.plan(QUANTISED),
        "inspection": ex.inspect(QUANTISED),
        "settings": SamplingParams(temperature=0.8, top_p=0.9, logit_bias={3: 1.0}, dry_multiplier=0.8, seed=5),
        "explanation": ex.sampling.explain(np.zeros(50, np.float32), top_k=5, seed=1),
        "nasty completion": answer(20, NASTY),
    }


@pytest.fixture(scope="module")
def held(llm):
    return everything(llm)


def test_everything_has_html_and_a_plain_twin(held):
    for name, thing in held.items():
        page, plain = thing._repr_html_(), repr(thing)
        assert page.lstrip().startswith("<"), name
        assert not re.search(r"<script|<style|javascript:|\son\w+\s*=|<img|<iframe", page, re.I), name
        assert page.count("<table") == page.count("</table>"), name
        assert page.count("<div") == page.count("</div>"), name
        assert plain and " object at 0x" not in plain, name
        assert len(plain) < 3000, name
        assert len(page) < 100_000, name


def test_settings_say_what_applies_in_which_order(held):
    settings = held["settings"]
    assert repr(settings) == "SamplingParams(temperature=0.8, top_p=0.9, dry_multiplier=0.8, logit_bias=((3, 1.0),), seed=5)"
    assert eval(repr(settings)) == settings
    names = re.findall(r"<th[^>]*>([^<]*)</th>", settings._repr_html_())
    assert names == ["seed", "dry", "logit_bias", "temperature", "top_p", "draw"]
    assert "greedy" in SamplingParams(temperature=0)._repr_html_()
    assert repr(SamplingParams()) == "SamplingParams()"


def test_config_and_cache_in_one_line(held):
    assert repr(held["config"]).startswith("ModelConfig(LlamaForCausalLM: 12 layers, hidden size 256, 4 heads of 64, 2 of them")
    page = held["cache"]._repr_html_()
    assert "4096 tokens in 16 pages, fp16" in page


def test_html_of_a_long_answer_is_bounded():
    long = answer(3 * MOST_TOKENS)
    page = long._repr_html_()
    assert page.count("<span title") == MOST_TOKENS
    assert page.count("word4") == MOST_TITLES
    assert re.sub(r"<[^>]*>", "", page).count(" word") >= 3 * MOST_TOKENS
    assert "&lt;script&gt;" in page


def test_facts_are_escaped():
    assert NASTY not in facts(NASTY, {NASTY: NASTY})
    assert facts("a", {"b": "c&d"}).count("c&amp;d") == 1


@pytest.mark.gpu
def test_no_representation_waits_for_the_gpu():
    import torch

    with ex.demo(progress=None, device="cuda") as llm:
        held = everything(llm)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for thing in held.values():
                assert thing._repr_html_() and repr(thing)
        finally:
            torch.cuda.set_sync_debug_mode("default")

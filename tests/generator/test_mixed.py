"""Thirty-two requests of every kind, together in a cache too small for them: each text is what the request gives alone."""

import random

import pytest

import exl2nb as ex
from exl2nb.core.errors import Exl2Error

STORY = "The old man went down to the harbour in the evening and looked at the boats that had come in with the tide. " * 10
LIST = "Apples, pears and plums; bread, salt and oil; a lamp, a rope and a knife. " * 11
KINDS = [
    {"temperature": 0},
    {"temperature": 0, "stop": [" the", "."]},
    {"temperature": 0, "repetition_penalty": 1.2, "top_logprobs": 3},
    {"seed": 1},
    {"seed": 2, "temperature": 0.8, "top_p": 0.9},
    {"seed": 3, "top_k": 40, "min_p": 0.05, "temperature": 1.3},
    {"seed": 4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"seed": 5, "mirostat": True},
    {"seed": 6, "typical_p": 0.9, "min_tokens": 5},
    {"seed": 7, "dry_multiplier": 0.8},
    {"temperature": 0, "banned_strings": [" the", " a"]},
    {"seed": 8, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"temperature": 0, "token_healing": True},
    {"temperature": 0, "speculation": "ngram"},
    {"seed": 9, "regex": "[a-z ]{5,20}\\."},
    {"temperature": 0, "schema": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}},
]


def told(completion):
    """Everything about the tokens but who guessed them: how many guesses are made depends on what steps take."""
    return [token._replace(source=token.source.replace("ngram", "target")) for token in completion.tokens]


def requests():
    made = []
    for i in range(32):
        begin = (STORY, LIST)[i % 2]
        made.append({"prompt": begin + f"Then number {i} said", "max_tokens": 6 + i % 5 * 4, **KINDS[i // 2]})
    return made


def test_together_as_alone():
    pytest.importorskip("llguidance")
    with ex.demo(progress=None, context=768, cache_tokens=2048) as llm:
        llm.cache.reuse = False
        alone = [llm.generate(one["prompt"], **{k: v for k, v in one.items() if k != "prompt"}) for one in requests()]
        llm.cache.reuse = True
        job = llm.batch(requests())
        together = job.run()
        assert not job.errors
        for i, one in enumerate(alone):
            assert together[i].text == one.text, KINDS[i // 2]
            assert told(together[i]) == told(one), KINDS[i // 2]
            assert together[i].finish_reason == one.finish_reason
        assert sum(one.timings.reused_tokens for one in together.values()) > 10 * 200
        assert llm.engine.pages.num_free == llm.engine.pages.num_pages


PROMPTS = ["It was", "The cat sat. The cat sat. The", "Once upon a time there lived " * 12, "x", "He said that the " * 30]
ANYTHING = {
    "temperature": [0, 0.5, 1.7], "top_k": [1, 5, 50], "top_p": [0.5, 0.95], "min_p": [0.05], "typical_p": [0.9], "tfs": [0.9],
    "stop": [".", [" the", ","], 264], "banned_strings": [" a", [" the", "was"]], "token_healing": [True], "top_logprobs": [3],
    "return_logits": [True], "repetition_penalty": [1.2], "presence_penalty": [0.5], "penalty_range": [20], "dry_multiplier": [0.8],
    "xtc_probability": [0.5], "mirostat": [True], "smoothing_factor": [0.3], "temperature_last": [True], "skew": [0.3],
    "logit_bias": [{264: 2.0}], "banned_tokens": [[13]], "allowed_tokens": [list(range(100, 900))], "negative_prompt": ["He"],
    "speculation": ["ngram", {"kind": "ngram", "adaptive": False}], "regex": ["[a-z ]{2,20}"], "choice": [[" yes", " no way"]],
    "schema": [{"type": "integer"}], "ignore_eos": [True], "min_tokens": [1], "priority": [-2, 2], "max_temp": [1.5], "top_a": [0.2],
    "cfg_scale": [1.4], "beams": [3],
}  # fmt: skip


def answer(ask):
    """What a request came to: its tokens and how it ended, or the kind of error."""
    try:
        done = ask()
    except Exl2Error as error:
        return type(error).__name__
    return done.text, told(done), done.finish_reason, done.stopped_by


@pytest.mark.filterwarnings("error")
def test_any_options_together_as_alone():
    """Options thrown together: what cannot be is a named error, alone and beside others; the rest gives the same tokens both ways."""
    pytest.importorskip("llguidance")
    chance, refused = random.Random(0), 0
    with ex.demo(progress=None, cache_tokens=2048, context=512) as llm:
        for _ in range(10):
            some = [
                (chance.choice(PROMPTS), {name: chance.choice(values) for name, values in ANYTHING.items() if chance.random() < 0.14})
                for _ in range(6)
            ]
            some = [(prompt, {"max_tokens": chance.randrange(1, 14), "seed": chance.randrange(5), **options}) for prompt, options in some]
            alone = [answer(lambda one=one: llm.generate(one[0], **one[1])) for one in some]
            handles = [answer_later(llm, *one) for one in some]
            for one, want, wait in zip(some, alone, handles):
                assert answer(wait) == want, one
            refused += sum(isinstance(one, str) for one in alone)
        assert 5 < refused < 50
        assert llm.engine.wait_idle(5)
        assert llm.engine.pages.num_free == llm.engine.pages.num_pages


def answer_later(llm, prompt, options):
    """Start a request now; what waits for it."""
    try:
        return llm.stream(prompt, **options).result
    except Exl2Error as error:
        raised = error

        def again():
            raise raised

        return again

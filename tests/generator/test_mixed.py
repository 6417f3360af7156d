"""Thirty-two requests of every kind, together in a cache too small for them: each text is what the request gives alone."""

import pytest

import exl2nb as ex

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

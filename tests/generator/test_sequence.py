"""Stop tokens, min_tokens, banned texts and token healing of one request, on a rule instead of a model."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2nb.core.errors import GenerationError
from exl2nb.generator.sequence import VocabularyIndex, heal_prompt

from . import fakes


def encode(text):
    return fakes.TOKENIZER.encode(text, add_special=False)


WORDS = [i for i in encode(" the old man and a sea of dark red water, said she. No! END\n\nof it")]


def wordy(ids):
    """Rows in which some thirty tokens of English are likely, so that stops and bans occur."""
    row = np.full(fakes.VOCAB, -30.0, np.float32)
    row[WORDS] = np.random.default_rng((ids[-1] * 7 + len(ids)) % 65537).normal(size=len(WORDS)) * 3
    return row


def script(*texts):
    """A rule that says these texts one after the other, each where the one before was refused: row i holds every version's token i."""
    lines = [encode(text) for text in texts]

    def rule(ids):
        row = np.full(fakes.VOCAB, -50.0, np.float32)
        new = ids[1:]
        for rank, line in enumerate(lines):
            if line[: len(new)] == list(new) and len(line) > len(new):
                row[line[len(new)]] = max(row[line[len(new)]], 10.0 - rank)
        return row

    return rule


# ---- stop


@pytest.mark.parametrize("size", [0, 3, 10])
def test_a_stop_token_ends_it_and_is_not_shown(size):
    free = fakes.complete([5], wordy, max_tokens=30, temperature=0)
    ids = fakes.ids(free)
    stop = ids[size]
    done = fakes.complete([5], wordy, max_tokens=30, temperature=0, stop=["zzz", stop])
    assert fakes.ids(done) == ids[: ids.index(stop)]
    assert (done.finish_reason, done.stopped_by) == ("stop", stop)
    assert done.timings.new_tokens == ids.index(stop) + 1


def test_the_stop_text_is_reported_and_withheld():
    done = fakes.complete([5], script("one two\n\nEND three"), max_tokens=30, temperature=0, stop=["\n\nEND", "four"])
    assert (done.text, done.finish_reason, done.stopped_by) == ("one two", "stop", "\n\nEND")
    assert "".join(t.text for t in done.withheld) == "\n\nEND"


@given(least=st.integers(0, 20), seed=st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_min_tokens(least, seed):
    """No end before: end-of-text and stop tokens cannot be drawn, stop texts do not count."""
    ends = [WORDS[seed % len(WORDS)], WORDS[(seed + 7) % len(WORDS)]]
    options = {"max_tokens": 25, "seed": seed, "stop": [*ends, "a", " sea"]}
    done = fakes.complete([5], wordy, min_tokens=least, **options)
    assert done.timings.new_tokens >= least
    ids = fakes.ids(done)
    assert not set(ids[:least]) & set(ends)
    if done.finish_reason == "stop" and isinstance(done.stopped_by, str):
        assert done.timings.new_tokens >= least
    if least == 0:
        assert not any(text in done.text for text in ("a", " sea"))


def test_min_tokens_holds_for_end_of_text():
    def rule(ids):
        row = wordy(ids)
        row[2] = 40.0
        return row

    done = fakes.complete([5], rule, max_tokens=20, min_tokens=6, seed=1, ignore_eos=False)
    assert (done.finish_reason, done.stopped_by, len(done.tokens)) == ("eos", 2, 6)


# ---- banned texts


def test_a_banned_text_rewinds_to_its_first_token():
    rule = script("I met a dark red man", "I met a old sea")
    done = fakes.complete([5], rule, max_tokens=len(encode("I met a old sea")), temperature=0, banned_strings=["DARK RED"])
    assert done.text == "I met a old sea"
    assert [(rewind.banned, rewind.text) for rewind in done.rewinds] == [("DARK RED", " dark red")]
    rule = script("I met a dark red man", "I met the dark red man", "I met sea and more of it all day")
    count = len(encode("I met a dark red man"))
    done = fakes.complete([5], rule, max_tokens=count, temperature=0, banned_strings=["a dark red", "the dark"])
    assert done.text.startswith("I met sea and")
    assert [rewind.banned for rewind in done.rewinds] == ["a dark red", "the dark"]
    assert any(t.source == "rewound" for t in done.tokens)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_banned_texts_never_appear(data):
    prompt = [data.draw(st.integers(3, 4000))]
    options = {"max_tokens": 30, "seed": data.draw(st.integers(0, 9)), "temperature": data.draw(st.sampled_from([0, 0.7, 1.0]))}
    free = fakes.complete(prompt, wordy, **options)
    cut = st.tuples(st.integers(0, max(0, len(free.text) - 1)), st.integers(2, 8)).map(lambda c: free.text[c[0] : c[0] + c[1]])
    banned = [text for text in data.draw(st.lists(cut, min_size=1, max_size=3)) if text.strip()]
    done = fakes.complete(prompt, wordy, banned_strings=banned, return_logits=True, **options)
    assert not any(text.lower() in done.text.lower() for text in banned)
    assert "".join(t.text for t in done.tokens) == done.text
    assert done.timings.new_tokens == 30
    assert fakes.TOKENIZER.decode(fakes.ids(done)) == done.text
    assert len(done.logits) == len(done.tokens)
    ids = prompt + fakes.ids(done)
    for n, token in enumerate(done.tokens):  # every token was judged by the row of what really stands before it
        row = wordy(ids[: n + 1])
        assert np.array_equal(done.logits[n], row)
        total = float(row.max()) + math.log(float(np.exp(row - row.max()).sum()))
        assert math.isclose(token.logprob, float(row[token.id]) - total, abs_tol=1e-4)
    again = fakes.complete(prompt, wordy, banned_strings=banned, return_logits=True, **options)
    assert again.tokens == done.tokens
    if not any(text.lower() in free.text.lower() for text in banned):
        assert done.tokens == free.tokens


def test_a_banned_text_is_never_streamed():
    rng = random.Random(0)
    for seed in range(20):
        free = fakes.complete([5], wordy, max_tokens=30, seed=seed).text
        at = rng.randrange(len(free) - 8)
        from exl2nb.generator.sequence import RunningRequest

        request = fakes.request([5], max_tokens=30, seed=seed, banned_strings=[free[at : at + 5]])
        sequence = RunningRequest(request, fakes.TOKENIZER, context=1000)
        done = fakes.run(sequence, wordy)
        shown = []
        while not sequence.channel.items.empty():
            shown += sequence.channel.items.get() or []
        assert tuple(shown) == done.tokens


def test_the_redraw_is_not_biased():
    """After a rewind the rest is drawn by its own probabilities: with the same random number the neighbour would get all of it."""
    a, b, c = sorted(encode(" a") + encode(" b") + encode(" c"))

    def rule(ids):
        row = np.full(fakes.VOCAB, -np.inf, np.float32)
        row[[a, b, c]] = 0.0
        return row

    banned = fakes.TOKENIZER.piece(b).strip()
    counts = {a: 0, c: 0}
    for seed in range(1000):
        done = fakes.complete([5], rule, max_tokens=1, seed=seed, banned_strings=[banned])
        counts[done.tokens[0].id] += 1
    assert abs(counts[a] - 500) < 80, counts


def test_a_ban_on_everything_is_an_error():
    with pytest.raises(GenerationError, match="no token is allowed at one position"):
        fakes.complete([5], script_only(" old"), max_tokens=3, temperature=0, banned_strings=["old"])


def script_only(text):
    ids = encode(text)

    def rule(_):
        row = np.full(fakes.VOCAB, -np.inf, np.float32)
        row[ids] = 1.0
        return row

    return rule


def test_a_stop_text_before_the_banned_end_wins():
    done = fakes.complete([5], script("one two three"), max_tokens=9, temperature=0, stop=["two"], banned_strings=["one two thr"])
    assert (done.text, done.rewinds) == ("one ", ())


# ---- healing


@given(text=st.text("abc :/.hte ", min_size=1, max_size=12), seed=st.integers(0, 5))
@settings(max_examples=80, deadline=None)
def test_a_healed_prompt_goes_on_where_it_ends(text, seed):
    prompt = fakes.TOKENIZER.encode("It" + text)
    shown = fakes.TOKENIZER.decode(prompt)
    done = fakes.complete(prompt, fakes.RULE, max_tokens=6, seed=seed, token_healing=True)
    healed = heal_prompt(prompt, fakes.TOKENIZER)
    if healed is None:
        assert done.timings.prompt_tokens == len(prompt)
        return
    first = done.tokens[0].id if done.tokens else None
    assert done.timings.prompt_tokens == len(prompt) - 1
    whole = fakes.TOKENIZER.decode([*healed.ids, *fakes.ids(done)])
    assert whole == shown + done.text
    assert first in healed.allowed
    assert VocabularyIndex.of(fakes.TOKENIZER).text(first).startswith(VocabularyIndex.of(fakes.TOKENIZER).text(prompt[-1]))


def test_healing_finds_the_longer_token():
    ids = encode(" wat")
    assert len(ids) == 1 or fakes.TOKENIZER.decode(ids[-1:])
    prompt = [*encode("The"), *ids]
    water = encode(" water")
    if len(water) == 1 and len(ids) == 1:
        assert water[0] in heal_prompt(prompt, fakes.TOKENIZER).allowed


def test_nothing_to_heal():
    assert heal_prompt([5], fakes.TOKENIZER) is None
    assert heal_prompt([5, 2], fakes.TOKENIZER) is None  # a special token
    assert heal_prompt([5, encode("🎉")[0]], fakes.TOKENIZER) is None  # the first byte of a character

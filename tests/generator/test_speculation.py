"""Speculation changes nothing but the speed: the tokens are those without it, however many draft tokens are right."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2nb.core.errors import OptionError
from exl2nb.generator.request import Request
from exl2nb.generator.speculation import MAX_DRAFT_TOKENS, AdaptiveLength, NgramProposer, Proposer, Speculation, StepTimes

from . import fakes


def small_rule(ids):
    """Few likely tokens, so that drawn tokens repeat and draft tokens are sometimes right."""
    row = np.full(fakes.VOCAB, -20.0, np.float32)
    row[3:11] = np.random.default_rng((ids[-1] * 31 + ids[-2]) % 1009).normal(size=8) * 2
    return row


SAMPLERS = [
    {"temperature": 0},
    {"seed": 3},
    {"seed": 4, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
    {"seed": 5, "top_k": 3, "min_p": 0.05, "min_tokens": 10, "stop": [5]},
]


@pytest.mark.parametrize("options", SAMPLERS)
@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
def test_any_quality_of_guesses_gives_the_same_text(options, right):
    prompt = [5, 6, 7, 8]
    plain = fakes.complete(prompt, small_rule, max_tokens=60, **options)
    guesser = fakes.FakeProposer(small_rule, right, seed=int(right * 10))
    for adaptive in (True, False):
        settings_ = Speculation(kind="ngram", adaptive=adaptive)
        guessed = fakes.complete(prompt, small_rule, max_tokens=60, guesser=guesser, speculation=settings_, **options)
        assert fakes.bare(guessed) == fakes.bare(plain)
        assert (guessed.text, guessed.finish_reason, guessed.stopped_by) == (plain.text, plain.finish_reason, plain.stopped_by)
        stats = guessed.speculation
        assert stats.accepted == sum(n * count for n, count in enumerate(stats.lengths)) <= stats.proposed
        assert sum(t.source == "ngram" for t in guessed.tokens) <= stats.accepted
        told, ids = stats.trail, fakes.ids(guessed)
        assert (len(told), sum(len(one.ids) for one in told)) == (stats.steps, stats.proposed)
        for one in told:  # what was accepted stands in the text, what was not does not
            stands = ids[one.at : one.at + one.accepted]  # a stop token is accepted and not shown
            assert list(one.ids[: len(stands)]) == stands
            if one.accepted < len(one.ids) and one.at + one.accepted < len(ids):
                assert one.ids[one.accepted] != ids[one.at + one.accepted]
        if right == 1.0 and options.get("temperature") == 0:
            assert stats.rate == 1.0
            assert stats.tokens_per_step > 4


@pytest.mark.parametrize("count", range(1, 20))
def test_the_full_length_is_produced(count):
    """The answer does not end early to leave space for draft tokens."""
    done = fakes.complete(
        [5, 6], fakes.RULE, max_tokens=count, temperature=0, guesser=fakes.FakeProposer(fakes.RULE, 1.0), speculation="ngram"
    )
    assert fakes.ids(done) == fakes.expected(fakes.FakeModel(), [5, 6], count)
    assert done.finish_reason == "length"


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_stop_banned_and_speculation_together(data):
    """Stops, bans and min_tokens with random draft tokens: the same answer, the same rewinds."""
    prompt = data.draw(st.lists(st.integers(3, 10), min_size=2, max_size=6))
    whole = fakes.complete(prompt, small_rule, max_tokens=40, seed=1).text
    cut = st.tuples(st.integers(0, max(0, len(whole) - 1)), st.integers(1, 4)).map(lambda c: whole[c[0] : c[0] + c[1]])
    texts = [t for t in data.draw(st.lists(cut, max_size=2)) if t]
    banned = [t for t in data.draw(st.lists(cut, max_size=2)) if len(t) > 1]
    options = {"max_tokens": 30, "seed": 1, "stop": texts, "banned_strings": banned, "min_tokens": data.draw(st.integers(0, 5))}
    plain = fakes.complete(prompt, small_rule, **options)
    guesser = fakes.FakeProposer(small_rule, data.draw(st.sampled_from([0.3, 0.8])), seed=2)
    guessed = fakes.complete(prompt, small_rule, guesser=guesser, speculation="ngram", rng=random.Random(1), **options)
    assert guessed.text == plain.text
    assert fakes.ids(guessed) == fakes.ids(plain)
    assert guessed.rewinds == plain.rewinds
    assert not any(text.lower() in plain.text.lower() for text in banned)


def test_drawn_tokens_follow_the_distribution_of_the_model():
    """Chi-square over a vocabulary of eight: 1200 seeds, second token, half of the draft tokens right."""
    counts, prompt = np.zeros(8), [5, 6]

    def rule(ids):
        return small_rule([len(ids), 6])  # by place alone, so that the second token has one known distribution

    guesser = fakes.FakeProposer(rule, 0.5)
    row = rule([0, 0, 0]).astype(np.float64)[3:11]
    wanted = np.exp(row - row.max())
    wanted *= 1200 / wanted.sum()
    for seed in range(1200):
        done = fakes.complete(prompt, rule, max_tokens=3, seed=seed, guesser=guesser, speculation=Speculation(kind="ngram", adaptive=False))
        counts[done.tokens[1].id - 3] += 1
    chi = ((counts - wanted) ** 2 / wanted).sum()
    assert chi < 24.3  # 7 degrees of freedom, 0.1 %


def test_ngram_finds_the_latest_and_longest():
    guesser = NgramProposer(1)
    assert guesser.propose([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 2) == [4, 9]
    assert NgramProposer(2).propose([1, 2, 3, 4, 5], 4) == []
    assert NgramProposer(2).propose([7, 7, 7], 4) == [7, 7, 7, 7]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_ngram_on_a_text_that_is_cut_back(data):
    """After any rewind it proposes tokens of the text, no more than asked for."""
    guesser, ids = NgramProposer(1), []
    for _ in range(data.draw(st.integers(1, 8))):
        ids = ids[: data.draw(st.integers(0, len(ids)))] + data.draw(st.lists(st.integers(0, 3), max_size=6))
        guess = guesser.propose(ids, 5)
        assert len(guess) <= 5
        assert set(guess) <= {0, 1, 2, 3}


def test_a_long_match_ends_a_rest_at_once():
    """The proposer looks once a step: a second look at the same text would find nothing."""
    proposer, phrase = Proposer.ngram(Speculation(kind="ngram")), list(range(100, 140))
    proposer.pace.rest = 5
    found = proposer.propose([*phrase, *phrase[:20]], 3)
    assert found
    assert found == phrase[20 : 20 + len(found)]
    assert proposer.pace.rest == 0


def test_a_long_prompt_is_read_piece_by_piece():
    ids, proposer = list(range(3000)), NgramProposer(2)
    ids += ids[:40]
    read = 0
    while (found := proposer.propose(ids, 3)) == [] and proposer.reading:
        read += 1
        assert read < 10
    assert read > 1
    assert found == [40, 41, 42]


def test_pace_follows_the_outcomes():
    times = StepTimes()
    good, bad = AdaptiveLength(Speculation(), times=times), AdaptiveLength(Speculation())
    assert good.length(100) == 1, "one row more is tried before many are"
    for rows in (1, 2, 4, 8):
        times.record(rows, 1.0 + 0.1 * rows)
    for _ in range(30):
        if n := good.length(100):
            good.record(n, n)
        n = bad.length(100)
        bad.record(n, 0)
    assert good.length(100) == MAX_DRAFT_TOKENS
    assert good.length(3) == 3
    assert good.length(0) == 0
    lengths = []
    for _ in range(40):
        lengths.append(bad.length(100))
        bad.record(lengths[-1], 0)
    assert set(lengths) == {0, 1}, "hopeless guesses are only tried now and then"
    assert bad.acceptance("draft").plain_steps > 30


def test_a_disturbed_first_step_does_not_end_the_trying():
    """The first step of two rows took 20 times as long; those after it count."""
    times = StepTimes()
    pace = AdaptiveLength(Speculation(), times=times)
    for _ in range(5):
        times.record(1, 0.01)
    times.record(2, 0.2)
    proposed = 0
    for _ in range(200):
        n = pace.length(100)
        pace.record(n, n)
        times.record(1 + n, 0.01 + 0.001 * n)
        proposed += n
    assert proposed > 500


def test_pace_follows_the_time_that_rows_take():
    """Rows that cost nothing: as many as there are; rows as dear as steps: none, however often they are right."""
    cheap, dear, steps = StepTimes(), StepTimes(), StepTimes()
    for rows in 6 * [*range(1, 9)]:  # a first time alone is not believed
        cheap.record(rows, 0.01)
        dear.record(rows, 0.01 if rows == 1 else 0.015 * rows)
        steps.record(rows, 0.01 if rows <= 4 else 0.03)
    for times, wanted in ((cheap, 7), (dear, 0), (steps, 3)):
        pace = AdaptiveLength(Speculation(), times=times)
        for _ in range(20):
            pace.record(2, 2)
        assert pace.length(100) == wanted
    likely = AdaptiveLength(Speculation(), times=cheap)
    assert likely.length(100) == likely.length(100, draft_s=lambda k: 0.0) > likely.length(100, draft_s=lambda k: 0.005 * k)


COSTS = {
    "rows for nothing": [1.0] * 8,
    "a GPU": [1.0 + 0.02 * r for r in range(8)],
    "half a step each": [1.0 + 0.5 * r for r in range(8)],
    "bound by arithmetic": [0.52, 0.82, 1.2, 1.53, 2.3, 3.0, 3.7, 4.37],
    "as dear as steps": [1.0 + r for r in range(8)],
}


def life(cost, right, watched, seed, tokens=400):
    """Speedup over decoding without draft tokens. right: acceptance rate of a token."""
    chance, times = random.Random(seed), StepTimes()
    pace = AdaptiveLength(Speculation(kind="ngram"), times=times, watched=watched)
    done, took = 0, 0.0
    while done < tokens:
        k = pace.length(tokens - done - 1)
        seconds = cost[k] * (1.0 + abs(chance.gauss(0, 0.05)))
        accepted = 0
        while accepted < k and chance.random() < right:
            accepted += 1
        if watched and not k:
            pace.observe(chance.random() < right)
        pace.record(k, accepted)
        times.record(1 + k, seconds)
        took, done = took + seconds, done + accepted + 1
    return done * cost[0] * 1.04 / took


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("name", COSTS)
def test_guessing_never_costs_more_than_it_brings(name, watched):
    """Whatever rows cost and however many draft tokens are right: as fast as without, or faster where that is possible."""
    cost = COSTS[name]
    for right in (0.0, 0.3, 0.6, 0.9, 0.97):
        found = sum(life(cost, right, watched, seed) for seed in range(8)) / 8
        possible = max((1 - right ** (k + 1)) / (1 - right) / cost[k] * cost[0] for k in range(8))
        assert found > max(0.97 if watched else 0.95, 0.9 * possible), (right, possible)


def test_guesses_that_were_not_made_are_compared_with_what_came():
    """A text that begins to repeat itself is noticed although nothing is proposed."""
    times = StepTimes()
    for rows in (1, 2, 4, 8):
        times.record(rows, 0.01 * (1 + 0.6 * (rows - 1)))
    guesses = Proposer.ngram(Speculation(kind="ngram", min_match=1), times)
    for _ in range(30):
        guesses.pace.observe(False)
    ids, made = [5, 6, 7, 8] * 3, 0
    for n in range(40):
        found = guesses.propose(ids, 100)
        made += len(found)
        guesses.verified(found, len(found), at=n, kept=len(ids))
        ids = [*ids, *found, [5, 6, 7, 8][(len(ids) + len(found)) % 4]]
    assert made > 20
    assert guesses.acceptance.rate == 1.0


def test_step_times():
    times = StepTimes()
    assert times.seconds(1) == 1.0 < times.seconds(2)
    times.record(1, 0.010)
    times.record(5, 0.018)
    assert times.seconds(3) == pytest.approx(0.014)
    assert 0.018 < times.seconds(8) < 0.03
    times.record(1, 10.0)
    assert times.seconds(1) == pytest.approx(0.012), "one disturbed step does not count for much"
    times.record(1, 0.012, 600)
    assert not times.knows(5), "long ago"


def test_acceptance_reads_well():
    pace = AdaptiveLength(Speculation(adaptive=False, max_tokens=2))
    for outcome in ((2, 2), (2, 0), (0, 0)):
        pace.record(*outcome)
    stats = pace.acceptance("ngram")
    assert (stats.rate, stats.lengths, stats.tokens_per_step) == (0.5, (1, 0, 1), 5 / 3)
    assert str(stats) == "ngram: 2 of 4 draft tokens accepted (50%), 1.67 tokens per step"
    assert "<table>" in stats._repr_html_()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("fast", "speculation is 'fast'; expected one of auto, draft, ngram, off"),
        ({"kind": "ngram", "max_tokens": 8}, "max_tokens is 8; expected a number from 1 to 7"),
        ({"kind": "ngram", "max_tokens": 2.5}, "expected an integer"),
        ({"kind": "ngram", "min_match": 17}, "min_match is 17; expected a number from 1 to 16"),
        ({"knd": 1}, "did you mean 'kind'"),
    ],
)
def test_bad_settings(value, words):
    with pytest.raises(OptionError, match=words):
        Request.of([1], where="test", speculation=value)


def test_max_match_is_ignored_with_a_warning():
    for make in (lambda: Speculation(min_match=5, max_match=4), lambda: Speculation.of({"min_match": 5, "max_match": 4})):
        with pytest.warns(DeprecationWarning, match="max_match is ignored"):
            assert make() == Speculation(min_match=5)


def test_forms_of_the_speculation_option():
    forms = {None: "off", False: "off", True: "auto", "ngram": "ngram", Speculation(kind="draft"): "draft"}
    assert [Speculation.of(form).kind for form in forms] == list(forms.values())


def test_it_sleeps_while_draft_tokens_do_not_pay(running):
    """A text that never repeats: few steps are thought about, all others run as without speculation; a copy wakes it."""
    model = fakes.FakeModel()
    engine = running(model)
    quiet = engine.submit(fakes.greedy([5, 6, 7], 300, speculation="ngram")).result(20)
    assert engine.stats().drafting_steps < 60
    assert fakes.ids(quiet) == fakes.expected(model, [5, 6, 7], 300)
    assert quiet.speculation.steps + quiet.speculation.plain_steps == 300 - quiet.speculation.accepted
    engine.step_times.seconds = lambda rows: 1.0 + 0.01 * rows
    turns = list(range(20, 60))
    model.logits_after = lambda ids: np.eye(1, fakes.VOCAB, 20 + len(ids) % 40 if len(ids) > 150 else len(ids) * 7 % 4000, np.float32)[0]
    copied = engine.submit(fakes.greedy(turns, 400, speculation="ngram")).result(20)
    assert copied.speculation.accepted > 150


def test_a_batch_in_which_nothing_can_pay_runs_as_without(running):
    """Its texts are not read, and its steps are launched ahead; a request alone, for which more rows cost little, copies as ever."""
    model = fakes.FakeModel()
    model.logits_after = lambda ids: np.eye(1, fakes.VOCAB, 20 + len(ids) % 40, np.float32)[0]
    engine = running(model, executor=lambda *args: fakes.DelayedExecutor(*args, stream=fakes.AtOnce()))
    ahead = []
    engine.step_times.seconds = float
    for kind in ("off", "ngram"):
        before = engine.loop.executor.ahead
        with fakes.held(engine):
            handles = [engine.submit(fakes.greedy([5, 6, n], 200, speculation=kind)) for n in range(7, 15)]
        found = [handle.result(20).speculation for handle in handles]
        assert engine.wait_idle(10)
        ahead.append(engine.loop.executor.ahead - before)
    assert sum(one.proposed for one in found) == 0
    assert ahead[1] >= ahead[0] - 8
    assert engine.stats().drafting_steps <= 8
    engine.step_times.seconds = lambda rows: 1.0 + 0.01 * rows
    assert engine.submit(fakes.greedy([5, 6, 7], 200, speculation="ngram")).result(20).speculation.accepted > 100


def test_requests_without_it_run_ahead_after_one_with_it(running):
    """Only steps with a sequence that speculates wait for the results of the step before."""
    model = fakes.FakeModel()
    engine = running(model, executor=lambda *args: fakes.DelayedExecutor(*args, stream=fakes.AtOnce()))
    ahead = []
    for kind in ("off", "ngram", "off"):
        before = engine.loop.executor.ahead
        done = engine.submit(fakes.greedy([5, 6, 7], 60, speculation=kind)).result(20)
        assert fakes.ids(done) == fakes.expected(model, [5, 6, 7], 60)
        assert engine.wait_idle(10)
        ahead.append(engine.loop.executor.ahead - before)
    assert ahead[0] == ahead[2] > ahead[1]


def test_an_earlier_request_is_looked_at(running):
    model = fakes.FakeModel()
    engine = running(model)
    engine.step_times.seconds = lambda rows: 1.0 + 0.01 * rows
    model.logits_after = lambda ids: np.eye(1, fakes.VOCAB, (int(ids[-1]) * 31 + 7) % 997 + 5, np.float32)[0]  # the same text, told again
    first, again, alone = (
        engine.submit(fakes.greedy([50], 120, speculation=Speculation(kind="ngram", earlier=earlier))).result(20)
        for earlier in (True, True, False)
    )
    assert fakes.ids(first) == fakes.ids(again) == fakes.ids(alone)
    assert again.speculation.accepted > 60
    assert again.speculation.accepted > first.speculation.accepted
    assert alone.speculation.accepted == first.speculation.accepted

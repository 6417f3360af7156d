"""A draft model: right where it agrees with the target, its cache right after every rejection; and the text never changes."""

import gc
import weakref

import numpy as np
import pytest

from exl2nb.core.errors import TokenizerError
from exl2nb.generator.draft import DraftModel, check_same_tokenizer
from exl2nb.generator.speculation import MAX_DRAFT_TOKENS, Speculation

from . import fakes


def rule(ids):
    """By the last tokens alone, few of them likely."""
    row = np.full(fakes.VOCAB, -20.0, np.float32)
    row[3:15] = np.random.default_rng((int(ids[-1]) * 31 + int(ids[-min(2, len(ids))]) * 7 + len(ids)) % 1009).normal(size=12) * 2
    return row


class Draft(fakes.FakeModel):
    """Right but for every `wrong`-th position, where it shifts the target's row."""

    def __init__(self, wrong: int = 0, vocab: int = fakes.VOCAB, step_s: float = 0.0):
        super().__init__(vocab=vocab, step_s=step_s)
        self.wrong = wrong

    def logits_after(self, ids):
        row = rule(ids)
        row = np.roll(row, 3) if self.wrong and len(ids) % self.wrong == 0 else row
        return row[: self.vocab] if self.vocab <= len(row) else np.concatenate([row, np.full(self.vocab - len(row), 50.0, np.float32)])


@pytest.fixture
def running(running):
    def make(draft=None, *, context=4096, draft_pages=16, executor=None, **options):
        model = fakes.FakeModel()
        model.logits_after = rule
        engine = running(model, **({"executor": fakes.DelayedExecutor} if options.get("on_device") else {}))
        if draft is not None:
            sizes = {"context": context, "vocab_size": fakes.VOCAB, "drawn": draft.vocab == fakes.VOCAB, "executor": executor, **options}
            engine.drafter = DraftModel(draft, fakes.spec(draft_pages), **sizes)
        return engine

    return make


def ask(engine, seed=None, count=60, prompt=(5, 6, 7), **options):
    options = {"temperature": 0, **options} if seed is None else {"seed": seed, **options}
    options.setdefault("speculation", Speculation(adaptive=False))
    return engine.submit(fakes.request(prompt, max_tokens=count, **options))


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("wrong", [0, 2, 5])
def test_text_and_acceptance(running, wrong, seed):
    plain = ask(running(), seed).result(20)
    done = ask(running(Draft(wrong)), seed, speculation=Speculation(kind="draft", adaptive=False, max_tokens=4)).result(20)
    assert fakes.bare(done) == fakes.bare(plain)
    stats = done.speculation
    assert stats.kind == "draft"
    if not wrong:  # the same rule and the same random numbers: every guess is right, if the draft's cache holds what it should
        assert stats.rate == 1.0
        assert (stats.steps, stats.plain_steps) == (12, 1)
        assert sum(token.source == "draft" for token in done.tokens) == stats.accepted == 47
    else:
        assert 0.1 < stats.rate < 1.0


def ahead(model, cache):
    """A device that draws by itself."""
    return fakes.DelayedExecutor(model, cache, lookahead=MAX_DRAFT_TOKENS, stream=fakes.AtOnce())


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("wrong", [0, 3])
@pytest.mark.parametrize("on_device", [True, False])
def test_rounds_on_a_device(running, wrong, seed, on_device):
    """Several sequences, which catch up after rejections and cross pages: each draft token is the one that a step by itself would give."""
    prompts = [tuple(range(3, 3 + length)) for length in (1, 3, 64, 240, 250, 256)]
    plain, waiting = running(), running(Draft(wrong))
    engine = running(Draft(wrong), executor=ahead, rounds=fakes.FakeRounds, on_device=on_device)
    always = Speculation(kind="draft", adaptive=False, max_tokens=5)
    found = []
    for one, more in ((plain, {"speculation": "off"}), (waiting, {"speculation": always}), (engine, {"speculation": always})):
        with fakes.held(one):  # all at once: the batches are the same each time
            handles = [ask(one, seed, prompt=prompt, **more) for prompt in prompts]
        found.append([handle.result(20) for handle in handles])
    wanted, slow, quick = found
    assert [fakes.bare(one) for one in quick] == [fakes.bare(one) for one in slow] == [fakes.bare(one) for one in wanted]
    accepted, others = ([one.speculation.accepted for one in some] for some in (quick, slow))
    assert wrong or all(one.speculation.rate == 1.0 for one in quick)
    assert abs(sum(accepted) - sum(others)) <= 2 * len(prompts), "but for where a round began: a prompt may find its pages in another's"
    rounds = engine.drafter.rounds
    assert rounds.rounds
    assert (rounds.followed > 0) is on_device
    engine.close()
    assert rounds.closed


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("wrong", [0, 2, 3, 7])
def test_rounds_begin_behind_the_step_that_verifies_the_last(running, wrong, seed):
    """Before the host knows what was accepted; a request alone has hardly another one."""
    engine = running(Draft(wrong), executor=ahead, rounds=fakes.FakeRounds, on_device=True)
    always = Speculation(kind="draft", adaptive=False, max_tokens=4)
    for prompt in ((5, 6, 7), tuple(range(3, 240))):  # the second one goes on to another page
        done = ask(engine, seed, 120, prompt=prompt, speculation=always).result(20)
        assert fakes.bare(done) == fakes.bare(ask(running(), seed, 120, prompt=prompt).result(20))
        assert wrong or done.speculation.rate == 1.0
    rounds = engine.drafter.rounds
    assert 4 <= len(rounds.rounds) - rounds.followed <= 12, "the first ones, the first of the second request, and those at the end"


def test_late_draft_tokens_of_steps_that_fail(running):
    """A step that cannot be launched is tried again, with draft tokens that the device made."""
    engine = running(Draft(), executor=ahead, rounds=fakes.FakeRounds, on_device=True)
    executor, tries = engine.loop.executor, []

    def launch(step, inner=executor.launch):
        if step.drafts is not None and len(tries) < 3:
            tries.append(step)
            raise ValueError("not now")
        return inner(step)

    executor.launch = launch
    always = Speculation(kind="draft", adaptive=False, max_tokens=5)
    with fakes.held(engine):  # a step that fails with one sequence alone ends it
        handles = [ask(engine, 3, prompt=(3, 4, n), speculation=always) for n in (5, 6)]
    done = [handle.result(20) for handle in handles]
    assert len(tries) == 3, tries
    assert [fakes.bare(one) for one in done] == [fakes.bare(ask(running(), 3, prompt=(3, 4, n)).result(20)) for n in (5, 6)]


def test_many_together_and_rewinds(running):
    engine, plain = running(Draft(7)), running()
    options = [
        {"seed": 1},
        {"seed": 2, "banned_strings": ["a"], "stop": ["the"]},
        {"seed": None, "repetition_penalty": 1.3},
        {"seed": 4, "speculation": "off"},
        {"seed": 5, "speculation": "ngram", "banned_strings": ["in"]},
        {"seed": 6, "prompt": tuple(range(3, 900))},
        {"seed": 7, "mirostat": True},
    ]
    wanted = [ask(plain, **{"count": 30, **one, "speculation": "off"}).result(20) for one in options]
    handles = [ask(engine, **{"count": 30, **one}) for one in options]
    got = [handle.result(20) for handle in handles]
    assert [fakes.bare(one) for one in got] == [fakes.bare(one) for one in wanted]
    assert [one.rewinds for one in got] == [one.rewinds for one in wanted]
    assert [None if one.speculation is None else one.speculation.kind for one in got] == [
        "draft", "draft", "draft", None, "ngram", "draft", "draft"
    ]  # fmt: skip


@pytest.mark.parametrize("vocab", [fakes.VOCAB - 32, fakes.VOCAB + 32])
def test_a_vocabulary_padded_otherwise(running, vocab):
    done = ask(running(Draft(vocab=vocab))).result(20)
    assert fakes.bare(done) == fakes.bare(ask(running()).result(20))
    assert done.speculation.rate == 1.0


def test_a_short_context_and_a_full_cache(running):
    plain = ask(running(), count=300, prompt=tuple(range(3, 303))).result(30)
    for options in ({"context": 310}, {"draft_pages": 1}):
        done = ask(running(Draft(), **options), count=300, prompt=tuple(range(3, 303))).result(30)
        assert fakes.bare(done) == fakes.bare(plain)


def test_pages_of_ended_requests_come_back(running):
    engine = running(Draft())
    for number in range(6):
        ask(engine, number, prompt=tuple(range(3, 300))).result(20)
        assert engine.wait_idle()
        assert engine.drafter.pages.num_free == 16


@pytest.mark.parametrize("on_device", [True, False])
def test_a_request_that_ends_in_the_middle_is_let_go(running, on_device):
    """Its pages, and the round that was launched behind its last step."""
    engine = running(Draft(step_s=0.02), executor=ahead, rounds=fakes.FakeRounds, on_device=on_device)
    asked = ask(engine, 3, 800, speculation=Speculation(kind="draft", adaptive=False, max_tokens=5))
    next(iter(asked))
    with fakes.held(engine):
        sequence = weakref.ref(engine.loop.scheduler.running[0])
        asked.cancel()
    assert engine.wait_idle()
    assert engine.drafter.pages.num_free == 16
    gc.collect()
    assert sequence() is None


def test_a_draft_that_fails_is_left_alone(running, caplog):
    draft = Draft()
    draft.fail_at = {2: ValueError("broken")}
    done = ask(running(draft)).result(20)
    assert fakes.bare(done) == fakes.bare(ask(running()).result(20))
    assert "generation goes on without speculation" in caplog.text


def test_hooks_see_draws_and_no_guesses(running):
    seen = []
    ask(running(Draft()), 3, count=20, post_sampling=lambda draw: seen.append(draw.index)).result(20)
    assert seen == list(range(20))


def test_another_tokenizer_is_named():
    mine = fakes.tokenizer()
    check_same_tokenizer(mine, fakes.tokenizer(), target_size=4096, draft_size=4096)
    other = fakes.tokenizer()
    other.backend.add_tokens(["xyzzy"])
    with pytest.raises(TokenizerError, match="token 4096 is 'xyzzy' there and None here; use a smaller model of the same family"):
        check_same_tokenizer(mine, other, target_size=4096, draft_size=4096)
    with pytest.raises(TokenizerError, match="the draft model's vocabulary has 100 entries and the tokenizer 4096"):
        check_same_tokenizer(mine, fakes.tokenizer(), target_size=4096, draft_size=100)


def test_rounds_that_cannot_be_captured(running):
    """They are drawn step by step, with the same text and the same draft tokens."""

    class NoRounds(fakes.FakeRounds):
        def launch(self, places, steps, began):
            self.prepared += 1

    engine = running(Draft(), executor=ahead, rounds=NoRounds, on_device=True)
    done = ask(engine, 3, speculation=Speculation(kind="draft", adaptive=False, max_tokens=5)).result(20)
    assert fakes.bare(done) == fakes.bare(ask(running(), 3).result(20))
    assert done.speculation.accepted == done.speculation.proposed > 40

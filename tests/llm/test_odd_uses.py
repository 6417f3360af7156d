"""What people do that nobody asked for: options of the wrong kind, functions that exit, models that are not kept."""

import gc
from pathlib import Path

import pytest

import exl2nb as ex
from exl2nb.core.errors import GenerationError, OptionError
from exl2nb.sampling.explanation import Explanation


@pytest.fixture(scope="module")
def llm():
    with ex.demo(progress=None) as made:
        yield made


@pytest.mark.parametrize(("error", "message"), [(SystemExit(3), "raised SystemExit: 3"), (RuntimeError("oops"), "oops")])
def test_a_function_that_exits_or_raises_ends_its_own_request(llm, error, message):
    def fail(draw):
        raise error

    other = llm.stream("It was", max_tokens=40, ignore_eos=True)
    with pytest.raises(GenerationError, match=message):
        llm.generate("He", max_tokens=4, post_sampling=fail)
    assert len(other.result().tokens) == 40


def test_a_function_that_wants_news_and_fails_is_not_called_again(llm):
    handle, calls = llm.stream("It was", max_tokens=20, ignore_eos=True), []

    def tell():
        calls.append(1)
        raise ZeroDivisionError

    handle.on_event(tell)
    assert len(handle.result().tokens) == 20
    assert len(calls) <= 1
    assert len(llm.generate("He", max_tokens=2).tokens) <= 2


def test_beams_and_healing_exclude_each_other(llm):
    with pytest.raises(OptionError, match=r"beams=4 and token_healing exclude each other"):
        llm.generate("The old m", token_healing=True, max_tokens=6, beams=4)


def test_beams_cut_short_say_so(llm):
    found = llm.generate("It was", beams=6, n=6, max_tokens=400, stop=["sky"], early_stopping="never", length_penalty=10.0, timeout_s=0.1)
    assert [one.finish_reason for one in found] == ["timeout"] * 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: ex.load(None), "the model is None; expected a directory, or a hub id"),
        (lambda llm: ex.plan(5), "the model is 5; expected a directory"),
        (lambda llm: ex.inspect(b""), "the model is b''; expected a directory"),
        (lambda llm: ex.compare(5, llm, "It was"), "the model is 5"),
        (lambda llm: llm.choose("The", 5), "choose: options is 5"),
        (lambda llm: llm.hidden("The", 5), "hidden: no point 5"),
        (lambda llm: llm.hidden("The", ["logits", b"x"]), "hidden: no point b'x'"),
        (lambda llm: llm.cache.save(5), "cache.save: path is 5; expected a path"),
        (lambda llm: llm.cache.load(5), "cache.load: path is 5; expected a path"),
        (lambda llm: llm.conversation().save(5), "Conversation.save: path is 5; expected a path"),
        (lambda llm: llm.load_conversation(5), "Conversation.load: path is 5; expected a path"),
        (lambda llm: llm.job().add("The", id=[1]), r"job: id is \[1\]; expected a text"),
        (lambda llm: llm.generate("The", speculation={"adaptive": "no"}), "adaptive is 'no'; expected True or False"),
    ],
)
def test_what_is_of_another_kind_is_named(call, message, llm):
    with pytest.raises(OptionError, match=message):
        call(llm)
    assert llm.generate("It was", max_tokens=2, ignore_eos=True).tokens


def test_explanations_are_not_kept(llm):
    def alive():
        gc.collect()
        return sum(type(one) is Explanation for one in gc.get_objects())

    before = alive()
    for at in range(5):
        llm.explain("It was", at=at, top_p=0.9)
    assert alive() <= before + 1


def test_what_is_explained_is_what_was_answered(llm):
    """A banned text is taken back; the tokens behind it are those of the answer."""
    options = {"temperature": 0, "banned_strings": [" a very"]}
    tokens = [token.text for token in llm.generate("It was", max_tokens=3, **options).tokens]
    plain = [token.text for token in llm.generate("It was", max_tokens=3, temperature=0).tokens]
    assert tokens != plain
    for at, text in enumerate(tokens):
        assert f"drew {text!r}" in str(llm.explain("It was", at=at, **options))


def test_explain_takes_what_generate_takes(llm):
    llm.explain("It was", negative_prompt="He", cfg_scale=2.0)
    with pytest.raises(OptionError, match="post_sampling is 5"):
        llm.explain("It was", post_sampling=5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stream": True}, r"unknown keyword 'stream'; to take tokens as they come: llm\.stream"),
        ({"where": 1}, "unknown keyword 'where'"),
        ({"prompt_ids": [1]}, "unknown keyword 'prompt_ids'"),
        ({"structure": 5}, "structure is 5; expected"),
        ({"negative_ids": "abc", "cfg_scale": 2.0}, "negative_ids is 'abc'; expected token ids"),
        ({"banned_tokens": None}, "banned_tokens is 'None'; expected"),
        ({"logit_bias": {1: 10**400}}, "logit_bias of token 1 is 1000"),
        ({"seed": 10**5000}, "seed is a int; expected"),
        ({"max_tokens": 10**5000}, "max_tokens is a int; expected"),
        ({"early_stopping": [1]}, r"early_stopping is \[1\]; expected"),
    ],
)
def test_options_of_the_wrong_kind_are_named(llm, options, text):
    with pytest.raises(OptionError, match=text):
        llm.generate("It was", **options)


def test_names_that_are_taken_are_refused(llm):
    with pytest.raises(OptionError, match="unknown keyword 'prompt'"):
        llm.batch(["a"], prompt="b")
    with pytest.raises(OptionError, match="template_options holds 'messages'"):
        llm.chat("a", template="x", template_options={"messages": 5})
    assert llm.chat("a", template="{{ x }}", template_options={"x": "It was"}, max_tokens=1).tokens
    with pytest.raises(OptionError, match="timeout_s is nan"):
        llm.stream("a", max_tokens=2).result(float("nan"))


def test_a_draft_that_nobody_else_keeps():
    with ex.demo(progress=None, draft=ex.demo(progress=None)) as llm:
        gc.collect()
        found = llm.generate("It was", max_tokens=30, temperature=0, speculation={"kind": "draft", "adaptive": False}).speculation
        assert found.accepted > 0


@pytest.mark.parametrize("options", [{"tfs": 0.9}, {"mirostat": True}, {"typical_p": 0.9}, {"top_a": 0.1}])
@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-40, 5e-324])
def test_almost_no_temperature_is_greedy(llm, temperature, options):
    want = llm.generate("It was", temperature=0, max_tokens=4).text
    assert llm.generate("It was", temperature=temperature, max_tokens=4, seed=1, **options).text == want


def test_plan_beyond_the_models_length():
    plan = ex.plan(Path(ex.__file__).parent / "demo_model", context=5000, free=8 << 30)
    assert "the model itself reads 1024 tokens at most; take context=1024" in plan.verdict()

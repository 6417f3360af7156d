"""Sampling defaults of a chat: what generation_config.json names, and what a request says instead."""

import asyncio
import inspect
import json
import pickle
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import exl2nb as ex
from exl2nb import LLM
from exl2nb.core.errors import OptionError
from exl2nb.llm.sampling_defaults import DEFAULTS_FILE, read_defaults, with_defaults
from exl2nb.sampling.defaults import CHAT_DEFAULTS, DEFAULT_NAMES, NEUTRAL_VALUES, NO_DEFAULTS, SamplingDefaults
from exl2nb.sampling.params import SamplingParams

DEMO = Path(ex.__file__).parent / "demo_model"
QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "bos_token_id": 1, "eos_token_id": [2]}
FROM_QWEN3 = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, source=DEFAULTS_FILE)
CHAT = {"template": "vicuna", "max_tokens": 6, "seed": 3}


def model_with(folder, config):
    """A copy of the demo model with this generation_config.json; None = without the file."""
    folder.mkdir(exist_ok=True)
    for path in DEMO.iterdir():
        if path.name != DEFAULTS_FILE:
            (folder / path.name).symlink_to(path)
    if config is not None:
        (folder / DEFAULTS_FILE).write_text(json.dumps({"eos_token_id": 2, **config}))
    return folder


def read(folder, config):
    (folder / DEFAULTS_FILE).write_text(config if isinstance(config, str) else json.dumps(config))
    return read_defaults(folder)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    with ex.load(model_with(tmp_path_factory.mktemp("models") / "qwen", QWEN3), progress=None) as llm:
        yield llm


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (QWEN3, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"temperature": 0.6}, {"temperature": 0.6}),  # only keys that are there, as in vLLM
        ({"top_p": 0.9, "temperature": None, "top_k": None, "do_sample": None}, {"top_p": 0.9}),
        ({"temperature": 1.0, "top_k": 50, "top_p": 1.0}, {"temperature": 1.0, "top_k": 50, "top_p": 1.0}),
        ({"min_p": 0.05, "repetition_penalty": 1.05}, {"min_p": 0.05, "repetition_penalty": 1.05}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": -1}, {"top_k": 0}),  # vLLM's "all"
        ({"do_sample": False}, {"temperature": 0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}, {"temperature": 0, "repetition_penalty": 1.1}),
        ({"do_sample": True, "temperature": 0, "top_k": 20}, {"temperature": 0}),
    ],
)
def test_what_the_file_names(tmp_path, config, values):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read(tmp_path, config)
    assert (found.values, found.source) == (values, DEFAULTS_FILE)


@pytest.mark.parametrize("config", [{}, {"do_sample": True}, {"eos_token_id": 2, "temperature": None, "max_new_tokens": 2048}, None])
def test_a_file_that_names_nothing(tmp_path, config):
    found = read_defaults(tmp_path) if config is None else read(tmp_path, config)
    assert found == CHAT_DEFAULTS
    assert str(found) == "temperature 0.7, top_p 0.95 (library default)"


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("temperature", -1, "temperature is -1; expected a number from 0 to 100"),
        ("temperature", "0.6", "temperature is '0.6'"),
        ("temperature", True, "temperature is True"),
        ("temperature", float("nan"), "temperature is nan"),
        ("temperature", [0.6], r"temperature is \[0.6\]"),
        ("top_p", 1.5, "top_p is 1.5; expected a number from 0 to 1"),
        ("top_p", 0, "top_p is 0; expected more than 0"),
        ("top_k", 20.5, "top_k is 20.5; expected an integer"),
        ("top_k", -2, "top_k is -2"),
        ("top_k", 2**40, "top_k is 1099511627776"),
        ("min_p", {}, "min_p is {}"),
        ("repetition_penalty", 0, "repetition_penalty is 0"),
        ("do_sample", "no", "do_sample is 'no'; expected true or false"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_and_ignored(tmp_path, key, value, told):
    with pytest.warns(RuntimeWarning, match=rf"generation_config\.json: {told}.*this key is ignored"):
        found = read(tmp_path, {"repetition_penalty": 1.1, key: value})
    assert found.values == ({"repetition_penalty": 1.1} if key != "repetition_penalty" else CHAT_DEFAULTS.values)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda one: st.lists(one, max_size=2))


@given(st.dictionaries(st.sampled_from([*DEFAULT_NAMES, "do_sample"]), JSON))
@settings(max_examples=300, deadline=None)
def test_no_file_breaks_a_chat(tmp_path_factory, config):
    folder = tmp_path_factory.getbasetemp() / "any_config"
    folder.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = read(folder, config)
    SamplingParams(**found.values)
    assert found.values
    assert str(found)


@pytest.mark.parametrize(
    ("options", "added"),
    [
        ({}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"temperature": 1.3}, {"top_p": 0.95, "top_k": 20}),  # the others still apply, as in vLLM
        ({"top_k": 0, "top_p": 1.0}, {"temperature": 0.6}),
        ({"temperature": 0}, {}),
        ({"beams": 4}, {}),
        ({"mirostat": True}, {}),
        ({"mirostat": False, "max_temp": 0.0}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"min_temp": 0.5, "max_temp": 1.5}, {"top_p": 0.95, "top_k": 20}),
        ({"order": ["min_p", "temperature"], "min_p": 0.1}, {"temperature": 0.6}),
        ({"temperature_last": True, "smoothing_factor": 0.3}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
    ],
)
def test_options_win(qwen, options, added):
    """An option that is given, or that excludes a default, wins without an error."""
    answer = qwen.chat("It was", **CHAT, **options)
    assert answer.sampling_defaults.values == added
    for name in DEFAULT_NAMES:
        wanted = options.get(name, added.get(name, 0 if name == "temperature" and "beams" in options else NEUTRAL_VALUES[name]))
        assert getattr(answer.sampling, name) == wanted, name


def test_a_penalty_stays_for_a_greedy_request():
    """As in vLLM; beam search refuses it."""
    defaults = SamplingDefaults(temperature=0.7, top_p=0.8, repetition_penalty=1.05, source=DEFAULTS_FILE)
    assert defaults.beside({"temperature": 0.0}).values == {"repetition_penalty": 1.05}
    assert defaults.beside({"mirostat": True}).values == {"repetition_penalty": 1.05}
    assert defaults.beside({"order": []}) == defaults.beside({"beams": 2}) == NO_DEFAULTS
    for invalid in ({"beams": "x"}, {"order": 5}, {"order": [[]]}, {"max_temp": None}, {"temperature": "a"}):
        defaults.beside(invalid)  # the request is what refuses them


def test_chat_samples_with_the_defaults(qwen):
    """The text is that of the same options given by hand, in every way to chat."""
    by_hand = qwen.chat("It was", **CHAT, temperature=0.6, top_p=0.95, top_k=20)
    answer = qwen.chat("It was", **CHAT)
    assert answer.text == by_hand.text
    assert "".join(chunk.text for chunk in qwen.chat("It was", stream=True, **CHAT)) == by_hand.text
    assert asyncio.run(qwen.achat("It was", **CHAT)).text == by_hand.text
    assert qwen.conversation(**CHAT).say("It was").content == by_hand.text
    assert by_hand.sampling == answer.sampling
    assert not by_hand.sampling_defaults
    assert answer.sampling_defaults == qwen.sampling_defaults == FROM_QWEN3
    neutral = dict.fromkeys(("temperature", "top_p"), 1.0) | {"top_k": 0}
    texts = {seed: qwen.chat("It was", **{**CHAT, **neutral, "seed": seed, "max_tokens": 20}).text for seed in range(3)}
    assert texts != {seed: qwen.chat("It was", **{**CHAT, "seed": seed, "max_tokens": 20}).text for seed in range(3)}


def test_generate_stays_at_temperature_1(qwen):
    prompt = qwen.render_chat("It was", template="vicuna")
    several = qwen.generate(prompt, n=2, max_tokens=2)
    for answer in (qwen.generate(prompt, max_tokens=2), qwen.stream(prompt, max_tokens=2).result(), *several):
        assert answer.sampling.changed.keys() <= {"seed"}
        assert not answer.sampling_defaults
        assert "temperature" not in repr(answer)
    assert inspect.signature(LLM.generate).parameters["temperature"].default == 1.0


def test_switched_off_for_a_call(qwen):
    answer = qwen.chat("It was", **CHAT, generation_config=False)
    assert answer.sampling_defaults == CHAT_DEFAULTS
    assert qwen.chat("It was", **CHAT, generation_config=False, top_p=0.5).sampling_defaults.values == {"temperature": 0.7}
    assert qwen.chat("It was", **CHAT, generation_config=True).sampling_defaults == FROM_QWEN3
    for call in (lambda: qwen.chat("It was", generation_config="no"), lambda: qwen.conversation(generation_config=0)):
        with pytest.raises(OptionError, match=r"generation_config is .*; expected True or False"):
            call()
    with pytest.raises(OptionError, match="unknown keyword 'generation_config'"):
        qwen.generate("It was", generation_config=False)


def test_switched_off_for_a_model(tmp_path):
    """The file is then not looked at: an invalid value gives no warning."""
    folder = model_with(tmp_path / "off", {**QWEN3, "min_p": "a"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with ex.load(folder, generation_config=False, progress=None) as llm:
            assert llm.sampling_defaults == llm.chat("It was", **CHAT).sampling_defaults == CHAT_DEFAULTS
    with pytest.warns(RuntimeWarning, match="min_p is 'a'") as told, ex.load(folder, progress=None) as llm:
        assert llm.sampling_defaults == FROM_QWEN3
    assert told[0].filename == __file__
    with pytest.raises(OptionError, match="load: generation_config is 1; expected True or False"):
        ex.load(folder, generation_config=1, progress=None)


def test_the_library_default(llm):
    """The demo model recommends nothing."""
    answer = llm.chat("It was", **CHAT)
    assert llm.sampling_defaults == answer.sampling_defaults == CHAT_DEFAULTS
    assert (answer.sampling.temperature, answer.sampling.top_p) == (0.7, 0.95)


def test_a_program_may_set_its_own(llm, monkeypatch):
    monkeypatch.setattr(llm, "sampling_defaults", SamplingDefaults(temperature=0.2))
    assert llm.chat("It was", **CHAT).sampling.temperature == 0.2
    assert llm.chat("It was", **CHAT, generation_config=False).sampling.temperature == 0.2
    with pytest.raises(OptionError, match="top_p is 2"):
        SamplingDefaults(top_p=2)
    with pytest.raises(OptionError, match="sampling_defaults is 5; expected SamplingDefaults"):
        llm.generate("It was", sampling_defaults=5)


def test_shown(qwen):
    """In the representations of the model and of its answers."""
    words = "temperature 0.6, top_p 0.95, top_k 20 from generation_config.json"
    answer = qwen.chat("It was", **CHAT)
    partly = qwen.chat("It was", **CHAT, temperature=0.25, top_k=5)
    for shown in (repr(qwen), qwen._repr_html_(), repr(answer), answer._repr_html_()):
        assert words in shown
    for shown in (repr(partly), partly._repr_html_()):
        assert "temperature 0.25, top_k 5 as given, top_p 0.95 from generation_config.json" in shown
    assert "generation_config" not in repr(qwen.chat("It was", **CHAT, generation_config=False))


def test_completions_can_be_pickled(qwen):
    answer = qwen.chat("It was", **CHAT, post_sampling=lambda draw: None)
    again = pickle.loads(pickle.dumps(answer))
    assert (again.sampling, again.sampling_defaults) == (answer.sampling, FROM_QWEN3)


def test_a_saved_conversation_takes_the_defaults_of_its_model(qwen, llm, tmp_path):
    """Only options that were given are saved."""
    path = tmp_path / "talk.json"
    talk = qwen.conversation(**CHAT, top_k=7)
    talk.say("It was")
    talk.save(path)
    assert json.loads(path.read_text())["options"] == {**CHAT, "top_k": 7}
    said = [model.load_conversation(path).say("And then", stream=True) for model in (qwen, llm)]
    of_qwen, of_demo = (one.handle.result() for one in said)
    assert of_qwen.sampling_defaults.values == {"temperature": 0.6, "top_p": 0.95}
    assert of_demo.sampling_defaults == CHAT_DEFAULTS
    off = qwen.conversation(**CHAT, generation_config=False)
    off.save(path)
    assert qwen.load_conversation(path).options["generation_config"] is False


def test_greedy_by_do_sample(tmp_path):
    with ex.load(model_with(tmp_path / "greedy", {"do_sample": False}), progress=None) as llm:
        assert llm.chat("It was", **CHAT).text == llm.chat("It was", **{**CHAT, "seed": 9}, temperature=0).text
        assert llm.chat("It was", **CHAT).sampling.greedy
        assert not llm.chat("It was", **CHAT, max_temp=1.5).sampling.greedy
        assert llm.chat("It was", **CHAT, temperature=0.9).sampling.temperature == 0.9


def test_speculation_does_not_change_the_text(qwen):
    options = {**CHAT, "max_tokens": 24}
    drafted = qwen.chat("It was", **options, speculation={"kind": "ngram", "adaptive": False})
    assert drafted.text == qwen.chat("It was", **options, speculation="off").text
    assert drafted.sampling_defaults == FROM_QWEN3


def test_other_defaults_for_raw_completions():
    """The server's /v1/completions takes the values of the file, and not those of the library."""
    assert with_defaults({}, CHAT_DEFAULTS, where="x", fallback=NO_DEFAULTS)["sampling_defaults"] == NO_DEFAULTS
    assert with_defaults({}, FROM_QWEN3, where="x", fallback=NO_DEFAULTS)["top_k"] == 20
    assert "top_k" not in with_defaults({"generation_config": False}, FROM_QWEN3, where="x", fallback=NO_DEFAULTS)

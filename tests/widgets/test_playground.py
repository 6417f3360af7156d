"""Playground without a page: threads, settings, results."""

import _thread
import threading
import time
from types import SimpleNamespace

import IPython.display
import pytest
from fakes import FakeModel

import exl2nb as ex
from exl2nb.core.errors import GenerationError, Interrupted, OptionError, OutOfPages
from exl2nb.sampling.defaults import SamplingDefaults
from exl2nb.widgets import Playground
from exl2nb.widgets.playground import TOP_TOKENS
from exl2nb.widgets.protocol import SAMPLER_FIELDS
from exl2nb.widgets.tokens import token_item
from tests.widgets.page import join_thread, tell


def test_start_returns_at_once_and_wait_gives_the_text(sent):
    gate = threading.Event()
    model = FakeModel(gate=gate)
    play = Playground(model, prompt="Once", max_tokens=5, temperature=0.5, seed=3)
    assert play.start() is play
    assert play.status == "running"
    gate.set()
    assert play.wait() == " w0 w1 w2 w3 w4"
    assert (play.text, play.status, play.n_tokens, play.finish_reason) == (" w0 w1 w2 w3 w4", "done", 5, "length")
    wanted = {"max_tokens": 5, "temperature": 0.5, "top_k": 0, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 3}
    assert model.asked == [("Once", wanted)]
    assert sent[0]["type"] == "snapshot"
    assert sent[-1]["type"] == "done"
    rows = [item for m in sent if m["type"] == "delta" for item in m["items"]]
    assert [row[:4] for row in rows] == [item[:4] for item in play.tokens]
    assert {row[4] for row in rows} == {None}, "alternatives wait until somebody looks"
    assert list(play.to_frame().columns) == ["text", "id", "prob", "rank", "top"]
    assert play.start("Twice").wait()
    assert model.asked[-1][0] == play.prompt == "Twice"


def test_stop_keeps_the_text_and_closes_the_stream(sent):
    gate = threading.Event()
    model = FakeModel(gate=gate)
    play = Playground(model, max_tokens=10_000)
    play.start()
    while not play.tokens:
        time.sleep(0.001)
    tell(play, {"type": "stop"})
    gate.set()
    text = play.wait()
    assert play.status == "stopped"
    assert text == play.text != ""
    assert play.n_tokens < 10_000
    assert model.closed == 1
    assert f"stopped after {play.n_tokens} token" in repr(play)
    assert play.start().stop() is None
    play.wait()


def test_stop_reaches_a_stream_that_is_silent():
    """A handle with `cancel` ends while the model still reads the prompt."""

    class Handle:
        def __init__(self):
            self.cancelled = threading.Event()

        def __iter__(self):
            assert self.cancelled.wait(5)
            return iter(())

        def cancel(self):
            self.cancelled.set()

    class Model:
        def stream(self, prompt, **settings):
            return Handle()

    play = Playground(Model()).start()
    time.sleep(0.05)
    play.stop()
    assert play.wait(5) == ""
    assert play.status == "stopped"


def test_stop_before_there_is_a_stream_cancels_it():
    """`stream` may take a while: Stop then finds nothing to cancel, and the run must not wait for the first token."""
    asked, go = threading.Event(), threading.Event()
    cancelled = threading.Event()

    class Handle:
        def __iter__(self):
            assert cancelled.wait(5)
            return iter(())

        def cancel(self):
            cancelled.set()

    class Model:
        def stream(self, prompt, **settings):
            asked.set()
            assert go.wait(5)
            return Handle()

    play = Playground(Model()).start()
    assert asked.wait(5)
    play.stop()
    go.set()
    assert play.wait(5) == ""
    assert play.status == "stopped"


def test_wait_with_a_timeout_returns_what_is_there():
    gate = threading.Event()
    play = Playground(FakeModel(gate=gate), max_tokens=3).start()
    assert play.wait(0.1) in ("", " w0")
    assert play.status == "running"
    gate.set()
    assert play.wait() == " w0 w1 w2"


def test_errors_show_in_the_widget_and_raise_in_wait():
    play = Playground(FakeModel(["a"], error=OutOfPages("request needs 12 pages, 7 free")))
    with pytest.raises(OutOfPages, match="12 pages"):
        play.start().wait()
    assert (play.status, play.error, play.text) == ("error", "OutOfPages: request needs 12 pages, 7 free", "a")
    play = Playground(FakeModel(["a"], error=ZeroDivisionError("x")))
    with pytest.raises(GenerationError, match="ZeroDivisionError: x"):
        play.start().wait()
    play.llm = FakeModel(["fine"])
    assert play.start().wait() == "fine"
    assert (play.status, play.error) == ("done", "")


def test_an_error_after_stop_is_no_error():
    gate = threading.Event()
    play = Playground(FakeModel(["a", "b"], gate=gate, error=Interrupted("cancelled"))).start()
    play.stop()
    gate.set()
    play.wait()
    assert play.status == "stopped"


def test_one_run_at_a_time():
    gate = threading.Event()
    play = Playground(FakeModel(gate=gate)).start()
    with pytest.raises(GenerationError, match="call .stop"):
        play.start()
    tell(play, {"type": "generate", "prompt": "x", "settings": play.settings})  # a double click is no error
    assert play.error == ""
    play.stop()
    gate.set()
    play.wait()


def test_generate_message_sets_prompt_and_settings():
    model = FakeModel()
    play = Playground(model)
    settings = {**play.settings, "max_tokens": 2, "top_k": 5, "seed": 1}
    tell(play, {"type": "generate", "prompt": "Hello", "settings": settings})
    assert play.wait() == " w0 w1"
    assert model.asked == [("Hello", settings)]
    assert play.top_k == 5


def test_every_sampler_is_a_keyword_and_only_those_that_do_something_are_sent():
    model = FakeModel()
    folded = {one["name"] for one in SAMPLER_FIELDS if not one["common"]}
    play = Playground(model, max_tokens=1, typical_p=0.9, mirostat=True, dry_multiplier=0.0, penalty_range=64)
    play.start().wait()
    changed = {"typical_p": 0.9, "mirostat": True, "penalty_range": 64}
    assert {name: value for name, value in model.asked[0][1].items() if name in folded} == changed
    tell(play, {"type": "generate", "prompt": "x", "settings": {**play.settings, "mirostat": False, "xtc_probability": 0.5}})
    play.wait()
    assert (play.mirostat, play.xtc_probability, "mirostat" in model.asked[1][1]) == (False, 0.5, False)
    with pytest.raises(OptionError, match="dynamic temperature"):
        Playground(model, max_temp=1.5, temperature=0.8)
    with pytest.raises(OptionError, match="did you mean 'typical_p'"):
        Playground(model, typicalp=0.5)


def test_the_controls_start_at_the_defaults_of_the_model(llm, monkeypatch):
    """Without any they start where `llm.chat` does; a keyword always wins, and one that excludes a default switches that off."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

    def start(model, **options):
        made = Playground(model, **options)
        values = tuple(getattr(made, name) for name in names)
        made.close()
        return values, made.get_state("_defaults")["_defaults"]

    library = (0.7, 0.95, 0, 0.0, 1.0), "temperature 0.7, top_p 0.95 (library default)"
    assert start(llm) == start(FakeModel()) == library
    assert start(None) == (library[0], "")
    recommended = SamplingDefaults(temperature=0.6, top_k=20, repetition_penalty=1.05, source="generation_config.json")
    monkeypatch.setattr(llm, "sampling_defaults", recommended)
    words = "temperature 0.6, top_k 20, repetition_penalty 1.05 from generation_config.json"
    assert start(llm) == ((0.6, 1.0, 20, 0.0, 1.05), words)
    assert start(llm, chat=True, template="x") == start(llm)
    assert start(llm, temperature=0, top_p=0.5)[0] == (0.0, 0.5, 20, 0.0, 1.05)
    assert start(llm, max_temp=1.5)[0] == (1.0, 1.0, 20, 0.0, 1.05)
    assert start(llm, mirostat=True)[0] == (1.0, 1.0, 0, 0.0, 1.05)


def test_the_engine_takes_them(llm):
    play = Playground(llm, prompt="It was", max_tokens=12, seed=4, dry_multiplier=0.8, xtc_probability=0.5, mirostat=True)
    assert play.start().wait() == llm.generate("It was", **play.settings).text
    plain = Playground(llm, prompt="It was", max_tokens=12, seed=4).start().wait()
    assert play.text != plain


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"prompt": "x"}, "no settings"),
        ({"prompt": "x", "settings": {"tfs": 0.0}}, "tfs is 0"),
        ({"prompt": 3, "settings": {}}, "no prompt"),
        ({"prompt": "x", "settings": {"top_q": 1}}, "did you mean"),
        ({"prompt": "x", "settings": {"top_p": 7}}, "top_p is 7"),
        ({"prompt": "x", "settings": {"max_tokens": "many"}}, "max_tokens"),
        ({"prompt": "x", "settings": {"max_tokens": 0}}, "max_tokens is 0"),
    ],
)
def test_a_bad_generate_message_is_answered_in_the_page(message, words):
    play = Playground(FakeModel())
    tell(play, {"type": "generate", **message})
    assert play.status == "error"
    assert words in play.error


def test_bad_options():
    with pytest.raises(OptionError, match="top_p is 0"):
        Playground(FakeModel(), top_p=0.0)
    with pytest.raises(OptionError, match="max_tokens is 0"):
        Playground(max_tokens=0)
    with pytest.raises(OptionError, match="llm is 'str'; expected a loaded model"):
        Playground("some/path")
    with pytest.raises(OptionError, match="no model is attached"):
        Playground().start()


def test_an_interrupt_in_wait_stops_the_run():
    def slow():
        for _ in range(2000):
            time.sleep(0.005)
            yield "a"

    play = Playground(FakeModel(slow()))
    play.start()
    threading.Timer(0.1, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        play.wait()
    assert play.status == "stopped"


def test_callbacks():
    words, ended = [], []
    play = Playground(FakeModel(["a", "b"]))
    play.on_token(lambda item: words.append(item.text))
    play.on_done(ended.append)
    play.start().wait()
    assert (words, ended) == (["a", "b"], [play])
    play.on_done(ended.append, remove=True)
    play.on_token(lambda item: 1 / 0)
    with pytest.raises(GenerationError, match="ZeroDivisionError"):
        play.start().wait()


def test_a_late_page_gets_everything(sent):
    play = Playground(FakeModel(["a", "b"]), prompt="p")
    play.start().wait()
    sent.clear()
    for kind in ("ready", "resync"):
        tell(play, {"type": kind})
    assert [(m["type"], [item.text for item in m["items"]], m["prompt"]) for m in sent] == [("snapshot", ["a", "b"], "p")] * 2


def test_alternatives_come_when_asked_for(sent):
    play = Playground(FakeModel(["a", "b"]))
    play.start().wait()
    run = sent[-1]["run"]
    for message in ({"run": run, "at": 1}, {"run": run, "at": 2}, {"run": run - 1, "at": 0}, {"run": run, "at": "x"}, {"at": True}, {}):
        tell(play, {"type": "look_at", **message})
    answers = [m for m in sent if m["type"] == "tops"]
    assert answers == [{"type": "tops", "run": run, "at": 1, "top": [(" other", 0.4), ("b", 0.25)]}]
    assert play.status == "done"


def test_an_engine_is_read_once_a_frame(sent, llm):
    """What an engine's thread writes waits for the next frame; speed and time to first token are those that the engine measured."""
    play = Playground(llm, prompt="It was", max_tokens=60, temperature=0.0)
    text = play.start().wait()
    answer = llm.generate("It was", top_logprobs=TOP_TOKENS, **play.settings)
    assert text == answer.text
    assert play.tokens == [token_item(token) for token in answer.tokens]
    deltas = [m for m in sent if m["type"] == "delta"]
    assert len(deltas) < 30
    assert sum(len(m["items"]) for m in deltas) == play.n_tokens == 60
    assert play.tokens_per_second > 0
    assert sent[-1]["stats"] == {"n": 60, "tps": play.tokens_per_second, "ttft_s": play.ttft_s}


def test_result_shows_a_finished_run():
    play = Playground(result={"prompt": "Once", "tokens": [[" upon", 1, 0.5, 1, []], [" a", 2, 0.01, 9, []]], "finish_reason": "eos"})
    assert (play.text, play.n_tokens, play.status, play.finish_reason) == (" upon a", 2, "done", "eos")
    html = play._repr_mimebundle_()[0]["text/html"]
    assert "Once" in html
    assert "rank 9" in html


def test_static_twin_follows_the_run(monkeypatch):
    published = []

    def publish(data, metadata, *, transient, update):
        published.append((data["text/html"], transient, update))

    shell = SimpleNamespace(kernel=None, display_pub=SimpleNamespace(publish=publish))
    shown = []
    monkeypatch.setattr(IPython.display, "publish_display_data", lambda data, metadata, transient=None: shown.append(transient))
    play = Playground(FakeModel(["some text"]))
    play._ipython_display_()
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    play.start().wait()
    assert published
    assert all("some text" in page for page, _, _ in published)
    assert all((transient, update) == (shown[-1], True) for _, transient, update in published)


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 5, "top_k": 40, "typical_p": 0.9, "presence_penalty": 0.5},
        {"temperature": 0.0},
        {"seed": 6, "mirostat": True, "top_p": 1.0},
    ],
)
def test_the_card_says_what_the_samplers_removed(sent, settings, llm):
    """The same chain, history and seed as generation: what was drawn is a survivor, and the counts are those of `llm.explain`."""
    play = Playground(llm, prompt="It was", max_tokens=12, **settings)
    play.start().wait()
    run, ids = sent[-1]["run"], [item.id for item in play.tokens]
    for at in (0, 1, 7, 11):
        own = llm.explain("It was", at=at, **{name: value for name, value in play.settings.items() if name != "max_tokens"})
        tell(play, {"type": "look_into", "run": run, "at": at})
        join_thread("playground's card")
        answer = sent[-1]
        assert (answer["type"], answer["run"], answer["at"]) == ("fates", run, at)
        assert own.token == ids[at]
        assert (answer["left"], answer["of"]) == (len(own.ids), own.steps[0].survivors)
        best = own.steps[0].best(TOP_TOKENS).tolist()
        assert [name == "" for name in answer["names"]] == [token in own.ids for token in best]
        removed = {token: step.name for step in own.steps for token in step.removed.tolist()}
        assert answer["names"] == [removed.get(token, "") for token in best]
        if ids[at] in best:
            assert answer["names"][best.index(ids[at])] == ""
    play.temperature = 2.0  # the card is about the run, not about the sliders
    tell(play, {"type": "look_into", "run": run, "at": 1})
    join_thread("playground's card")
    assert sent[-1] == next(m for m in sent if m["type"] == "fates" and m["at"] == 1)


def test_places_that_nothing_is_known_of_are_not_answered(sent):
    with ex.demo(progress=None) as llm:
        play = Playground(llm, prompt="It was", max_tokens=3)
        play.start().wait()
        run = sent[-1]["run"]
        for message in ({"run": run, "at": 3}, {"run": run + 1, "at": 0}, {"run": run, "at": "x"}, {"at": True}, {}):
            tell(play, {"type": "look_into", **message})
    tell(play, {"type": "look_into", "run": run, "at": 0})  # the model is closed by now
    join_thread("playground's card")
    fake = Playground(FakeModel(["a"]))
    fake.start().wait()
    tell(fake, {"type": "look_into", "run": sent[-1]["run"], "at": 0})
    assert [m for m in sent if m["type"] == "fates"] == []
    assert (play.status, play.error, fake.status) == ("done", "", "done")

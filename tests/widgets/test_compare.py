"""Compare's Python half: columns of every kind, order, KL, frames, errors, twin and export."""

import json
import threading
from pathlib import Path

import pytest
from fakes import FakeModel

import exl2nb as ex
from exl2nb.core.errors import EngineClosed, GenerationError, ModelNotFound, OptionError
from exl2nb.widgets import Compare, compare
from tests.widgets.page import state, tell

EXL2 = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
PROMPTS = ["It was a dark night, and", "She opened the letter and"]


@pytest.fixture(scope="module")
def finished(llm):
    return Compare({"16": llm, "4": EXL2, "dice": (llm, {"temperature": 0.9, "seed": 3})}, prompts=PROMPTS, max_tokens=10).start().wait()


def test_frame(finished, llm):
    frame = finished.to_dataframe()
    assert list(frame.column) == ["16", "4", "dice"] * 2
    assert list(frame.prompt) == [p for p in PROMPTS for _ in range(3)]
    assert list(frame.text[frame.column == "16"]) == [llm.generate(p, max_tokens=10, temperature=0).text for p in PROMPTS]
    assert list(frame.text[frame.column == "dice"]) == [llm.generate(p, max_tokens=10, temperature=0.9, seed=3).text for p in PROMPTS]
    assert (frame.kl_mean[frame.column != "4"] == 0).all()
    assert (frame.kl_mean[frame.column == "4"] > 0.001).all()
    assert frame.bpw.tolist()[:2] == [16.0, pytest.approx(4.0, abs=0.1)]
    assert frame.finish_reason.iloc[0] == "length"
    assert (frame.tokens_per_second > 0).all()


def test_speed_is_the_engines(monkeypatch, llm):
    monkeypatch.setattr(compare.StreamWatch, "per_second", property(lambda _: -1.0))  # of whoever takes the tokens, late perhaps
    run = Compare({"one": llm, "two": (llm, {"temperature": 0.9})}, prompts=["It was"], max_tokens=6).start().wait()
    assert (run.to_dataframe().tokens_per_second > 0).all()


def test_kl_is_that_of_the_answer_itself(finished, llm):
    tokens = finished.to_token_frame()
    mine = tokens[(tokens.column == "4") & (tokens.prompt == PROMPTS[0])]
    start = llm.tokenizer.encode(PROMPTS[0])
    found = ex.compare(llm, EXL2, [*start, *mine.id.tolist()])
    assert mine.kl.tolist() == pytest.approx(found.kl[0, len(start) - 1 : -1].tolist(), rel=1e-4)
    assert mine.reference_prob.tolist() == pytest.approx(found.reference_logprob[0, len(start) - 1 :].exp().tolist(), abs=1e-5)


def test_first_difference_is_where_the_texts_part(finished):
    for answers in finished.answers:
        first = "".join(t.text for t in answers[0])
        frame = finished.to_frame()
        for column, tokens in enumerate(answers):
            differs = frame.first_difference[finished.answers.index(answers) * 3 + column]
            same = "".join(t.text for t in tokens[: len(tokens) if differs != differs else int(differs)])
            assert first.startswith(same)
            if differs == differs and differs < len(tokens):
                assert not first.startswith(same + tokens[int(differs)].text)


def test_a_directory_is_loaded_for_its_turn_and_freed(llm, monkeypatch):
    from exl2nb.llm.load import load

    opened = []
    monkeypatch.setattr(ex, "load", lambda path, **options: opened.append(load(path, **options)) or opened[-1])
    compare = Compare([EXL2, llm, EXL2], prompts=PROMPTS[:1], max_tokens=2)
    assert [one.label for one in compare.entrants] == ["demo-exl2-4.0bpw", "demo_model", "demo-exl2-4.0bpw (2)"]
    compare.start().wait()
    assert [one.engine.closed for one in opened] == [True, True]
    assert not llm.engine.closed
    compare.close()
    assert llm.generate("It was", max_tokens=1).tokens


def test_anything_that_streams_is_compared_by_its_text():
    compare = Compare({"a": FakeModel([" one", " two"]), "b": FakeModel([" one", " three"]), "c": FakeModel([" one"])}, prompts=["p"])
    frame = compare.start().wait().to_frame()
    assert frame.first_difference.tolist()[1:] == [1, 1]
    assert frame.kl_mean.isna().all()


def test_another_vocabulary_says_why_there_is_no_kl(llm, monkeypatch):
    def refuse(*_, **__):
        raise OptionError("compare: vocabulary of other is 7")

    monkeypatch.setattr(ex, "compare", refuse)
    compare = Compare({"a": llm, "b": (llm, {})}, prompts=["It was"], max_tokens=2).start().wait()
    assert compare.status == "done" and "No KL for b: compare: vocabulary" in state(compare, "_note")


def test_messages_stop_and_errors(llm, sent, tmp_path):
    gate = threading.Event()
    slow = Compare({"a": FakeModel(gate=gate), "b": FakeModel()}, prompts=["p", "q"], max_tokens=50).start()
    with pytest.raises(GenerationError, match="a run is in progress"):
        slow.start()
    tell(slow, {"type": "run", "prompts": ["x"]})
    assert state(slow, "_run_prompts") == ["p", "q"], "a second click is ignored"
    tell(slow, {"type": "stop"})
    gate.set()
    slow.wait(10)
    assert slow.status == "stopped" and 0 < len(state(slow, "_tokens")) < 50
    for bad in ({"prompts": "x"}, {"prompts": [1]}, {"prompts": []}, {"prompts": [" "]}):
        tell(slow, {"type": "run", **bad})
        assert slow.status == "error"
    gone = Compare({"a": llm, "b": str(tmp_path / "nothing")}, prompts=["It was"], max_tokens=2).start()
    with pytest.raises(ModelNotFound):
        gone.wait()
    assert gone.status == "error" and len(gone.answers[0][0]) == 2, "what is written stays"


def test_a_closed_model():
    llm = ex.demo(progress=None)
    compare = Compare(llm, prompts=["It was"], max_tokens=2).start().wait()
    llm.close()
    with pytest.raises(EngineClosed):
        compare.start().wait()
    assert "closed" in compare.error


@pytest.mark.parametrize(
    "bad",
    [{"models": {}}, {"models": [3]}, {"models": {"a": (FakeModel(), 3)}}, {"models": [FakeModel()] * 9}, {"prompts": []},
     {"prompts": [""]},
     {"prompts": ["p"] * 21}, {"max_tokens": 0}, {"max_token": 3}, {"models": {"a": (FakeModel(), {"temprature": 1})}}, {"result": 3},
     {"result": {"tokens": [[9, "a", 1, None, None, None, None, None]]}}, {"result": {"columns": [[1]]}}, {"view": "none"}],
)  # fmt: skip
def test_bad_options(bad):
    with pytest.raises((OptionError, TypeError)):
        Compare(**bad)


def test_misspelt_keywords_are_named():
    with pytest.raises(OptionError, match="did you mean 'prompts'"):
        Compare(promts=["a"])
    with pytest.raises(OptionError, match="did you mean 'temperature'"):
        Compare({"a": (FakeModel(), {"temprature": 1})})


def test_recorded_twin_and_export(finished):
    data = json.loads(json.dumps(finished.to_dict()))
    again = Compare(result=data)
    assert again.to_frame().equals(finished.to_frame())
    assert again.to_dict() == finished.to_dict()
    bundle, _ = again._repr_mimebundle_()
    assert bundle["text/plain"].startswith("Compare(done, 2 prompts: 16 KL 0, 4 KL")
    assert "first difference" in bundle["text/html"]
    assert len(again.to_html()) < 200_000
    with pytest.raises(OptionError, match="no model is attached"):
        again.start()

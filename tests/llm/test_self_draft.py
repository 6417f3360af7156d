"""draft="self": the copy is made once, drafts, and changes no text."""

import os
import shutil
from pathlib import Path

import pytest

import exl2nb as ex
from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.core.errors import OptionError
from exl2nb.llm import self_draft
from tests.converter.test_conversion_job import OPTIONS, write_model

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """An empty folder of copies; small conversions, at 4 bits, which a model of this size reaches."""
    monkeypatch.setenv("EXL2NB_DRAFTS", str(tmp_path / "drafts"))
    monkeypatch.setattr(self_draft, "DRAFT_BPW", 4.0)
    whole = ConversionJob.__init__
    monkeypatch.setattr(ConversionJob, "__init__", lambda self, *args, **more: whole(self, *args, **{**more, **OPTIONS}))
    return tmp_path / "drafts"


def test_made_once_and_the_same_text(kept, tmp_path, monkeypatch):
    folder, options = write_model(tmp_path / "tiny"), {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with ex.load(folder, device="cpu", draft="self", progress=None) as llm:
        plain = llm.generate([3, 4, 5], speculation="off", **options)
        guessed = llm.generate([3, 4, 5], speculation={"kind": "draft", "adaptive": False}, **options)
    assert [token.id for token in guessed.tokens] == [token.id for token in plain.tokens]
    assert guessed.speculation.kind == "draft"
    assert guessed.speculation.rate > 0.1, "it resembles the model; one of 97 tokens would be right by chance"
    (copy,) = [one for one in kept.iterdir() if not one.name.startswith(".")]
    assert abs(ex.inspect(copy).decoder_bpw - 4.0) < 0.3
    monkeypatch.setattr(ConversionJob, "run", lambda self, sink=None: pytest.fail("it is there already"))
    assert self_draft.copy_of(folder, device="cpu", progress=None) == copy


def test_other_weights_have_another_copy(kept, tmp_path):
    folder = write_model(tmp_path / "tiny")
    first = self_draft.copy_of(folder, device="cpu", progress=None)
    file = folder / "model.safetensors"
    os.utime(file, ns=(0, 10**18))
    assert self_draft.copy_of(folder, device="cpu", progress=None) != first
    shutil.rmtree(kept)
    assert self_draft.copy_of(folder, device="cpu", progress=None).is_dir()


def test_a_quantised_model_is_told_what_to_do(kept):
    with pytest.raises(OptionError, match=r"draft is 'self' and demo-exl2-4.0bpw is quantised already; convert the model it was made from"):
        ex.load(DATA / "demo-exl2-4.0bpw", device="cpu", draft="self", progress=None)
    assert not any(kept.rglob("*.safetensors"))

"""The script that trains a small model that sees: its pictures, its questions, and a few steps of it."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import exl2nb as ex

SCRIPT = Path(__file__).parents[3] / "tools" / "train_seeing_model.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_seeing_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # its dataclass looks its module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_pictures_and_answers_come_from_the_seed(script):
    first, again, other = (script.examples(40, seed) for seed in (1, 1, 2))
    assert all(a[1:] == b[1:] and np.array_equal(a[0], b[0]) for a, b in zip(first, again))
    assert any(a[1:] != b[1:] for a, b in zip(first, other))
    assert {picture.size for picture, _, _ in first} == {(48, 48)}
    answers = " ".join(answer for _, _, answer in script.examples(400, 3))
    assert all(word in answers for word in (*script.COLOURS, *script.SHAPES, "Yes", "No", "digit", "three", "bottom left"))


def test_a_thing_is_painted_in_its_colour_and_place(script):
    picture = script.PIL.Image.new("RGB", (48, 48), "white")
    thing = script.Thing("square", "red", 8)
    script.paint(script.PIL.ImageDraw.Draw(picture), thing, 40, 40, 6)
    assert picture.getpixel((40, 40)) == script.COLOURS["red"]
    assert picture.getpixel((8, 8)) == (255, 255, 255)
    assert thing.place == "bottom right"
    assert thing.words == "a red square"


@pytest.mark.slow
@pytest.mark.cpu
def test_a_few_steps_make_a_model_that_loads(script, tmp_path, capsys):
    script.main([str(tmp_path), "--steps", "2", "--batch", "4", "--pictures", "20", "--test", "4", "--device", "cpu"])
    assert "are right to the letter" in (tmp_path / "README.md").read_text()
    with ex.load(tmp_path, device="cpu", progress=None) as llm:
        picture, question, _ = script.examples(1, 7)[0]
        assert llm.chat([{"role": "user", "content": [picture, question]}], max_tokens=2).timings.prompt_tokens > 64

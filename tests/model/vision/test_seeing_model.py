"""The script that trains the small model that sees: its pictures, its questions, and a few steps of it."""

import importlib.util
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import exl2nb as ex
from exl2nb.io.hub import packaged

SCRIPT = Path(__file__).parents[3] / "tools" / "train_seeing_model.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_seeing_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks its module up
    sys.path.insert(0, str(SCRIPT.parent))  # and so do its worker processes
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))
    del sys.modules[spec.name]


def test_pictures_and_answers_come_from_the_seed(script):
    first, again, other = (list(script.held_out(40, seed)) for seed in (1, 1, 2))
    assert all(a[1:] == b[1:] and np.array_equal(a[0], b[0]) for a, b in zip(first, again))
    assert any(a[1:] != b[1:] for a, b in zip(first, other))
    assert {picture.size for picture, *_ in first} == {(192, 192)}
    more = list(script.held_out(300, 3))
    answers = " ".join(answer for _, _, answer, _ in more)
    assert all(word in answers for word in (*script.COLOURS, *script.SHAPES, "Yes", "No", "digit", "three", "bottom left", "nothing"))
    assert {kind for *_, kind in more} == set(script.KINDS)


def test_a_thing_is_painted_in_its_colour_and_place(script):
    picture = script.PIL.Image.new("RGB", (192, 192), "white")
    thing = script.Thing("square", "red", 8)
    script.paint(script.PIL.ImageDraw.Draw(picture), thing, 160, 160, 20, random.Random(1))
    assert max(abs(a - b) for a, b in zip(picture.getpixel((160, 160)), script.COLOURS["red"])) <= 12
    assert picture.getpixel((32, 32)) == (255, 255, 255)
    assert (thing.place, thing.words) == ("bottom right", "a red square")


def test_answers_say_what_is_drawn(script):
    scene = script.Scene((script.Thing("ring", "orange", 0), script.Thing("digit 4", "red", 5)), "grey")
    say = {kind: {script.question(scene, kind, random.Random(seed)) for seed in range(60)} for kind in script.KINDS}
    assert ("Where is the digit 4?", "The digit 4 is in the middle right.") in say["where"]
    assert ("What is in the top left?", "There is an orange ring in the top left.") in say["what"]
    assert {answer for _, answer in say["count"]} == {"There are two things."}
    assert ("How many rings are there?", "There is one ring.") in say["count some"]
    assert ("Is there a red ring?", "No, there is no red ring.") in say["is there"]
    assert {answer for _, answer in say["digit"]} == {"I see the digit 4."}
    assert ("Is the ring left of the digit 4?", "Yes, the ring is left of the digit 4.") in say["beside"]
    assert {answer for _, answer in say["background"]} == {"The background is grey."}
    assert {answer for _, answer in say["describe"]} == {"I see an orange ring in the top left, a red digit 4 in the middle right."}


def test_a_conversation_is_written_as_the_template_has_it(script):
    tokenizer, rows = script.tokenizer_of(), script.Rows.empty(8)
    writer = script.Writer(tokenizer)
    for n in range(8):
        writer.conversation(rows, n, random.Random(n), None)
    for n in range(8):
        text = tokenizer.decode(rows.ids[n].tolist(), skip_special_tokens=False)
        assert text.startswith("<s><|user|>")
        assert text.count("<image>") % script.TOKENS == 0
        assert ((rows.seen[n] >= 0) == (rows.ids[n] == script.IMAGE)).all()
        said = tokenizer.decode(rows.labels[n][rows.labels[n] >= 0].tolist(), skip_special_tokens=False)
        assert all(part in text for part in said.split("</s>"))
        assert "<|user|>" not in said


def test_training_computes_what_exl2nb_runs(script, tmp_path):
    """Logits of a question about a picture, by the training's forward pass and by the model that it writes."""
    from transformers import LlavaForConditionalGeneration

    tokenizer, rows = script.tokenizer_of(), script.Rows.empty(1)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(script.config_of(512, "small"))
    script.write(model, tokenizer, tmp_path)
    picture, asks, answer, _ = next(script.held_out(1, 3))
    rows.ids[0, 0] = script.SPECIAL.index("<s>")
    script.Writer(tokenizer).turn(rows, 0, 1, asks, answer, 0)
    rows.pixels[0, 0] = np.asarray(picture.resize((script.SIDE, script.SIDE), 3))
    ids, _, seen, pixels, _ = rows.tensors("cpu")
    with torch.inference_mode():
        want = script.logits_of(model, ids, seen, pixels)[0]
    with ex.load(tmp_path, device="cpu", progress=None) as llm:
        got = llm.trace([{"role": "user", "content": [picture, asks]}], "logits").logits
    assert len(got) > script.TOKENS
    assert float((got - want[: len(got)]).abs().max()) < 0.02 * float(want.std())


def test_the_packaged_model_answers_about_pictures_it_never_saw(script):
    """To the letter, as its card says; and not without looking: about another picture it says something else."""
    found = script.measure(packaged("demo:seeing"), 60, seed=5)
    assert sum(good for good, _ in found.values()) >= 48, found
    asked = list(script.held_out(30, 6))
    with ex.demo("seeing", device="cpu", progress=None) as llm:
        blind = [llm.chat([{"role": "user", "content": [asked[i - 1][0], asked[i][1]]}], stream=True, temperature=0) for i in range(30)]
        assert sum(handle.result().text.strip() == answer for handle, (_, _, answer, _) in zip(blind, asked)) <= 18


def test_what_the_tower_gets_is_asked_of_any_picture():
    """An array, a PIL image or an `ex.Image`: how many tokens, which patches, what remains of it."""
    with ex.demo("seeing", device="cpu", progress=None) as llm:
        array = np.zeros((50, 80, 3), np.uint8)
        for picture in (array, ex.Image(array), ex.Image(array).frames[0]):
            assert llm.vision.tokens(picture) == 36 and llm.vision.grid(picture) == (1, 6, 6)
            assert llm.vision.seen(picture).size == (72, 72)
        assert repr(llm.vision) == f"VisionEncoder(3 layers of 128, patches of 12 pixels, {llm.vision.weight_bytes / 2**20:.1f} MiB on cpu)"


def test_the_packaged_model_is_small_and_has_a_card():
    folder = packaged("demo:seeing")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8e6
    card = (folder / "README.md").read_text()
    assert "right to the letter" in card and re.search(r"\| all \| \d+\.\d% \| \d+\.\d% \| \d{4} \|", card)


@pytest.mark.slow
@pytest.mark.cpu
def test_a_few_steps_make_a_model_that_loads(script, tmp_path, capsys):
    options = ["--size", "small", "--steps", "2", "--tower", "2", "--batch", "4", "--kept", "16", "--test", "10", "--workers", "1"]
    made = tmp_path / "made"
    script.main(["train", str(made), *options, "--device", "cpu", "--every", "0.1"])
    said = capsys.readouterr().out
    assert "of patches right" in said and "right; colour" in said
    with ex.load(made, device="cpu", progress=None) as llm:
        picture, question, *_ = next(script.held_out(1, 7))
        assert llm.chat([{"role": "user", "content": [picture, question]}], max_tokens=2).timings.prompt_tokens > script.TOKENS
    script.main(["measure", str(made), "--count", "4"])
    assert "all: 0 of 4" in capsys.readouterr().out
    script.main(["package", str(made), str(tmp_path / "exl2"), "--count", "10"])
    assert "| all | 0.0% | 0.0% | 10 |" in (tmp_path / "exl2" / "README.md").read_text()
    assert sum(file.stat().st_size for file in (tmp_path / "exl2").iterdir()) < 8e6

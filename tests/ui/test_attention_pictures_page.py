"""The real bundle of AttentionView with pictures: where a token looks, by pointer and keyboard, and what is said of it."""

import sys
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageDraw
import pytest
from mock_host import ROUNDED, MockHost, low_controls, state_of, violations

import exl2nb as ex
from exl2nb import widgets as w

sys.path.insert(0, str(Path(__file__).parents[1]))
from model.vision.zoo import build, write


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The question about a red ring and a blue square, of a random model: what it looks at is as good as any."""
    picture = PIL.Image.new("RGB", (192, 192), "white")
    draw = PIL.ImageDraw.Draw(picture)
    draw.ellipse((20, 20, 80, 80), outline=(214, 40, 40), width=12)
    draw.rectangle((110, 110, 170, 170), fill=(33, 90, 200))
    folder = write("llava-siglip", build("llava-siglip"), tmp_path_factory.mktemp("seeing"))
    with ex.load(folder, device="cpu", progress=None) as llm:
        yield w.AttentionView({"one": llm, "q4 cache": (llm, {"cache": "q4"})}, "w1 w2 w3 w4", images=[picture])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_can_be_read_by_everybody(page, made, theme, screenshots):
    MockHost(page, "attention", state_of(made), theme=theme)
    page.locator("section").screenshot(path=screenshots / f"attention-pictures-{theme}.png")
    assert violations(page, besides=ROUNDED) == []
    assert low_controls(page) == []


def test_a_token_is_chosen_and_its_patches_are_said(page, made):
    host, shown = MockHost(page, "attention", state_of(made)), made.to_dict()
    words = page.get_by_role("listbox", name="Tokens of the question and the answer").get_by_role("option")
    first = shown["pictures"][0]["tokens"][-1] + 1
    assert words.count() == shown["tokens"] - first
    assert words.last.get_attribute("aria-selected") == "true"
    answer = shown["answer"]
    words.nth(answer - first).click()
    host.frame()
    assert host.sent[-1]["values"]["token"] == answer
    page.keyboard.press("ArrowRight")
    host.frame()
    assert host.sent[-1]["values"]["token"] == answer + 1
    boxes = page.locator(".exl2nb-seen")
    assert boxes.count() == 2
    looked = made.on_picture(answer + 1).numpy()
    row, column = np.unravel_index(looked.argmax(), looked.shape)
    said = page.locator(".exl2nb-seen + div").first.inner_text()
    assert said.startswith("one: ") and f"most at row {row + 1}, column {column + 1}" in said
    alpha = "(c, [x, y]) => c.getContext('2d').getImageData(x, y, 1, 1).data[3]"
    canvas = boxes.first.locator("canvas")
    assert canvas.evaluate("(c) => [c.width, c.height]") == list(looked.shape[::-1])
    assert canvas.evaluate(alpha, [int(column), int(row)]) == 0, "clear where it looks most"
    least_row, least_column = np.unravel_index(looked.argmin(), looked.shape)
    assert canvas.evaluate(alpha, [int(least_column), int(least_row)]) > 60
    boxes.first.get_by_role("application").focus()
    page.keyboard.press("ArrowRight")
    assert "gets" in page.locator(".exl2nb-seen-line").inner_text()
    assert page.get_by_role("img", name="Picture 1 as the model saw it").count() == 2


def test_a_view_without_pictures_has_no_such_part(page, made):
    state = state_of(made)
    MockHost(page, "attention", {**state, "_result": {**state["_result"], "pictures": [], "answer": -1}})
    assert page.locator(".exl2nb-seen").count() == 0
    assert not page.get_by_role("listbox", name="Tokens of the question and the answer").is_visible()

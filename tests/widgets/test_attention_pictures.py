"""AttentionView of a model that sees: the pictures as it saw them, and where a token looks in them."""

import base64
import io
import re

import numpy as np
import PIL.Image
import pytest

import exl2nb as ex
from exl2nb.core.errors import OptionError, PictureError
from exl2nb.widgets import AttentionView

from ..model.vision.zoo import build, write

PICTURE = PIL.Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 30, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with ex.load(write("llava", build("llava"), tmp_path_factory.mktemp("llava")), device="cpu", progress=None) as llm:
        yield llm


@pytest.fixture(scope="module")
def view(llm):
    return AttentionView({"one": llm, "q8": (llm, {"cache": "q8"})}, "w1 w2 w3", images=[PICTURE, PICTURE])


def test_a_token_looks_where_its_pattern_says(view, llm):
    talk = [{"role": "user", "content": [PICTURE, PICTURE, "w1 w2 w3"]}]
    answer = llm.chat(talk, temperature=0, max_tokens=48).text
    name = f"blocks.{view.layer}.attn.hook_pattern"
    found = llm.trace([*talk, {"role": "assistant", "content": answer}], name)
    shown = view.to_dict()
    assert len(found.ids) == shown["tokens"] == shown["size"]
    assert [one["tokens"] for one in shown["pictures"]] == [list(one.tokens) for one in found.pictures]
    assert found.pictures[1].tokens[-1] < shown["answer"] < shown["tokens"]
    for token in (-1, shown["answer"]):
        for number, one in enumerate(found.pictures):
            want = found[name][view.head, token, list(one.tokens)].view(*one.grid[1:])
            assert (view.on_picture(token, number) - want).abs().max() < 0.004, "a byte a place"
            assert view.on_picture(token, number, 1).shape == want.shape


def test_the_head_that_is_shown_first_looks_hardest(view):
    shown, chosen = view.to_dict(), (view.layer, view.head)

    def hardest(layer, head):
        view.look(layer, head)
        tokens = range(shown["answer"], shown["tokens"])
        return np.mean([max(float(view.on_picture(token, n).max()) for n in (0, 1)) for token in tokens])

    found = {(layer, head): hardest(layer, head) for layer in range(shown["layers"]) for head in range(shown["heads"])}
    assert max(found, key=found.get) == chosen
    view.look(*chosen)


def test_the_picture_is_what_the_model_saw(view, llm):
    url = view.to_dict()["pictures"][0]["url"]
    seen = PIL.Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert seen.size == (24, 24) == llm.vision.seen(ex.Image(PICTURE)).size


def test_without_scripts_words_say_where_the_answer_looks(view):
    page = (
        view._repr_mimebundle_()[0]["text/html"] if isinstance(view._repr_mimebundle_(), tuple) else view._repr_mimebundle_()["text/html"]
    )
    assert 'alt="What the model saw"' in page
    row, column, share = re.search(r"row (\d+), column (\d+): ([\d.]+) %", page).groups()
    looked = view.on_picture(view.to_dict()["answer"])
    assert int(looked.argmax()) == (int(row) - 1) * looked.shape[1] + int(column) - 1
    assert abs(float(looked.max()) - float(share) / 100) < 1e-3


def test_it_is_shown_again_from_its_dict(view):
    again = AttentionView(result=view.to_dict(), layer=view.layer, head=view.head)
    assert (again.on_picture(-2) == view.on_picture(-2)).all()
    strange = view.to_dict()
    strange["pictures"] = [{**strange["pictures"][0], "url": "https://example.org/who-looks.png"}]
    with pytest.raises(OptionError, match="no data URL"):
        AttentionView(result=strange)


def test_a_long_prompt_shares_what_its_places_get(llm):
    view = AttentionView(llm, " ".join(["w1 w2 w3"] * 90), images=PICTURE)
    shown = view.to_dict()
    assert shown["size"] == 256 < shown["tokens"]
    assert 0 < float(view.on_picture(shown["answer"]).sum()) <= 1


def test_what_cannot_be_shown_is_said(llm, view):
    with pytest.raises(OptionError, match="picture is 2; expected"):
        view.on_picture(picture=2)
    with pytest.raises(PictureError, match="images: is a int"):
        AttentionView(llm, images=3)
    with ex.demo(progress=None) as blind, pytest.raises(OptionError, match="does not see"):
        AttentionView(blind, images=PICTURE)

"""Pictures in the Playground's chat in a real JupyterLab: dropped and pasted, shown as the model saw them, answered; and where it looked.

The model is a random one of the zoo: what it answers means nothing, but the pictures really go through its tower.
"""

import sys
from pathlib import Path

import PIL.Image
import PIL.ImageDraw
import pytest
from lab import Cells

sys.path.insert(0, str(Path(__file__).parents[1]))
from model.vision.zoo import build, write

pytestmark = pytest.mark.slow  # run by .ci/run

GIVE = """(box, [kind, bytes]) => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(bytes)], "a.png", { type: "image/png" }));
  const options = { bubbles: true, cancelable: true };
  box.dispatchEvent(kind === "drop"
    ? new DragEvent("drop", { dataTransfer: data, ...options })
    : new ClipboardEvent("paste", { clipboardData: data, ...options }));
}"""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """The bytes of two drawings as PNG files."""
    found = []
    for name in ("ring", "square"):
        picture = PIL.Image.new("RGB", (192, 128), "white")
        draw = PIL.ImageDraw.Draw(picture)
        draw.ellipse((20, 20, 100, 100), outline="red", width=12) if name == "ring" else draw.rectangle((90, 30, 160, 100), fill="blue")
        file = tmp_path_factory.mktemp("pictures") / f"{name}.png"
        picture.save(file)
        found.append(list(file.read_bytes()))
    return found


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_pictures_are_dropped_pasted_and_seen(lab_page, lab, theme, pictures, screenshots, tmp_path):
    lab_page.set_default_timeout(60_000)
    lab.set_theme(f"JupyterLab {theme}")
    folder = write("llava-siglip", build("llava-siglip"), tmp_path / "seeing")
    cells = {
        "start": f"import exl2nb as ex\nllm = ex.load({str(folder)!r}, device='cpu', progress=None)",
        "playground": "play = ex.widgets.Playground(llm, chat=True, max_tokens=12, temperature=0)\nplay",
        "after": "print([turn.role for turn in play.turns], [len(turn.images) for turn in play.turns], llm.vision.runs)",
        "attention": "ex.widgets.AttentionView(llm, 'w1 w2', images=play.turns[0].images[0].url)",
    }
    book = Cells(lab, lab_page, cells)
    try:
        widget = book.shown("playground")
        box = widget.get_by_label("Message", exact=True)
        box.evaluate(GIVE, ["drop", pictures[0]])
        waiting = widget.get_by_role("button", name="Remove picture")
        waiting.nth(0).wait_for()
        box.evaluate(GIVE, ["paste", pictures[1]])
        waiting.nth(1).wait_for()
        box.fill("w1 w2 w3")
        book.page.keyboard.press("Control+Enter")
        seen = widget.get_by_role("img", name="Picture, 192 x 128 pixels, seen as 24 x 24 in 3 x 3 patches, 9 tokens")
        seen.nth(1).wait_for()
        widget.get_by_text("12 tokens").first.wait_for()
        book.look("playground", screenshots, f"lab-seeing-{theme.lower()}")
        assert book.run_named("after").strip() == "['user', 'assistant'] [2, 0] 2"
        looking = book.shown("attention")
        looking.get_by_text("of its attention is on the picture").wait_for()
        book.look("attention", screenshots, f"lab-seeing-{theme.lower()}")
        assert "Where the answer looks" in book.stored("attention")
    finally:
        lab.set_theme("JupyterLab Light")

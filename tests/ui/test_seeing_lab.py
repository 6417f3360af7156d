"""The packaged model that sees in a real JupyterLab: pictures dropped and pasted into the Playground's chat, shown as the model saw them,
answered rightly; and where it looked."""

import PIL.Image
import PIL.ImageDraw
import pytest
from lab import Cells

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
    """The bytes of two drawings as PNG files: a red ring, and a blue square."""
    found = []
    for name in ("ring", "square"):
        picture = PIL.Image.new("RGB", (192, 192), "white")
        draw = PIL.ImageDraw.Draw(picture)
        if name == "ring":
            draw.ellipse((10, 10, 56, 56), outline=(214, 40, 40), width=14)
        else:
            draw.rectangle((138, 138, 180, 180), fill=(33, 90, 200))
        file = tmp_path_factory.mktemp("pictures") / f"{name}.png"
        picture.save(file)
        found.append(list(file.read_bytes()))
    return found


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_pictures_are_dropped_pasted_and_seen(lab_page, lab, theme, pictures, screenshots):
    lab_page.set_default_timeout(60_000)
    lab.set_theme(f"JupyterLab {theme}")
    cells = {
        "start": "import exl2nb as ex\nllm = ex.demo('seeing', device='cpu', progress=None)",
        "playground": "play = ex.widgets.Playground(llm, chat=True, max_tokens=40, temperature=0)\nplay",
        "after": "print([turn.role[0] for turn in play.turns], [len(turn.images) for turn in play.turns], llm.vision.runs)",
        "attention": "ex.widgets.AttentionView(llm, 'Where is the ring?', images=play.turns[0].images[0].url)",
    }
    book = Cells(lab, lab_page, cells)
    try:
        widget = book.shown("playground")
        box = widget.get_by_label("Message", exact=True)
        seen = widget.get_by_role("img", name="Picture, 192 x 192 pixels, seen as 72 x 72 in 6 x 6 patches, 36 tokens")
        turns = [("drop", "What colour is the ring?", "The ring is red.")]
        turns += [("paste", "Where is the square?", "The square is in the bottom right.")]
        for number, (way, question, answer) in enumerate(turns):
            box.evaluate(GIVE, [way, pictures[number]])
            widget.get_by_role("button", name="Remove picture").wait_for()
            box.fill(question)
            book.page.keyboard.press("Control+Enter")
            seen.nth(number).wait_for()
            widget.get_by_text(answer).first.wait_for()
            widget.locator("button[aria-disabled=true]", has_text="Stop").wait_for()
        book.look("playground", screenshots, f"lab-seeing-{theme.lower()}")
        assert book.run_named("after").strip() == "['u', 'a', 'u', 'a'] [1, 0, 1, 0] 2"
        looking = book.shown("attention")
        looking.get_by_text("of its attention is on the picture").wait_for()
        book.look("attention", screenshots, f"lab-seeing-{theme.lower()}")
        assert "Where the answer looks" in book.stored("attention")
    finally:
        lab.set_theme("JupyterLab Light")

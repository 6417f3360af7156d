"""Every widget with something to show, on one page: for tests of all of them together, and for the pictures of the documentation."""

import sys
from pathlib import Path

import PIL.Image
import PIL.ImageDraw
from mock_host import STATIC, blank, mount, state_of

import exl2nb
from exl2nb import widgets as w

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from site_widgets import DEMO, examples
from site_widgets import PACKED as DATA

__all__ = ["DATA", "DEMO", "everything", "examples", "show_all"]
BUNDLES = {"chat": "playground", "seeing": "attention"}
CHATTY = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


def everything(llm) -> dict[str, tuple[str, dict]]:
    """Name -> (bundle, traits)."""
    low = exl2nb.load(DATA, progress=None)
    made = examples(llm, low)
    chat = w.Playground(llm, chat=True, template=CHATTY, max_tokens=16, seed=1)
    chat.say("Who is the old man?").wait()
    chat.again().wait()
    sight = exl2nb.demo("seeing", device="cpu", progress=None)
    seeing = w.AttentionView(sight, "Where is the triangle?", images=drawing(), layer=1, head=2, token=-3)
    made |= {"chat": chat, "seeing": seeing, "progress": w.ProgressView("convert")}
    states = {name: (BUNDLES.get(name, name), state_of(widget)) for name, widget in made.items()}
    running = {"status": "running", "stage": "measure", "done": 3.0, "total": 12.0, "unit": "layers", "rate": 1.5, "elapsed_s": 2.0}
    states["progress"] = ("progress", {**states["progress"][1], **running, "share": 0.2, "eta_s": 6.0})
    for widget in made.values():
        widget.close()
    low.close()
    sight.close()
    return states


def drawing() -> PIL.Image.Image:
    """A red circle, a blue square and a green triangle, as notebook 13 draws them."""
    picture = PIL.Image.new("RGB", (192, 192), "white")
    draw = PIL.ImageDraw.Draw(picture)
    draw.ellipse((10, 12, 54, 56), fill=(214, 40, 40))
    draw.rectangle((140, 76, 178, 114), fill=(33, 90, 200))
    draw.polygon([(96, 134), (72, 178), (120, 178)], fill=(56, 142, 60))
    return picture


def show_all(page, states: dict[str, tuple[str, dict]], *, theme: str, width: int, unfold: bool = True) -> None:
    """Each widget in an element with its name as id, with the style sheets of all; `unfold`: everything that can be opened is open."""
    page.set_viewport_size({"width": width, "height": 1000})
    blank(page, "", "".join(f"<div id={name} style='margin-bottom:24px'></div>" for name in states), title="all widgets", theme=theme)
    for bundle in dict.fromkeys(bundle for bundle, _ in states.values()):
        sheet = page.add_style_tag(content=(STATIC / f"{bundle}.css").read_text())
        sheet.evaluate("(style, id) => { style.id = id }", f"css-{bundle}")
    for name, (bundle, state) in states.items():
        mount(page, bundle, state, name)
    for group in page.locator("details").all() if unfold else []:
        group.evaluate("(e) => { e.open = true }")
    page.wait_for_timeout(300)

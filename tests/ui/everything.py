"""Every widget with something to show, on one page: for tests of all of them together, and for the pictures of the documentation."""

import tempfile
from pathlib import Path

import torch
from mock_host import STATIC, blank, mount, state_of

import exl2nb
from exl2nb import widgets as w
from exl2nb.model.layout import layer_linears
from exl2nb.model.lora import save_lora

DATA = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
ORIGINAL = Path(exl2nb.__file__).parent / "demo_model"
ASK = "It was a dark night, and the old man"
CHATTY = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


def everything(llm) -> dict[str, tuple[str, dict]]:
    """Name -> (bundle, traits)."""
    measured = exl2nb.demo_measurement()
    play = w.Playground(llm, prompt=ASK, max_tokens=60, seed=7)
    play.start().wait()
    chat = w.Playground(llm, chat=True, template=CHATTY, max_tokens=16, seed=1)
    chat.say("Who is the old man?").wait()
    chat.again().wait()
    caches = w.CacheExplorer(llm, prompt=ASK, modes=["q8", "q4"], max_tokens=16, needle={"sentences": 4}, free=2 * 10**9)
    caches.start().wait().hide_needle().wait()
    columns = {"16 bits": llm, "4 bits": DATA, "sampled": (llm, {"temperature": 0.9, "seed": 3})}
    compare = w.Compare(columns, prompts=[ASK, "She opened the letter and"], max_tokens=16).start().wait()
    pages, rain = w.PageTable(llm), "The rain fell on the town. " * 70
    llm.generate(rain, max_tokens=1)
    asked = llm.stream([rain + "Who came?", rain + "Who left?", "It was"], max_tokens=200, ignore_eos=True)
    for _, _chunk in zip(range(12), asked.chunks()):
        pass
    pages.take("three requests, two with a common prefix")
    asked.cancel()
    explorer = w.BitrateExplorer(measured, llm, bpw=3.0, measured=[(3.0, 0.26), (4.0, 0.07)], selected=[1, "down"])
    progress = w.ProgressView("convert")
    low = exl2nb.load(DATA, progress=None)
    sides = {"16 bits": llm, "4 bits": low}
    flow = w.ErrorFlow({**sides, "q4 cache": (llm, {"cache": "q4"})}, layer=3)
    flow.patch().wait()
    outliers = w.OutlierMap(sides)
    outliers.look(9, 190)
    with tempfile.TemporaryDirectory() as folder:
        llm.loras.load(random_adapter(folder, llm.config), name="pirate", progress=None)
    adapter = w.LoraExplorer(llm, "pirate", ASK, selected=[3, "v"]).at(0.8)
    made = {
        "playground": play,
        "chat": chat,
        "explorer": explorer,
        "bitmap": w.BitMap(measured.solve(bpw=3.5), other=measured.solve(bpw=5), selected=[0, "q"]),
        "weights": w.WeightBrowser(DATA, ORIGINAL, column=17),
        "microscope": w.SamplerMicroscope(llm, ASK, max_tokens=12, temperature=0.8, top_p=0.9, seed=7, at=4),
        "caches": caches,
        "compare": compare,
        "pagetable": pages,
        "speculation": w.Speculation(llm, "One, two, three. " * 8, max_tokens=40, temperature=0),
        "plan": w.MemoryPlan(llm, context=4096, batch=8, free=100_000_000),
        "progress": progress,
        "errorflow": flow,
        "layerlens": w.LayerLens(sides),
        "attention": w.AttentionView(sides, layer=6, head=2),
        "histogram": w.WeightHistogram({**sides, "again": DATA}, layer=3, matrix="mlp.down_proj", row=7),
        "outliers": outliers,
        "lora": adapter,
    }
    states = {name: ("playground" if name == "chat" else name, state_of(widget)) for name, widget in made.items()}
    running = {"status": "running", "stage": "measure", "done": 3.0, "total": 12.0, "unit": "layers", "rate": 1.5, "elapsed_s": 2.0}
    states["progress"] = ("progress", {**states["progress"][1], **running, "share": 0.2, "eta_s": 6.0})
    for widget in made.values():
        widget.close()
    low.close()
    llm.loras.unload("pirate")
    return states


def random_adapter(folder, config) -> Path:
    """A small one of every matrix of every layer."""
    g, pairs = torch.Generator().manual_seed(1), {}
    for layer in range(config.num_layers):
        for linear in layer_linears(config, layer).values():
            n, k = linear.shape
            pairs[linear.key] = torch.randn(4, k, generator=g) * k**-0.5, 0.1 * torch.randn(n, 4, generator=g)
    return save_lora(folder, pairs)


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

"""The live widgets of the site: exports of real results of the demo model, which need no kernel. tools/site_hooks.py calls `export`.

Each is what `widget.to_html()` writes, with a few lines more: the page around it tells its colours, and hears its height.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ASK = "It was a dark night, and the old man"
PACKED, DEMO = ROOT / "tests" / "data" / "demo-exl2-4.0bpw", ROOT / "exl2nb" / "demo_model"
WIDGETS = {
    "explorer": ("BitrateExplorer", "Bits of every matrix at a bitrate. The slider, the curve and the map work."),
    "microscope": ("SamplerMicroscope", "What each sampler removes from the choice of one token. Click a token or a step."),
    "playground": ("Playground", "Streamed text, tinted by probability. Hover or tap a token for its alternatives."),
    "bitmap": ("BitMap", "Bits per weight of every matrix, at 3.5 and at 5 bits."),
    "plan": ("MemoryPlan", "Weights, cache and activations against free memory. All sliders work."),
    "weights": ("WeightBrowser", "One weight, from the packed words to its value."),
    "caches": ("CacheExplorer", "One prompt under fp16, q8 and q4 caches, with the KL of every token."),
    "compare": ("Compare", "The same prompts at 16 and 4 bits, and sampled."),
    "pagetable": ("PageTable", "Pages of the KV cache while three requests share a prefix."),
    "speculation": ("Speculation", "Accepted and rejected draft tokens."),
    "lora": ("LoraExplorer", "What a random adapter changes in every matrix, and its answer beside the model's own."),
    "errorflow": ("ErrorFlow", "The error of 4 bits from layer to layer, and which layer is worth most when it is patched back."),
    "layerlens": ("LayerLens", "What the model would predict after each layer, at 16 and at 4 bits."),
    "attention": ("AttentionView", "Every attention head at 16 and at 4 bits, and the difference."),
    "outliers": ("OutlierMap", "The largest activation of every channel in every layer, and what one outlier costs its group."),
    "histogram": ("WeightHistogram", "The weights of a group before and after, their codes and scales."),
}
"""Bundle -> class, and one sentence."""
BROWSER = {
    "browser_playground": ("Playground", "The demo model at 4 bits per weight, run by this page. Nothing is sent anywhere."),
    "browser_microscope": ("SamplerMicroscope", "The same model: every slider draws again, from logits that this page computes."),
}
"""Page -> class, and one sentence: the page itself is their kernel."""
ICON = '<link rel="icon" href="data:,">'
FRAME = """<script>
if (parent !== window) {
  addEventListener("message", ({ data }) => {
    if (data && data.theme) document.documentElement.style.colorScheme = data.theme;
  });
  const say = () => parent.postMessage({ widget: NAME, height: Math.ceil(document.body.getBoundingClientRect().height) }, "*");
  new ResizeObserver(say).observe(document.body);
}
</script>
<style>body{margin:0 !important;padding:2px !important;max-width:none !important;overflow-x:auto}</style>
"""


def export(folder: Path) -> None:
    """Write one page for each widget; nothing where all of them are newer than their bundles and the widgets' code."""
    sources = [*(ROOT / "exl2nb" / "static").iterdir(), *(ROOT / "exl2nb" / "widgets").glob("*.py"), Path(__file__)]
    sources.append(ROOT / "docs" / "site" / "browser.js")
    wanted = [folder / f"{name}.html" for name in (*WIDGETS, *BROWSER)]
    newest = max(path.stat().st_mtime for path in sources)
    if all(path.is_file() and path.stat().st_mtime > newest for path in wanted):
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in made():
        frame = FRAME.replace("NAME", f'"{name}"')
        (folder / f"{name}.html").write_text(
            text.replace("</title>", f"</title>\n{'' if ICON in text else ICON}", 1).replace("</body>", f"{frame}</body>"), encoding="utf-8"
        )


def browser_page(widget: Any, kind: str, **rest: Any) -> str:
    """A widget whose kernel is the page itself: docs/site/browser.js with the engine in WebAssembly."""
    plain = {
        k: v
        for k, v in widget.get_state().items()
        if isinstance(v, (str, int, float, list, dict, type(None))) and k not in ("_esm", "_css")
    }
    files = {"engine": "../../site/engine.wasm", "model": "../../site/model.bin", "tokenizer": "../../site/tokenizer.json"}
    data = json.dumps(
        {"esm": str(widget._esm), "state": {**plain, **rest.pop("state", {})}, "files": files, "widget": kind, **rest}
    ).replace("<", "\\u003c")
    script = (ROOT / "docs" / "site" / "browser.js").read_text(encoding="utf-8").replace("</", "<\\/")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{ICON}
<title>{type(widget).__name__} in the browser</title>
<style>body{{font-family:system-ui,sans-serif}}
{widget._css}</style>
</head>
<body>
<main id="exl2nb-root"></main>
<script type="application/json" id="exl2nb-browser">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def adapted(llm: Any) -> str:
    """The name of a random adapter of every matrix, which the model has loaded then."""
    if any(lora.name == "pirate" for lora in llm.loras.list()):
        return "pirate"
    import torch

    from exl2nb.model.layout import layer_linears
    from exl2nb.model.lora import save_lora

    g, pairs = torch.Generator().manual_seed(1), {}
    for layer in range(llm.config.num_layers):
        for linear in layer_linears(llm.config, layer).values():
            n, k = linear.shape
            pairs[linear.key] = torch.randn(4, k, generator=g) * k**-0.5, 0.1 * torch.randn(n, 4, generator=g)
    with tempfile.TemporaryDirectory() as folder:
        return llm.loras.load(save_lora(folder, pairs), name="pirate", progress=None).name


def examples(llm: Any, low: Any) -> dict[str, Any]:
    """A widget of each bundle with something to show. llm, low: the demo model and its copy at 4 bits, loaded."""
    import exl2nb as ex

    w, measured, sides = ex.widgets, ex.demo_measurement(), {"16 bits": llm, "4 bits": low}
    play = w.Playground(llm, prompt=ASK, max_tokens=60, temperature=0.8, top_p=0.95, seed=7)
    play.start().wait()
    caches = w.CacheExplorer(llm, prompt=ASK, modes=["q8", "q4"], max_tokens=16, needle={"sentences": 4}, free=2 * 10**9)
    caches.start().wait().hide_needle().wait()
    columns = {"16 bits": llm, "4 bits": PACKED, "sampled": (llm, {"temperature": 0.9, "seed": 3})}
    pages, rain = w.PageTable(llm), "The rain fell on the town. " * 70
    llm.generate(rain, max_tokens=1)
    asked = llm.stream([rain + "Who came?", rain + "Who left?", "It was"], max_tokens=200, ignore_eos=True)
    for _, _chunk in zip(range(12), asked.chunks()):
        pass
    pages.take("three requests, two with a common prefix")
    asked.cancel()
    drafts = {"kind": "ngram", "max_tokens": 4, "adaptive": False}  # adaptive drafts depend on measured times
    once = {"max_tokens": 40, "temperature": 0}
    text = "One, two, three. " * 8
    drafted, plain = llm.generate(text, speculation=drafts, **once), llm.generate(text, **once)
    flow = w.ErrorFlow({**sides, "q4 cache": (llm, {"cache": "q4"})}, layer=3)
    flow.patch().wait()
    outliers = w.OutlierMap(sides)
    outliers.look(9, 190)
    return {
        "explorer": w.BitrateExplorer(measured, llm, bpw=3.0, measured=[(3.0, 0.26), (4.0, 0.07)], selected=[1, "down"]),
        "microscope": w.SamplerMicroscope(llm, ASK, max_tokens=12, temperature=0.8, top_p=0.9, seed=7, at=4),
        "playground": play,
        "bitmap": w.BitMap(measured.solve(bpw=3.5), other=measured.solve(bpw=5), selected=[0, "q"]),
        "plan": w.MemoryPlan(llm, context=4096, batch=8, free=100_000_000),
        "weights": w.WeightBrowser(PACKED, DEMO, column=17),
        "caches": caches,
        "compare": w.Compare(columns, prompts=[ASK, "She opened the letter and"], max_tokens=16).start().wait(),
        "pagetable": pages,
        "speculation": w.Speculation(drafted, plain=plain, tokenizer=llm.tokenizer),
        "errorflow": flow,
        "layerlens": w.LayerLens(sides),
        "attention": w.AttentionView(sides, layer=6, head=2),
        "outliers": outliers,
        "histogram": w.WeightHistogram(sides, layer=3, matrix="mlp.down_proj", row=7),
        "lora": w.LoraExplorer(llm, adapted(llm), ASK, selected=[3, "v"]).at(0.8),
    }


def made() -> Iterator[tuple[str, str]]:
    """Name and page of each widget."""
    import exl2nb as ex

    w = ex.widgets
    with ex.demo(progress=None) as llm, ex.load(PACKED, device="cpu", progress=None) as small:
        widgets = examples(llm, small)
        running = w.Playground(small, prompt=ASK, max_tokens=100, temperature=0.8, top_p=0.95, seed=7)
        yield "browser_playground", browser_page(running, "playground", eos=sorted(small.tokenizer.eos_ids), state={"_has_model": True})
        scope = w.SamplerMicroscope(small, ASK, max_tokens=12, temperature=0.8, top_p=0.9, seed=7, at=4)
        yield "browser_microscope", browser_page(scope, "microscope", eos=[])
        running.close()
        scope.close()
        for name, widget in widgets.items():
            yield name, widget.to_html(title=WIDGETS[name][0]) or ""
            widget.close()


if __name__ == "__main__":
    export(Path(sys.argv[1]))

"""The course for readers without a kernel: executed copies of the notebooks in docs/gallery/, with an index.

    python tools/gallery.py build              # run every notebook anew into docs/gallery/ (minutes)
    python tools/gallery.py build 03           # only those whose name begins so

The copies carry outputs and no widget state: what is shown is the script-free twin that every widget leaves.
tests/notebooks/test_gallery.py says when a copy is older than its notebook.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from links import GALLERY, badges, notebooks
from site_widgets import WIDGETS

LIVE = "application/vnd.jupyter.widget-view+json"
MOST_BYTES = 600_000
TEMPORARY = re.compile(r"/[\w./-]*/exl2nb-[a-z0-9_]{8}")
"""Folders that tempfile named; another run has other names."""
PICTURES = {
    "01": "playground", "02": "weights", "03": "explorer", "04": "bitmap", "05": "caches", "06": "microscope", "07": "speculation",
    "08": "plan", "09": "compare", "10": "pagetable", "11": "lora", "12": "plan", "13": "seeing", "14": "errorflow", "15": "outliers",
    "16": "attention",
}  # fmt: skip


def build(prefixes: list[str]) -> None:
    """Execute notebooks into docs/gallery/ and write the index."""
    import nbformat
    from notebook_memory import execute

    GALLERY.mkdir(parents=True, exist_ok=True)
    for path in notebooks():
        if prefixes and not path.name.startswith(tuple(prefixes)):
            continue
        book = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            cost = execute(book, Path(folder))
        data = strip(json.loads(nbformat.writes(book)))
        text = TEMPORARY.sub("/tmp/exl2nb", json.dumps(data, indent=1, ensure_ascii=False)).replace(
            str(Path(__file__).resolve().parents[1]), "/exl2nb"
        )
        (GALLERY / path.name).write_text(text + "\n", encoding="utf-8")
        size = (GALLERY / path.name).stat().st_size / 1000
        print(f"{path.name}: {size:.0f} kB; {cost.peak_bytes / 1e6:.0f} MB resident, {cost.cpu_s:.1f} s of processor time", flush=True)
    (GALLERY / "README.md").write_text(index(), encoding="utf-8")


def strip(book: dict[str, Any]) -> dict[str, Any]:
    """Without widget state, live widgets, timings and what the machine says of itself."""
    book["metadata"] = {"kernelspec": book["metadata"].get("kernelspec", {}), "language_info": {"name": "python"}}
    for cell in book["cells"]:
        cell["metadata"] = {}
        for output in cell.get("outputs", []):
            output.pop("transient", None)
            if "data" in output:
                output["data"].pop(LIVE, None)
                output["metadata"] = {}
        if "outputs" in cell:
            kept = [o for o in cell["outputs"] if o.get("data", True) and o.get("name") != "stderr"]
            cell["outputs"] = joined(kept)
    return book


def joined(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Text that came in pieces as one output: a page gives each output lines of its own."""
    found: list[dict[str, Any]] = []
    for output in outputs:
        if output["output_type"] == "stream" and found and found[-1].get("name") == output["name"]:
            found[-1]["text"] = "".join([*found[-1]["text"], *output["text"]]).splitlines(keepends=True)
        else:
            found.append(output)
    return found


def index() -> str:
    """docs/gallery/README.md: widgets and notebooks as thumbnails, with a sentence and the badges of each notebook."""
    parts = [
        "# Gallery",
        "",
        "A model that [runs in your browser](browser.md), the widgets [live](widgets.md) without a kernel, the course as it ran.",
        "`exl2nb lab` opens your own copies.",
        "",
    ]
    parts += ["## Widgets", "", '<div class="grid cards" markdown>', ""]
    parts += [f"- [![](../pictures/{name}-light.png) {title}](widgets.md#{title.lower()})\n" for name, (title, _) in WIDGETS.items()]
    parts += ["</div>", "", "## Course", "", '<div class="grid cards" markdown>', ""]
    for path in notebooks():
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        title, first = heading("".join(cells[0]["source"]))
        parts += [f"- [![](../pictures/{PICTURES[path.name[:2]]}-light.png) {title}]({path.name})", "", f"    {first}", ""]
        parts += [f"    {line}", ""] if (line := badges(path.name)) else []
    return "\n".join([*parts, "</div>"]) + "\n"


def heading(source: str) -> tuple[str, str]:
    """Title of a notebook and its first paragraph."""
    paragraphs = [p.strip() for p in source.split("\n\n") if p.strip()]
    words = [p for p in paragraphs[1:] if not p.startswith("[![")]
    return paragraphs[0].lstrip("# "), words[0] if words else ""


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("build", "index"))
    parser.add_argument("names", nargs="*", help="beginnings of names; none means all")
    args = parser.parse_args()
    if args.command == "index":
        (GALLERY / "README.md").write_text(index(), encoding="utf-8")
    else:
        build(args.names)
    return 0


if __name__ == "__main__":
    sys.exit(main())

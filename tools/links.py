"""The project's public address and what follows from it: badges, the first cell of the notebooks, the address in CITATION.cff.

    python tools/links.py    # after a change in pyproject.toml, or for a new notebook

`[project.urls] Repository` in pyproject.toml is the one source. Without it there is no public repository: nothing links to one, no badge is
shown. tests/contracts/test_links.py says when this must be run.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {}).get("Repository", "")
NOTEBOOKS, GALLERY, GUIDE = ROOT / "notebooks", ROOT / "docs" / "gallery", ROOT / "docs" / "guide" / "gpu.md"
FIRST_LINE = "# Colab and Kaggle: installs exl2nb and replaces no package. Does nothing where it is installed."
INSTALL = f"""{FIRST_LINE}
import glob
import importlib.util

if importlib.util.find_spec("exl2nb") is None:
    # a wheel or sdist that was uploaded, or a wheel in a Kaggle data set; else the package index
    attached = glob.glob("/kaggle/input/**/exl2nb-[0-9]*.whl", recursive=True)
    package = min(glob.glob("exl2nb-[0-9]*") + attached, default="exl2nb")
    %pip install --verbose --no-deps {{package}}"""
FROM_SOURCE = """

if importlib.util.find_spec("exl2nb") is None:
    # it is not on the index: compiled here, in a minute or two
    %pip install --verbose --no-deps git+{repository}"""


def notebooks() -> list[Path]:
    """The course in its order."""
    return sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


def install_cell(repository: str = REPOSITORY) -> str:
    """The first code cell of every notebook. --no-deps: the images hold all that we require, in the versions that they need themselves."""
    return INSTALL + (FROM_SOURCE.format(repository=repository) if repository else "")


def badges(name: str, repository: str = REPOSITORY) -> str:
    """One line of Markdown: where the notebook `name` opens; empty without a repository on GitHub."""
    host, _, path = repository.partition("https://github.com/")
    if host or not path:
        return ""
    colab = f"https://colab.research.google.com/github/{path}/blob/main/notebooks/{name}"
    binder = f"https://mybinder.org/v2/gh/{path}/main?urlpath=lab/tree/notebooks/{name}"
    return (
        f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab})"
        f" [![Open in Binder](https://mybinder.org/badge_logo.svg)]({binder})"
    )


def with_badges(source: str, name: str, repository: str = REPOSITORY) -> str:
    """A text with the badges under its title, replaced where they stand already."""
    title, _, rest = source.partition("\n")
    rest = re.sub(r"^\s*\[!\[Open in Colab\][^\n]*\n?", "", rest).lstrip("\n")
    return "\n\n".join(part for part in (title, badges(name, repository), rest) if part)


def in_notebook(text: str, name: str, repository: str = REPOSITORY) -> str:
    """A notebook with badges in its first cell and the install cell as its second. An executed copy counts it as run: it does nothing."""
    book: dict[str, Any] = json.loads(text)
    first, cells = book["cells"][0], book["cells"]
    first["source"] = with_badges("".join(first["source"]), name, repository).splitlines(keepends=True)
    if not "".join(cells[1]["source"]).startswith(FIRST_LINE):
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        count = None if code[0]["execution_count"] is None else 1
        for cell in code if count else []:
            cell["execution_count"] += 1
        cells.insert(1, {"cell_type": "code", "execution_count": count, "id": "install", "metadata": {}, "outputs": [], "source": []})
    cells[1]["source"] = install_cell(repository).splitlines(keepends=True)
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def in_guide(text: str, repository: str = REPOSITORY) -> str:
    """The page with the install cell as its indented block."""
    block = textwrap.indent(install_cell(repository), "    ")
    found = re.search(rf"^    {re.escape(FIRST_LINE)}\n(?:    .*\n|\n(?=    ))*", text, re.M)
    return text if found is None else text[: found.start()] + block + "\n" + text[found.end() :]


def in_citation(text: str, repository: str = REPOSITORY) -> str:
    """CITATION.cff with the address, or without one."""
    text = re.sub(r"^repository-code: .*\n", "", text, flags=re.M)
    return text + (f"repository-code: {repository}\n" if repository else "")


def wanted() -> dict[Path, str]:
    """Every file that follows from the address, with the text that it should have."""
    from gallery import index  # which imports this module

    readme, citation = ROOT / "README.md", ROOT / "CITATION.cff"
    books = [path for book in notebooks() for path in (book, GALLERY / book.name) if path.is_file()]
    return {
        **{path: in_notebook(path.read_text(encoding="utf-8"), path.name) for path in books},
        readme: with_badges(readme.read_text(encoding="utf-8"), "01_quickstart.ipynb"),
        citation: in_citation(citation.read_text(encoding="utf-8")),
        GUIDE: in_guide(GUIDE.read_text(encoding="utf-8")),
        GALLERY / "README.md": index(),
    }


def main() -> int:
    """Write what differs."""
    for path, text in wanted().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Badges, the first cell of the notebooks and links to the repository follow from one address in pyproject.toml: none without it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import links  # noqa: E402 - the line above finds it

ADDRESS = "https://github.com/someone/exl2nb"


def test_every_file_follows_the_address():
    old = [str(path.relative_to(ROOT)) for path, text in links.wanted().items() if path.read_text(encoding="utf-8") != text]
    assert not old, "run python tools/links.py"


def test_no_other_address_of_the_repository():
    """In documents, notebooks and project files: on GitHub or through a service that opens what is on GitHub."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(
        r"(?:github\.com|colab\.research\.google\.com/github|mybinder\.org/v2/gh|raw\.githubusercontent\.com)/([\w.-]+/exl2nb)\b"
    )
    own = links.REPOSITORY.removeprefix("https://github.com/")
    files = [ROOT / name for name in listed.stdout.splitlines() if not name.startswith("tests/")]
    texts = [
        path for path in files if path.suffix in {".md", ".ipynb", ".toml", ".cff", ".yml", ".yaml", ".json", ".py"} and path.is_file()
    ]
    assert not [
        (str(path.relative_to(ROOT)), found) for path in texts for found in pattern.findall(path.read_text("utf-8")) if found != own
    ]


def test_badges_replace_their_like():
    once = links.with_badges("# Title\n\nWords.", "01_x.ipynb", ADDRESS)
    assert once.startswith("# Title\n\n[![Open in Colab]") and once.endswith("\n\nWords.")
    assert f"/{ADDRESS.removeprefix('https://github.com/')}/blob/main/notebooks/01_x.ipynb" in once
    assert links.with_badges(once, "01_x.ipynb", ADDRESS) == once
    other = links.with_badges(once, "02_y.ipynb", ADDRESS)
    assert "02_y" in other and "01_x" not in other
    assert links.with_badges(once, "01_x.ipynb", "") == "# Title\n\nWords."
    assert links.badges("01_x.ipynb", "https://elsewhere.org/exl2nb") == ""


def test_an_address_reaches_cell_guide_and_citation():
    assert f"git+{ADDRESS}" in links.install_cell(ADDRESS) and "git+" not in links.install_cell("")
    page = f"Words:\n\n    {links.FIRST_LINE}\n\nMore.\n"
    with_source = links.in_guide(page, ADDRESS)
    assert f"git+{ADDRESS}\n\nMore." in with_source
    assert links.in_guide(with_source, ADDRESS) == with_source
    assert "git+" not in links.in_guide(with_source, "") and links.in_guide(with_source, "").endswith("{package}\n\nMore.\n")
    cited = links.in_citation("title: x\n", ADDRESS)
    assert cited == f"title: x\nrepository-code: {ADDRESS}\n" and links.in_citation(cited, "") == "title: x\n"


def test_a_new_notebook_gets_the_cell():
    cells = [{"cell_type": "markdown", "source": ["# New"]}, {"cell_type": "code", "source": ["1"], "execution_count": 1, "outputs": []}]
    book = json.loads(links.in_notebook(json.dumps({"cells": cells}), "10_new.ipynb"))
    assert [cell["execution_count"] for cell in book["cells"][1:]] == [1, 2]
    assert "".join(book["cells"][1]["source"]) == links.install_cell()
    assert links.in_notebook(json.dumps(book), "10_new.ipynb") == json.dumps(book, indent=1, ensure_ascii=False) + "\n"


@pytest.mark.parametrize(
    ("files", "installed", "commands"),
    [
        ([], False, ["exl2nb", f"git+{ADDRESS}"]),
        (
            ["exl2nb-0.2.0.tar.gz", "exl2nb-0.2.0-py3-none-any.whl", "exl2nb-course"],
            False,
            ["exl2nb-0.2.0-py3-none-any.whl", f"git+{ADDRESS}"],
        ),
        ([], True, []),
    ],
)
def test_the_cell_in_ipython(files, installed, commands, tmp_path, monkeypatch):
    """pip is recorded; the index has nothing, so that the source is tried after it."""
    import importlib.util

    interactive = pytest.importorskip("IPython.core.interactiveshell")
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    shell = interactive.InteractiveShell()
    ran = []
    shell.register_magic_function(ran.append, magic_name="pip")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    shell.run_cell(links.install_cell(ADDRESS)).raise_error()
    assert ran == [f"install --verbose --no-deps {what}" for what in commands]

"""The Python of docs/guide/clients runs against a server: here, or in the environment of test_heavy_clients.py."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "guide" / "clients").glob("*.md"))
ADDRESS = "http://127.0.0.1:5000"
HEAVY = {"langchain": "langchain_openai", "litellm": "litellm", "smolagents": "smolagents"}


def code_of(page):
    """The blocks of a page, from top to bottom."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == text.count("```python"), "a block is not closed"
    return "\n".join(blocks)


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in HEAVY and code_of(page)], ids=lambda page: page.stem)
def test_examples_run(page, server, llm, capsys):
    code = code_of(page)
    for package in set(re.findall(r"^(?:from|import) (openai|anthropic)\b", code, re.M)):
        pytest.importorskip(package)
    assert ADDRESS in code
    exec(code.replace(ADDRESS, server.url), {})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(HEAVY))
def test_examples_run_in_their_environment(name, server, llm):
    python = Path(__file__).parents[2] / "build" / "clients" / "python" / "bin" / "python"
    if not python.exists():
        if find_spec(HEAVY[name]) is None:
            pytest.skip(f"{HEAVY[name]} is not installed; tests/server/test_heavy_clients.py makes build/clients/python")
        python = Path(sys.executable)
    (page,) = (page for page in PAGES if page.stem == name)
    code = code_of(page)
    assert ADDRESS in code
    done = subprocess.run([python, "-c", code.replace(ADDRESS, server.url)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()

"""What a wheel must carry besides code; `.ci/run` looks into the built wheel for the same list."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize(
    "path",
    ["demo_model/config.json", "demo_model/tokenizer.json", "demo_model/README.md", "quant/FORMAT.md", "static/playground.js", "py.typed"],
)
def test_data_is_there_and_not_ignored(path):
    file = ROOT / "exl2nb" / path
    assert file.is_file()
    ignored = subprocess.run(["git", "check-ignore", "-q", str(file)], cwd=ROOT, capture_output=True)
    assert ignored.returncode != 0, f"{path} is in .gitignore: the wheel would leave it out"


def test_demo_model_is_whole():
    folder = ROOT / "exl2nb" / "demo_model"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {p.name for p in folder.glob("*.safetensors")} == set(index["weight_map"].values())


def test_make_demo_installs_a_subset_of_the_dependencies():
    """`make demo` skips JupyterLab; what it does install must be declared, and come with the same names."""
    engine = re.search(r"^ENGINE := (.*)$", (ROOT / "Makefile").read_text(), re.M).group(1).split()
    declared = {re.match(r"[\w-]+", d).group() for d in PROJECT["project"]["dependencies"]}
    assert set(engine) <= declared


def test_versions_agree():
    import exl2nb

    assert PROJECT["project"]["version"] == exl2nb.__version__
    assert f"## {exl2nb.__version__}" in (ROOT / "CHANGELOG.md").read_text()

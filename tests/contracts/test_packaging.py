"""What a wheel must carry besides code (`.ci/run` looks into the built wheel for the same list), and that every place names one version."""

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
packaging = pytest.importorskip("packaging.requirements")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [packaging.Requirement(text) for text in PROJECT["dependencies"]]


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
    assert set(engine) <= {r.name for r in REQUIREMENTS}


def test_versions_agree():
    import exl2nb

    version = PROJECT["version"]
    assert exl2nb.__version__ == version
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert json.loads((ROOT / "widgets" / "package.json").read_text())["version"] == version
    assert json.loads((ROOT / "widgets" / "package-lock.json").read_text())["packages"][""]["version"] == version
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)[1] == version
    assert re.fullmatch(r"\d+\.\d+\.\d+", version), "semver.org: MAJOR.MINOR.PATCH"

"""What a wheel must carry besides code (`.ci/run` looks into the built wheel for the same list), and that installing it on Colab
replaces no preinstalled package, so that no restart is asked for.
"""

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
COLAB = {"torch": "2.11.0", "numpy": "2.1.3", "ipywidgets": "7.7.1", "anywidget": "0.9.21", "traitlets": "5.7.1"}
"""Runtime of August 2026, googlecolab/backend-info a724079."""
LOOSE = {"safetensors", "tokenizers", "huggingface_hub", "jinja2", "pandas", "jupyterlab"}
"""Versions there were not looked up (jupyterlab is not there at all): a lower bound of long ago, and no upper one."""
NEVER = {"ipython", "ipykernel", "tornado", "pyzmq", "jupyter-server", "jupyter_server", "notebook", "ipyparallel"}
"""Replacing one of these asks for a restart, or breaks Colab's own front end."""


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

    assert PROJECT["version"] == exl2nb.__version__
    assert f"## {exl2nb.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_is_known_here():
    assert {r.name for r in REQUIREMENTS} == {*COLAB, *LOOSE}, "say what Colab has of it"
    assert not {r.name.lower() for r in REQUIREMENTS} & NEVER


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda r: r.name)
def test_colab_keeps_its_versions(requirement):
    if requirement.name in LOOSE:
        assert all(part.operator == ">=" for part in requirement.specifier), f"{requirement} could force another version on Colab"
    else:
        there = COLAB[requirement.name]
        assert requirement.specifier.contains(there), f"Colab has {requirement.name} {there}; asking for {requirement} replaces it"

"""Installing exl2nb on Colab or Kaggle replaces nothing that is there, at any depth of requirements.

tools/hosted_packages.py makes the lists.
"""

import json
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")
packaging = pytest.importorskip("packaging.requirements")

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "hosted"
OURS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
ADDED = {"jedi"}
"""What plain `pip install exl2nb` would add: IPython requires it, and the images leave it out."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class Image:
    """packages: name -> version, "" where nobody publishes it. requires: name -> requirements, of all that our dependencies reach."""

    def __init__(self, name: str) -> None:
        first, *lines = (DATA / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        self.packages = {package: version for package, _, version in (line.partition("==") for line in lines)}
        self.requires = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
        self.python = re.search(r"Python (3\.\d+)", first)[1]

    def install(self, requirements: list[str]) -> tuple[set[str], list[str]]:
        """What pip would add, and what it would have to replace, with the requirement that asks for it."""
        environment = {
            "python_version": self.python, "python_full_version": f"{self.python}.0", "sys_platform": "linux", "os_name": "posix",
            "platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython", "extra": "",
            "platform_python_implementation": "CPython",
        }  # fmt: skip
        added, replaced, seen = set(), [], set()
        waiting = [("exl2nb", packaging.Requirement(text)) for text in requirements]
        while waiting:
            wanted_by, wanted = waiting.pop()
            if wanted.marker is not None and not wanted.marker.evaluate(environment):
                continue
            name = normal(wanted.name)
            version = self.packages.get(name)
            if version is None:
                added.add(name)
            elif version and not wanted.specifier.contains(version, prereleases=True):
                replaced.append(f"{name} {version}: {wanted_by} asks for {wanted}")
            if name not in seen:
                seen.add(name)
                assert name in self.requires, f"{name} is new: run tools/hosted_packages.py"
                waiting += [(name, packaging.Requirement(text)) for text in self.requires[name]]
        return added, replaced


@pytest.fixture(params=["colab", "kaggle"])
def image(request):
    return Image(request.param)


def test_lists_are_whole(image):
    """Of the whole image, so that a dependency that we come to have is in it, too."""
    assert len(image.packages) > 600
    assert {"torch", "numpy", "ipywidgets", "anywidget", "traitlets", "ipykernel", "tornado", "pyzmq"} <= image.packages.keys()


def test_nothing_is_replaced(image):
    added, replaced = image.install(OURS)
    assert not replaced
    assert added == ADDED


def test_without_dependencies_nothing_is_missing(image):
    """The first cell of the notebooks installs with --no-deps."""
    assert {normal(packaging.Requirement(text).name) for text in OURS} <= image.packages.keys()


def test_a_requirement_that_replaces_something_is_found():
    colab, kaggle = Image("colab"), Image("kaggle")
    assert colab.install(["numpy>=2.2"])[1] == ["numpy 2.1.3: exl2nb asks for numpy>=2.2"]
    assert kaggle.install(["ipywidgets<8"])[1] == ["ipywidgets 8.1.5: exl2nb asks for ipywidgets<8"]
    colab.requires["tokenizers"] = ["huggingface-hub>=2"]
    assert colab.install(["tokenizers"])[1] == ["huggingface-hub 1.27.0: tokenizers asks for huggingface-hub>=2"], "one step further"

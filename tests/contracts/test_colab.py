"""What Colab has preinstalled satisfies what we ask for, so that installing exl2nb there replaces nothing and asks for no restart."""

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
COLAB = {"torch": "2.11.0", "numpy": "2.1.3", "ipywidgets": "7.7.1", "anywidget": "0.9.21", "traitlets": "5.7.1"}
"""Runtime of August 2026, googlecolab/backend-info a724079."""
LOOSE = {"safetensors", "tokenizers", "huggingface_hub", "jinja2", "pandas", "jupyterlab"}
"""Versions there were not looked up (jupyterlab is not there at all): a lower bound of long ago, and no upper one."""
NEVER = {"ipython", "ipykernel", "tornado", "pyzmq", "jupyter-server", "jupyter_server", "notebook", "ipyparallel"}
"""Replacing one of these asks for a restart, or breaks Colab's own front end."""


def requirements():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [packaging.Requirement(text) for text in data["project"]["dependencies"]]


def test_every_dependency_is_known_here():
    assert {r.name for r in requirements()} == {*COLAB, *LOOSE}, "say what Colab has of it"
    assert not {r.name.lower() for r in requirements()} & NEVER


@pytest.mark.parametrize("requirement", requirements(), ids=lambda r: r.name)
def test_nothing_is_replaced(requirement):
    if requirement.name in LOOSE:
        assert all(part.operator == ">=" for part in requirement.specifier), f"{requirement} could force another version on Colab"
    else:
        there = COLAB[requirement.name]
        assert requirement.specifier.contains(there), f"Colab has {requirement.name} {there}; asking for {requirement} replaces it"


def test_a_source_install_builds_for_one_gpu():
    """auto asks the driver for this machine's GPU and takes no list of architectures then."""
    cmake = (ROOT / "CMakeLists.txt").read_text()
    assert "nvidia-smi --query-gpu=compute_cap" in cmake
    asked = cmake.index("elseif(gpu_archs)")
    assert asked < cmake.index("75-real 80-real 90 120-real"), "the long list is for machines without a GPU alone"


def test_the_wheel_script_refuses_another_toolkit(tmp_path):
    fake = tmp_path / "nvcc"
    fake.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.48'\n")
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", ".ci/wheel_cuda12"],
        cwd=ROOT,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDACXX": str(fake)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert re.search(r"release 13\.0.*expected 12\.8 or a later 12", done.stderr + done.stdout)

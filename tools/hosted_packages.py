"""What Colab and Kaggle have installed, for tests/contracts/test_hosted.py: one package a line, and what those that we reach require.

    python tools/hosted_packages.py colab FREEZE --python 3.13
    python tools/hosted_packages.py kaggle FREEZE --python 3.12 --replaced ipywidgets==8.1.5 jupyter_server==2.12.5 ...

FREEZE is `pip freeze` of the image: pip-freeze.gpu.txt of googlecolab/backend-info. Kaggle publishes no such list: its image is Colab's of
a given day (the first lines of Kaggle/docker-python's Dockerfile.tmpl) with the packages of kaggle_requirements.txt over it, so FREEZE is
Colab's of that day, and --replaced names what Kaggle pins or takes anew (NAME alone: in a version that nobody publishes).

pip itself resolves our dependencies with everything in the list held where it is, and fails if that cannot be done. Its report gives what
each package requires; pip reads markers as the running Python does, the test as the image's. Needs pip 23.1 and the package index, of which
it takes metadata only.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data" / "hosted"
CUDA = re.compile(r"(nvidia|cuda|triton)\b")
"""Packages of NVIDIA's: torch there is built for another CUDA than the index's, and requires others. They come with that torch."""


def normal(name: str) -> str:
    """A package's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def frozen(path: Path) -> dict[str, str]:
    """Name -> version of the lines NAME==VERSION; what was installed from elsewhere is on no index and nothing of ours needs it."""
    pairs = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", path.read_text(encoding="utf-8"), re.M)
    return {normal(name): version for name, version in pairs}


def resolve(packages: dict[str, str], python: str) -> dict[str, list[str]]:
    """Package -> its requirements, for everything that our dependencies reach. No requirements of extras, nor of NVIDIA's packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with tempfile.TemporaryDirectory() as folder:
        held, report = Path(folder) / "constraints.txt", Path(folder) / "report.json"
        held.write_text("".join(f"{n}=={v.split('+')[0]}\n" for n, v in packages.items() if not CUDA.match(n)), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--only-binary=:all:"]
        command += ["--python-version", python, "--target", f"{folder}/none", "--constraint", str(held), "--report", str(report)]
        subprocess.run([*command, *project["dependencies"]], check=True)
        found = [entry["metadata"] for entry in json.loads(report.read_text(encoding="utf-8"))["install"]]
    return {
        normal(package["name"]): [text for text in package.get("requires_dist", []) if "extra ==" not in text and not CUDA.match(text)]
        for package in sorted(found, key=lambda package: normal(package["name"]))
        if not CUDA.match(package["name"])
    }


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", choices=("colab", "kaggle"))
    parser.add_argument("freeze", type=Path)
    parser.add_argument("--python", required=True, help="the image's Python, such as 3.13")
    parser.add_argument("--replaced", nargs="*", default=[], metavar="NAME[==VERSION]")
    parser.add_argument("--source", default="", help="where the list comes from, for its first line")
    args = parser.parse_args()
    packages = frozen(args.freeze)
    for text in args.replaced:
        name, _, version = text.partition("==")
        packages[normal(name)] = version
    requires = resolve({name: version for name, version in packages.items() if version}, args.python)
    DATA.mkdir(parents=True, exist_ok=True)
    lines = [f"# {args.source}; Python {args.python}", *(f"{name}=={version}" for name, version in sorted(packages.items()))]
    (DATA / f"{args.image}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (DATA / f"{args.image}.json").write_text(json.dumps(requires, indent=1) + "\n", encoding="utf-8")
    print(f"{args.image}: {len(packages)} packages, {len(requires)} reached by ours")
    return 0


if __name__ == "__main__":
    sys.exit(main())

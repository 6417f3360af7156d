"""What the tree must not hold and ruff cannot check. The bans of calls, prints, left-overs and missing docstrings are in pyproject.toml."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TOP = {
    "exl2nb", "csrc", "notebooks", "widgets", "tests", "binder", "docs", "tools", "benchmarks", ".ci", ".github", ".devcontainer",
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "LICENSE", "NOTICE", "pyproject.toml", "CMakeLists.txt", "Makefile",
    ".clang-format", ".gitignore", ".pre-commit-config.yaml", "mkdocs.yml",
}  # fmt: skip


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [p for line in done.stdout.splitlines() if (p := ROOT / line).is_file()]


def test_the_package_uses_no_builtin_that_asks_or_exits():
    """ruff's TID251 bans names of modules only, not builtins."""
    banned = {"input", "exit", "quit", "NotImplementedError"}
    used = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.id}"
        for path in (ROOT / "exl2nb").rglob("*.py")
        if re.search(rf"\b({'|'.join(banned)})\b", text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Name) and node.id in banned and isinstance(node.ctx, ast.Load)
    }
    assert not used


def test_no_paths_of_a_machine():
    """Sources, prose and notebooks name no folder of the machine they were written on."""
    pattern = re.compile(r"""["'`( =](/(work|root|home|Users)/|(\.\./)+shared/(data|demo-model|fixtures|specs|prototype)\b)""")
    suffixes = {".py", ".md", ".ipynb", ".cpp", ".h", ".inc", ".cu", ".cuh", ".ts", ".toml", ".txt", ".json", ""}
    texts = [p for p in tracked() if p.suffix in suffixes and p.stat().st_size < 1 << 20 and p != Path(__file__)]
    assert not [f"{p.relative_to(ROOT)}: {m.group()}" for p in texts if (m := pattern.search(p.read_text(errors="replace")))]


def test_the_top_level_stays_short():
    """The tree is the diagram: what GitHub also reads from .github goes there."""
    assert {path.relative_to(ROOT).parts[0] for path in tracked()} == TOP


def test_no_huge_files():
    assert not [str(p.relative_to(ROOT)) for p in tracked() if p.stat().st_size > 30 * 2**20]

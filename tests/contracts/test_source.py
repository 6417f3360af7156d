"""What the package's source must not hold, read from its syntax trees."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "exl2nb").rglob("*.py"))
CLI = ROOT / "exl2nb" / "cli"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# a library never prints, never ends or reconfigures the process it lives in
FORBIDDEN = {
    "print",
    "exit",
    "quit",
    "input",
    "sys.exit",
    "os._exit",
    "signal.signal",
    "torch.set_num_threads",
    "torch.set_num_interop_threads",
}
FORBIDDEN |= {
    "torch.set_default_dtype",
    "torch.set_grad_enabled",
    "torch.manual_seed",
    "np.random.seed",
    "random.seed",
    "os.environ.setdefault",
    "os.putenv",
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_no_forbidden_calls(path):
    calls = [(node.lineno, ast.unparse(node.func)) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    allowed = {"print", "sys.exit"} if CLI in path.parents else set()
    assert not [f"{name(path)}:{line} {func}" for line, func in calls if func in FORBIDDEN - allowed]


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_public_functions_have_docstrings(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{name(path)} has no module docstring"
    kinds = (*DEFINITIONS, ast.ClassDef)
    missing = [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_") and not ast.get_docstring(node)]
    assert not missing


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_no_left_overs(path):
    words = "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error"])
    found = [f"{name(path)}:{i}" for i, line in enumerate(path.read_text().splitlines(), 1) if re.search(rf"\b({words})\b", line)]
    assert not found


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [p for line in done.stdout.splitlines() if (p := ROOT / line).is_file()]


def test_no_paths_of_a_machine():
    """Sources, prose and notebooks name no folder of the machine they were written on."""
    pattern = re.compile(r"""["'`( =](/(work|root|home|Users)/|(\.\./)+shared/(data|demo-model|fixtures|specs|prototype)\b)""")
    suffixes = {".py", ".md", ".ipynb", ".cpp", ".h", ".inc", ".cu", ".cuh", ".ts", ".toml", ".txt", ".json", ""}
    texts = [p for p in tracked() if p.suffix in suffixes and p.stat().st_size < 1 << 20 and p != Path(__file__)]
    assert not [f"{name(p)}: {m.group()}" for p in texts if (m := pattern.search(p.read_text(errors="replace")))]


def test_no_huge_files():
    assert not [name(p) for p in tracked() if p.stat().st_size > 30 * 2**20]

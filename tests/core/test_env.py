import re
from pathlib import Path

import pytest

from exl2nb.core import env
from exl2nb.core.errors import OptionError

ROOT = Path(__file__).parents[2]


def test_default_when_unset_or_empty(monkeypatch):
    monkeypatch.delenv("EXL2NB_ISA", raising=False)
    assert env.get("EXL2NB_ISA", "avx2") == "avx2"
    monkeypatch.setenv("EXL2NB_ISA", "")
    assert env.get("EXL2NB_ISA", "avx2") == "avx2"


def test_value_that_does_not_parse_is_an_error(monkeypatch):
    monkeypatch.setenv("EXL2NB_ISA", "avx3")
    with pytest.raises(OptionError, match="EXL2NB_ISA is 'avx3'; expected one of base, avx2, avx512"):
        env.get("EXL2NB_ISA", "base")


def test_the_table_is_all_of_them():
    """Every EXL2NB_ variable that the package or the kernels read stands in the table (the build's two are CMake's)."""
    build = {"EXL2NB_CUDA", "EXL2NB_TORCH_DIR", "EXL2NB_X86"}
    files = [p for folder in ("exl2nb", "csrc") for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".cpp", ".h", ".inc", ".cu")]
    read = {m for p in files for m in re.findall(r"""(?:getenv\(|environ\[|environ\.get\(|env\.get\()\s*"(EXL2NB_\w+)""", p.read_text())}
    assert read - build <= set(env.VARIABLES)

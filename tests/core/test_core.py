"""Environment variables, options and registries."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from exl2nb.core import env
from exl2nb.core.errors import OptionError, UnknownArchitecture
from exl2nb.core.options import Registry, check_keywords, check_range, make

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
    assert read - build <= set(env.ENV_VARIABLES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0
    state: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        check_range("temperature", self.temperature, 0, 10, where="Params")


def test_make_builds_the_dataclass():
    assert make(Params, {"top_k": 3}) == Params(temperature=1.0, top_k=3)


def test_unknown_keyword_names_the_nearest_or_lists_all():
    with pytest.raises(OptionError, match=r"generate: unknown keyword 'temprature'; did you mean 'temperature'\?"):
        make(Params, {"temprature": 1}, where="generate")
    with pytest.raises(OptionError, match=r"Params: unknown keyword 'zzz'; known: temperature, top_k"):
        make(Params, {"zzz": 1})
    with pytest.raises(OptionError, match="unknown keyword 'state'"):
        make(Params, {"state": 1})


@pytest.mark.parametrize("value", [-0.1, 10.1, math.nan, math.inf, "1", None, True])
def test_number_out_of_range_is_refused(value):
    with pytest.raises(OptionError, match="temperature is .*expected a number from 0 to 10"):
        Params(temperature=value)
    assert [Params(temperature=good).temperature for good in (0, 10, 0.5)] == [0, 10, 0.5]


def test_check_keywords_takes_known_ones():
    given = {"a": 1}
    assert check_keywords(given, ["a", "b"], where="f") is None
    assert given == {"a": 1}, "nothing is taken out"


def table():
    registry = Registry("architecture", UnknownArchitecture)
    registry.register("Beta", "Gamma")("b")
    registry.register("Alpha")("a")
    return registry


def test_finds_by_every_name():
    registry = table()
    assert (registry["Alpha"], registry["Beta"], registry["Gamma"]) == ("a", "b", "b")
    assert "Beta" in registry
    assert "Delta" not in registry
    assert list(registry) == ["Alpha", "Beta", "Gamma"]


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownArchitecture, match="unknown architecture 'Delta'; known: Alpha, Beta, Gamma"):
        table()["Delta"]


def test_a_name_is_given_once():
    with pytest.raises(AssertionError, match="registered twice"):
        table().register("Alpha")("again")

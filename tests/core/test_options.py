import dataclasses
import math

import pytest

from exl2nb.core.errors import OptionError
from exl2nb.core.options import check_keywords, check_range, make


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0

    def __post_init__(self):
        check_range("temperature", self.temperature, 0, 10, where="Params")


def test_make_builds_the_dataclass():
    assert make(Params, {"top_k": 3}) == Params(temperature=1.0, top_k=3)


def test_unknown_keyword_names_the_nearest():
    with pytest.raises(OptionError, match=r"generate: unknown keyword 'temprature'; did you mean 'temperature'\?"):
        make(Params, {"temprature": 1}, where="generate")


def test_unknown_keyword_without_a_neighbour_lists_all():
    with pytest.raises(OptionError, match=r"Params: unknown keyword 'zzz'; known: temperature, top_k"):
        make(Params, {"zzz": 1})


def test_fields_that_are_not_init_are_no_keywords():
    @dataclasses.dataclass
    class State:
        count: int = dataclasses.field(default=0, init=False)

    with pytest.raises(OptionError, match="count"):
        make(State, {"count": 1})


@pytest.mark.parametrize("value", [-0.1, 10.1, math.nan, math.inf, "1", None, True])
def test_range_refuses(value):
    with pytest.raises(OptionError, match="temperature is .*expected a number from 0 to 10"):
        Params(temperature=value)


@pytest.mark.parametrize("value", [0, 10, 0.5])
def test_range_takes_its_ends(value):
    assert Params(temperature=value).temperature == value


def test_check_keywords_takes_known_ones():
    given = {"a": 1}
    assert check_keywords(given, ["a", "b"], where="f") is None
    assert given == {"a": 1}, "nothing is taken out"

import dataclasses

import pytest

from exl2nb.core.errors import OptionError
from exl2nb.sampling.params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.5),
    ],
)
def test_out_of_range(name, value):
    with pytest.raises(OptionError, match=name):
        SamplingParams(**{name: value})


def test_unknown_keyword_names_the_nearest():
    with pytest.raises(OptionError, match=r"generate: unknown keyword 'temprature'; did you mean 'temperature'"):
        SamplingParams.of(where="generate", temprature=1)


def test_defaults_are_neutral():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty) == (1.0, 0, 1.0, 0.0, 1.0)
    assert not params.greedy
    assert SamplingParams(temperature=0).greedy


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 2.0  # type: ignore[misc]

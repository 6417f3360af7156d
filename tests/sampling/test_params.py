import dataclasses

import pytest

from exl2nb.core.errors import OptionError
from exl2nb.sampling.params import SAMPLING_OPTIONS, SAMPLING_PRESETS, SamplingParams

BAD_VALUES = {
    "temperature": [-0.1, float("nan"), "hot"],
    "top_k": [-1, 2.5, True],
    "top_p": [0.0, 1.01],
    "tfs": [0.0],
    "typical_p": [0.0],
    "min_p": [-0.1, 1.5],
    "smoothing_curve": [0.5],
    "repetition_penalty": [0.0],
    "mirostat": [2],
    "temperature_last": ["yes"],
    "dry_allowed_length": [0],
    "dry_breakers": [[""], [1.5], 5, [-1]],
    "logit_bias": [{"a": 1.0}, {1: float("inf")}, {1: "much"}, [1, 2], [(1, 2.0), (1, 3.0)]],
    "banned_tokens": ["abc", [1.0], 7],
    "allowed_tokens": [[-1]],
    "xtc_ignore": [[True]],
    "post_sampling": [["print"]],
    "min_tokens": [-1],
    "seed": [-1, 2**64, 1.5],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_VALUES.items() for value in values])
def test_bad_values_are_named(name, value):
    with pytest.raises(OptionError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", [name for name, one in SAMPLING_OPTIONS.items() if one.kind in (int, float)])
def test_every_number_has_its_range(name):
    low, high = SAMPLING_OPTIONS[name].range
    for value in (low - 1, high + 1, "1", *([] if SAMPLING_OPTIONS[name].optional else [None])):
        with pytest.raises(OptionError, match=name):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"min_temp": 1.0, "max_temp": 0.5}, "min_temp <= max_temp"),
        ({"max_temp": 1.5, "temperature": 0.8}, "takes the place of temperature"),
        ({"penalty_decay": 5}, "penalty_range 0"),
        ({"banned_tokens": [1, 2], "allowed_tokens": [2, 3]}, r"tokens \[2\] are both"),
        ({"order": ["top_q"]}, "order holds 'top_q'; known: repetition_penalty"),
        ({"order": ["banned_tokens"]}, "masks always come first"),
        ({"order": ["top_p", "top_p"]}, "each filter once"),
        ({"order": ["top_p", "dry"]}, "before the others"),
        ({"order": ["top_p"], "top_p": 0.9, "min_p": 0.1}, "leaves out min_p"),
        ({"order": "top_p"}, "expected a list"),
        ({"order": ["temperature"], "temperature_last": True, "temperature": 2.0}, "put 'temperature' into order"),
    ],
)
def test_contradicting_settings_and_bad_orders(kwargs, message):
    with pytest.raises(OptionError, match=message):
        SamplingParams(**kwargs)


def test_every_field_has_a_range_or_a_check():
    """A field added without a check would take anything."""
    assert list(SAMPLING_OPTIONS) == [f.name for f in dataclasses.fields(SamplingParams)], "a field is not declared with `option`"
    free = {name for name, one in SAMPLING_OPTIONS.items() if one.kind is None}
    assert free <= BAD_VALUES.keys() | {"order"}, "a field of its own type needs a check of its own, and bad values above"


def test_unknown_keyword_names_the_nearest():
    with pytest.raises(OptionError, match=r"generate: unknown keyword 'temprature'; did you mean 'temperature'"):
        SamplingParams.of(where="generate", temprature=1)
    with pytest.raises(OptionError, match="did you mean 'typical_p'"):
        SamplingParams.of(where="x", typcal_p=1)


def test_defaults_are_neutral():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty) == (1.0, 0, 1.0, 0.0, 1.0)
    assert not params.greedy
    assert params.changed == {}
    assert SamplingParams(temperature=0).greedy


def test_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 2.0  # type: ignore[misc]
    one = SamplingParams(logit_bias={3: 1, 1: -2.5}, banned_tokens=[9, 2, 2], dry_breakers=["x"])
    assert one.logit_bias == ((1, -2.5), (3, 1.0))
    assert one.banned_tokens == (2, 9)
    assert hash(one) == hash(SamplingParams(logit_bias=[(1, -2.5), (3, 1.0)], banned_tokens=(2, 9), dry_breakers=("x",)))
    assert dataclasses.replace(one, temperature=0.5).logit_bias == one.logit_bias


def test_presets():
    for name in SAMPLING_PRESETS:
        SamplingParams.preset(name)
    assert SamplingParams.preset("creative", seed=3, min_p=0.1).min_p == 0.1
    assert SamplingParams.preset("greedy").greedy
    assert SamplingParams.preset("exllamav2").changed == {"temperature": 0.8, "top_k": 50, "top_p": 0.8, "repetition_penalty": 1.025}
    with pytest.raises(OptionError, match="unknown preset 'cool'; known: balanced"):
        SamplingParams.preset("cool")
    with pytest.raises(OptionError, match="preset 'open': unknown keyword"):
        SamplingParams.preset("open", topp=0.3)


@pytest.mark.parametrize("name", ["banned_tokens", "allowed_tokens", "logit_bias", "xtc_ignore", "dry_breakers"])
def test_ids_outside_the_vocabulary(name):
    params = SamplingParams(**{name: {100: 1.0} if name == "logit_bias" else [100]})
    with pytest.raises(OptionError, match="generate: token 100 is not in the model's vocabulary; expected ids from 0 to 99"):
        params.check_vocabulary(100, where="generate")
    params.check_vocabulary(101)

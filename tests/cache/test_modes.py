import pytest

from exl2nb.cache.modes import MODES, parse_mode, storages_of
from exl2nb.cache.spec import CacheSpec
from exl2nb.cache.storage import STORAGES
from exl2nb.core.errors import OptionError


@pytest.mark.parametrize(
    ("given", "name", "stored"),
    [
        ("Q4", "q4", ("q4", "q4")),
        ("k8v4", "q6", ("q8", "q4")),
        ("K4V4", "q4", ("q4", "q4")),
        ("k16v16", "fp16", ("fp16", "fp16")),
        ("k4v8", "k4v8", ("q4", "q8")),
        ("k16v8", "k16v8", ("fp16", "q8")),
        ("fp8", "fp8", ("fp8", "fp8")),
    ],
)
def test_two_names_of_one_thing_are_one(given, name, stored):
    assert parse_mode(given) == name
    assert storages_of(given) == stored
    assert CacheSpec(1, 1, 64, 1, given) == CacheSpec(1, 1, 64, 1, name)


def test_every_mode_names_storages_that_exist():
    assert all(kind in STORAGES for pair in MODES.values() for kind in pair)


@pytest.mark.parametrize("wrong", ["q5", "k6v4", "k8", "v8k4", "", "k8v4 ", None, 4, "fp64"])
def test_anything_else_is_refused(wrong):
    with pytest.raises(OptionError, match=r"load: unknown cache mode .*; known: fp32, fp16, fp8, q8, q6, q4, or bits of K and V apart"):
        parse_mode(wrong, where="load")

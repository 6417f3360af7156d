import pytest

from exl2nb.core.errors import UnknownArchitecture
from exl2nb.core.registry import Registry


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

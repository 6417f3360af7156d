"""Options are declared once: what repeats them is held to the dataclass, field by field."""

import argparse
import re
from pathlib import Path
from typing import get_args, get_origin

import pytest

from exl2nb.cli.sampling import SAMPLING_FLAGS, add_options
from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.converter.convert_keywords import ConvertOptions, ConvertParams
from exl2nb.core.options import options_of
from exl2nb.generator.request import Request
from exl2nb.llm.load import load
from exl2nb.llm.load_keywords import LoadOptions, LoadParams
from exl2nb.sampling.filters import CHAIN
from exl2nb.sampling.params import SamplingOptions, SamplingParams

ROOT = Path(__file__).parents[2]
DECLARED = {SamplingParams: SamplingOptions, ConvertParams: ConvertOptions, LoadParams: LoadOptions}
"""Dataclasses of options, and the types of their keywords."""
CHECKED_ELSEWHERE = ("gpu_layers", "stream_from", "rope_scale", "rope_alpha", "rope_theta")  # by the parts that use them
EVERY = [pytest.param(one, id=f"{cls.__name__}.{one.name}") for cls in (*DECLARED, Request) for one in options_of(cls).values()]


@pytest.mark.parametrize("cls", DECLARED, ids=lambda cls: cls.__name__)
def test_the_types_of_keywords_are_those_of_the_fields(cls):
    kinds = {name: kind.__forward_arg__ for name, kind in DECLARED[cls].__annotations__.items()}
    names = [name for name in options_of(cls) if name not in ("bpw",)]  # bpw is a parameter of its own
    assert list(kinds) == names, f"{DECLARED[cls].__name__} and {cls.__name__} name other options, or in another order"
    for name, one in options_of(cls).items():
        if name in kinds and one.kind is not None and not one.choices:
            expected = f"{one.kind.__name__} | None" if one.optional else one.kind.__name__
            assert kinds[name] == expected, f"{DECLARED[cls].__name__}: {name} is {kinds[name]}, the field is {expected}"


@pytest.mark.parametrize(("function", "cls"), [(ConversionJob, ConvertParams), (load, LoadParams)])
def test_docstrings_describe_every_option(function, cls):
    text = function.__doc__.partition("Args:")[2].partition("Raises:")[0]
    described = re.findall(r"^ {8}(\w[\w, ]*):", text, re.M)
    missing = options_of(cls).keys() - {name for names in described for name in names.split(", ")}
    assert not missing, f"the docstring of {function.__name__} does not describe {missing}"


@pytest.mark.parametrize("one", EVERY)
def test_what_is_said_of_an_option_fits_together(one):
    assert one.help and not one.help.endswith("."), "help is a line without a full stop"
    if one.default is not None:
        one.check(one.default)
    if one.kind in (int, float) and one.name not in CHECKED_ELSEWHERE:
        assert one.range is not None, "a number needs a range"
    if one.slider is not None:
        low, high = one.range
        assert low <= one.slider.low < one.slider.high <= high, "the slider leaves the range"
        assert one.slider.step > 0 and one.slider.low <= one.default, "the slider does not begin below the default"
    assert bool(one.label) == (one.slider is not None or (one.kind is bool and bool(one.hint))), (
        "a control needs a label, and a slider or a hint"
    )


def test_every_filter_reads_declared_options_and_says_what_it_does():
    for used in CHAIN:
        assert set(used.fields) | {used.switch} <= options_of(SamplingParams).keys(), f"{used.name} reads an option that does not exist"
        assert used.about, f"{used.name} does not say what it does"


def test_the_command_line_has_a_flag_for_every_number_and_switch():
    parser = argparse.ArgumentParser()
    add_options(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    numbers = {one.flag for one in options_of(SamplingParams).values() if one.kind is not None and one.name != "mirostat"}  # by its tau
    assert None not in numbers and numbers <= flags
    assert {one.flag for one in SAMPLING_FLAGS.values()} <= flags


def test_requests_to_the_server_take_every_number_and_switch():
    pytest.importorskip("fastapi")
    from exl2nb.server.fields import Sampling, own_names

    names = own_names(Sampling)
    for one in (*options_of(SamplingParams).values(), *options_of(Request).values()):
        if one.kind is None:
            continue
        assert one.name in names, f"no field of a request is called {one.name}"
        assert all(names[alias] == names[one.name] for alias in one.aliases)
        kind = Sampling.model_fields[names[one.name]].annotation
        assert one.name == "mirostat" or one.kind in get_args(kind), f"{one.name} is {kind}"
        assert get_origin(kind) is not None, "a field that is not given is None"


def test_the_guide_names_options_that_exist_and_the_values_that_do_nothing():
    text = (ROOT / "docs" / "guide" / "sampling.md").read_text(encoding="utf-8")
    options = options_of(SamplingParams)
    table = re.search(r"\| option \| off \| effect \|\n.*\n((?:\|.*\n)+)", text)
    rows = [[cell.strip() for cell in row.split("|")[1:3]] for row in table.group(1).splitlines()]
    listed = [(re.findall(r"`(\w+)`", names), off.split(", ")) for names, off in rows]
    assert sum(len(names) for names, _ in listed) > 15, "the table of options was not found"
    for names, off in listed:
        assert set(names) <= options.keys(), f"sampling.md names {set(names) - options.keys()}, which are no options"
        values = off * len(names) if len(off) == 1 else off
        for name, value in zip(names, values, strict=True):
            neutral = {"()": "empty"}.get(str(options[name].default), f"{options[name].default}".removesuffix(".0"))
            assert value in ("", neutral), f"sampling.md says that {name} is off at {value}; it is {neutral}"

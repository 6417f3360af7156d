"""`exl2nb convert` and `exl2nb measure` on a tiny model: every way to say what is wanted reaches the conversion."""

import json

import pytest

from exl2nb.converter.allocation import read_choices
from exl2nb.core.errors import OptionError
from tests.converter.test_conversion_job import TEXT, write_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text.txt").write_text(TEXT[0])
    return write_model(folder / "tiny"), folder


def common(folder):
    return "--calibration", folder / "text.txt", "--rows", 4, "--length", 32, "--report-rows", 0, "--device", "cpu"


def test_measure_then_convert_with_overrides_and_frozen_choices(tiny, cli_json):
    source, folder = tiny
    measuring = [word for word in common(folder) if word not in ("--report-rows", 0)]
    found = cli_json("measure", source, folder / "m.json", *measuring, "--bpw", 4, "--bpw", 5)
    assert found["matrices"] == 22
    assert [plan["target"] for plan in found["plans"]] == ["4 bpw", "5 bpw"]
    given = "--measurement", folder / "m.json"
    first = cli_json("convert", source, folder / "a", "--bpw", 4.5, *common(folder), *given, "--override", "layer 0=6-8")
    assert min(bpw for key, bpw in first["matrices"].items() if ".layers.0." in key) > 6
    assert first["bpw"] <= 4.5
    second = cli_json("convert", source, folder / "b", "--bytes", 120_000, *common(folder), *given, "--frozen", folder / "a")
    assert second["matrices"] == first["matrices"]  # every choice was kept, the head's too
    overrides = "--override", "head=8", "--override", "*.down_proj=3"
    fits = "--fits", "1MB", "--context", 512, "--cache", "q8"
    third = cli_json("convert", source, folder / "c", *fits, *common(folder), *given, *overrides)
    assert third["bytes"] < 1_000_000 * 0.96
    assert all(bpw < 5 for key, bpw in third["matrices"].items() if key.endswith("down_proj"))
    assert third["matrices"]["lm_head"] > 8


@pytest.mark.parametrize("wrong", ["layer 0", "v=many", "=4", "v=4-"])
def test_bad_overrides(tiny, refused, wrong):
    source, folder = tiny
    text = refused("convert", source, folder / "none", "--bpw", 4, *common(folder), "--override", wrong)
    assert repr(wrong) in text
    assert "'layer 0=6'" in text


def test_choices_are_read_from_a_model_a_plan_or_a_file(tiny, cli_json):
    source, folder = tiny
    cli_json("convert", source, folder / "d", "--bpw", 5, *common(folder))
    found = read_choices(folder / "d")
    assert len(found) == 22
    assert all(sum(rows for _, rows in groups) in (64, 96) for groups in found.values())
    (folder / "choices.json").write_text(json.dumps(found))
    assert read_choices(folder / "choices.json") == found == read_choices(found)
    table = {"choices": [{"key": key, "groups": groups} for key, groups in found.items()]}
    (folder / "plan.json").write_text(json.dumps(table))
    assert read_choices(folder / "plan.json") == found
    (folder / "other.json").write_text('{"a": 4}')
    with pytest.raises(OptionError, match="found no choices"):
        read_choices(folder / "other.json")
    with pytest.raises(OptionError, match="no EXL2 matrix"):
        read_choices(source)

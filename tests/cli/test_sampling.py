"""Sampling options and structured output on the command line."""

import argparse
import json
from dataclasses import fields

import pytest

from exl2nb.cli import main
from exl2nb.cli.sampling import MORE, OPTIONS, add_options, given_options
from exl2nb.sampling.params import SamplingParams


def parse(*words):
    parser = argparse.ArgumentParser()
    add_options(parser)
    return given_options(parser.parse_args(words))


def test_nothing_given_is_nothing_asked():
    assert parse() == {}


def test_every_option_is_a_setting():
    own = {f.name for f in fields(SamplingParams)} | {"max_tokens"}
    assert own >= {*OPTIONS, *MORE}
    assert own - {*OPTIONS, *MORE} == {
        *("temperature_last", "mirostat", "xtc_ignore", "dry_range", "dry_max_ngram", "dry_breakers"),
        *("logit_bias", "banned_tokens", "allowed_tokens", "order", "post_sampling"),
    }


def test_names_and_values():
    given = parse("--typical-p", "0.9", "--dry-multiplier", "0.8", "--temperature-last", "--ban", "5", "--ban", "7", "--mirostat-tau", "4")
    assert given == {
        "typical_p": 0.9,
        "dry_multiplier": 0.8,
        "temperature_last": True,
        "banned_tokens": [5, 7],
        "mirostat_tau": 4.0,
        "mirostat": True,
    }
    SamplingParams(**given)


def test_presets_and_what_comes_on_top():
    assert parse("--preset", "balanced", "--top-p", "0.5") == {"temperature": 0.8, "top_p": 0.5}


def test_files_are_read(tmp_path):
    (tmp_path / "s.json").write_text('{"type": "integer"}')
    assert parse("--schema", str(tmp_path / "s.json")) == {"schema": '{"type": "integer"}'}


def test_generate_with_a_schema(tmp_path, capsys):
    (tmp_path / "s.json").write_text(json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}))
    assert main(["generate", "demo", "--prompt", "x", "--schema", str(tmp_path / "s.json"), "--seed", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(json.loads(found["text"])) == 2
    assert found["finish_reason"] in ("stop", "eos")


def test_generate_with_a_choice(capsys):
    assert main(["generate", "demo", "--prompt", "x", "--choice", "left", "--choice", "right", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] in ("left", "right")


@pytest.mark.parametrize("words", [["--schema", "/no/such/file"], ["--regex", "("], ["--regex", "a", "--choice", "b"], ["--tfs", "0"]])
def test_errors_are_told_in_one_line(words, capsys):
    assert main(["generate", "demo", "--prompt", "x", *words]) != 0
    assert "Traceback" not in capsys.readouterr().err

"""`exl2nb chat` samples as the model recommends, and says so."""

import argparse
import json
from dataclasses import fields
from pathlib import Path

import pytest

import exl2nb as ex
from exl2nb.cli import serve
from exl2nb.sampling.params import SAMPLING_PRESETS
from exl2nb.server.server_options import ServerOptions

DEMO = Path(ex.__file__).parent / "demo_model"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The demo model with a generation_config.json that recommends values."""
    folder = tmp_path_factory.mktemp("recommends")
    for path in DEMO.iterdir():
        if path.name != "generation_config.json":
            (folder / path.name).symlink_to(path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.6, "top_k": 20, "top_p": 0.95}))
    return folder


WORDS = ("--template", "vicuna", "--message", "It was", "--max-tokens", "4")


@pytest.mark.parametrize(
    ("words", "sampling", "source"),
    [
        ((), {"temperature": 0.6, "top_p": 0.95, "top_k": 20}, "generation_config.json"),
        (("--temperature", "0.2"), {"temperature": 0.2, "top_p": 0.95, "top_k": 20}, "generation_config.json"),
        (("--no-generation-config",), {"temperature": 0.7, "top_p": 0.95}, "exl2nb"),
        (("--preset", "balanced"), SAMPLING_PRESETS["balanced"], ""),  # a preset is whole
        (("--preset", "neutral"), {}, ""),
    ],
)
def test_chat(cli_json, model, words, sampling, source):
    found = cli_json("chat", model, *WORDS, *words)
    assert found["sampling"] == sampling
    assert found["sampling_defaults"]["source"] == source


def test_chat_says_what_it_uses(cli, model):
    assert "[sampling] temperature 0.6, top_p 0.95, top_k 20 from generation_config.json\n" in cli("chat", model, *WORDS)[2]
    assert "[sampling]" not in cli("chat", model, *WORDS, "--preset", "greedy")[2]
    assert "[sampling]" not in cli("chat", model, *WORDS, "--quiet")[2]


def test_generate_stays_at_temperature_1(cli_json, model):
    found = cli_json("generate", model, "--prompt", "It was", "--max-tokens", "2")
    assert (found["sampling"], found["sampling_defaults"]) == ({}, {"source": ""})


def test_serve_takes_the_flag():
    """It is an option of the server, so it holds for models that are loaded later, too."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    assert "generation_config" in {field.name for field in fields(ServerOptions)}.difference(serve.LOADING_OPTIONS)
    assert parser.parse_args(["demo", "--no-generation-config"]).generation_config is False
    assert parser.parse_args(["demo"]).generation_config is None

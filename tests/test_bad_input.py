"""Bad input of every kind, through Python and the command line: a named error that says what, found, expected and what to do; nothing
half-written under the final name; and the engine that was running before answers as before."""

import importlib.util
import json
import math
import os
import resource
import shutil
import struct
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import exl2nb as ex
from exl2nb.cli import main
from exl2nb.core.errors import (
    ConfigError,
    ContextOverflow,
    ConversionError,
    EngineClosed,
    Exl2Error,
    FormatError,
    ModelNotFound,
    OptionError,
    TokenizerError,
    UnknownArchitecture,
)
from exl2nb.io.safetensors import save

ROOT = Path(__file__).parents[1]
FIXTURE = Path(__file__).parent / "data" / "demo-exl2-4.0bpw"
WEIGHTS = "output.safetensors"
Q_WEIGHT = "model.layers.3.mlp.up_proj.q_weight"
GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def bystander():
    """A loaded model and its answer: it must give the same answer after everything that goes wrong beside it."""
    with ex.load(FIXTURE, progress=None) as llm:
        yield llm, llm.generate("It was", **GREEDY).text


@pytest.fixture(autouse=True)
def engine_stays_usable(bystander):
    llm, answer = bystander
    free = llm.engine.pages.num_free
    yield
    assert llm.generate("It was", **GREEDY).text == answer
    assert llm.engine.pages.num_free == free


@pytest.fixture
def model(tmp_path):
    """A copy of the fixture to damage."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "model", copy_function=shutil.copyfile))


def check(directory, error, words, capsys):
    """Loading `directory` raises `error`, whose message holds `words`; the command line says the same in one line and exits with 2."""
    with pytest.raises(error) as caught:
        ex.load(directory, progress=None)
    message = str(caught.value)
    assert type(caught.value) is error
    for word in words:
        assert word in message, message
    assert main(["generate", str(directory), "--prompt", "x", "--max-tokens", "1", "--json", "--quiet"]) == 2
    captured = capsys.readouterr()
    reply = json.loads(captured.out)["error"]
    assert reply["type"] == error.__name__
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err


# ---- weights


def header_of(path):
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def rewrite(path, change):
    """Let `change` edit the header of a safetensors file in place; the data stays."""
    header, data = header_of(path)
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def overlap(header):
    header[Q_WEIGHT]["data_offsets"] = [offset - 64 for offset in header[Q_WEIGHT]["data_offsets"]]


def wrong_dtype(header):
    header[Q_WEIGHT]["dtype"] = "F32"


def unknown_dtype(header):
    header[Q_WEIGHT]["dtype"] = "I5"


def oversized(header):
    header[Q_WEIGHT]["shape"] = [1 << 40, 1 << 40]


def negative(header):
    header[Q_WEIGHT]["shape"][0] *= -1


def beyond_the_end(header):
    start, end = header[Q_WEIGHT]["data_offsets"]
    header[Q_WEIGHT]["data_offsets"] = [start + (1 << 50), end + (1 << 50)]


def transposed(header):
    header[Q_WEIGHT]["shape"].reverse()


def missing(header):
    header["model.layers.3.mlp.other_proj.q_weight"] = header.pop(Q_WEIGHT)


@pytest.mark.parametrize("change", [overlap, wrong_dtype, unknown_dtype, oversized, negative, beyond_the_end, transposed, missing])
def test_damaged_headers(model, change, capsys):
    rewrite(model / WEIGHTS, change)
    check(model, FormatError, ["mlp.up_proj", "found", "expected"] if change is not missing else ["up_proj"], capsys)


@pytest.mark.parametrize("keep", [0, 7, 100, 5_000, 4_000_000])
def test_truncated_files(model, keep, capsys):
    os.truncate(model / WEIGHTS, keep)
    check(model, FormatError, [WEIGHTS, "found", "expected"], capsys)


def test_a_header_longer_than_memory(model, capsys):
    (model / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    check(model, FormatError, [WEIGHTS, "found", "expected"], capsys)


def test_group_table_out_of_order(model, capsys):
    header, _ = header_of(model / WEIGHTS)
    start, _ = header["model.layers.0.self_attn.q_proj.q_groups"]["data_offsets"]
    base = 8 + struct.unpack("<Q", (model / WEIGHTS).read_bytes()[:8])[0]
    with (model / WEIGHTS).open("r+b") as file:
        file.seek(base + start)
        file.write(struct.pack("<hh", 7, 0))
    check(model, FormatError, ["layers.0.self_attn.q_proj", "7", "expected"], capsys)


# ---- config, tokenizer, directory


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 1 << 40),
        ("hidden_size", "many"),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", -1),
        ("vocab_size", None),
        ("hidden_act", "softplus"),
        ("max_position_embeddings", 2.5),
    ],
)
def test_wrong_config_values(model, key, value, capsys):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: value}))
    check(model, ConfigError, [key], capsys)


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2]", '{"hidden_size": NaN}', '{"architectures": []}', "\ud800".encode("utf-8", "surrogatepass")]
)
def test_config_that_is_no_config(model, text, capsys):
    (model / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    check(model, ConfigError, ["config.json"], capsys)


def test_config_that_does_not_fit_the_weights(model, capsys):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 1024}))
    check(model, FormatError, ["1024", "expected"], capsys)


def test_unknown_architecture(model, capsys):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"}))
    check(model, UnknownArchitecture, ["NoSuchForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"], capsys)


@pytest.mark.parametrize(("method", "words"), [("awq", "AWQ"), ("gguf", "llama.cpp"), ("bitsandbytes", "take the original")])
def test_other_quantised_formats(model, method, words, capsys):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    check(model, ConfigError, ["expected exl2, gptq or plain", words], capsys)


def test_settings_of_another_format_beside_the_weights(model, capsys):
    (model / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')
    check(model, ConfigError, ["config.json says exl2, quantize_config.json says gptq", "expected one method"], capsys)


def test_all_missing_tensors_are_listed(model, capsys):
    def drop(header):
        for layer in (2, 5, 7):
            header[f"spare.{layer}"] = header.pop(f"model.layers.{layer}.self_attn.k_proj.q_weight")

    rewrite(model / WEIGHTS, drop)
    names = [f"model.layers.{layer}.self_attn.k_proj.weight" for layer in (2, 5, 7)]
    check(model, FormatError, ["found none of 3 tensors", *names], capsys)


def test_missing_tokenizer(model, capsys):
    (model / "tokenizer.json").unlink()
    check(model, TokenizerError, ["tokenizer.json", "copy it"], capsys)


def test_broken_tokenizer(model, capsys):
    (model / "tokenizer.json").write_text('{"version": "1.0"}')
    check(model, TokenizerError, ["tokenizer.json"], capsys)


def test_not_a_model_directory(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    check(tmp_path / "empty", ModelNotFound, ["empty", "config.json"], capsys)
    check(tmp_path / "file", ModelNotFound, ["is a file", "directory"], capsys)
    check(tmp_path / "nowhere", ModelNotFound, ["nowhere", "expected"], capsys)


# ---- requests


def test_prompt_longer_than_the_context(bystander, capsys):
    llm, _ = bystander
    with pytest.raises(ContextOverflow, match="1024"):
        llm.generate([5] * 2000, max_tokens=1)
    prompt = "It was. " * 1000
    assert main(["generate", str(FIXTURE), "--prompt", prompt, "--quiet"]) == 2
    assert "1024" in capsys.readouterr().err
    text = str(ROOT / "exl2nb" / "demo_model" / "evaluation.txt")
    assert main(["eval", str(FIXTURE), "--text", text, "--rows", "1", "--length", "2000", "--quiet"]) == 2
    assert "context is 1024" in capsys.readouterr().err


@pytest.mark.parametrize("bpw", [1.99, 8.01, 0, -4, math.nan, math.inf, "4", None, True])
def test_bpw_out_of_range(tmp_path, bpw):
    with pytest.raises(OptionError, match="bpw is .*expected a number from 2 to 8"):
        ex.convert(FIXTURE, tmp_path / "out", bpw=bpw, progress=None)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda llm, path: ex.load(FIXTURE, conext=512), "did you mean 'context'"),
        (lambda llm, path: ex.convert(FIXTURE, path / "out", bpw=4, calibratoin="x"), "did you mean 'calibration'"),
        (lambda llm, path: llm.generate("x", max_token=5), "did you mean 'max_tokens'"),
        (lambda llm, path: llm.stream("x", temprature=0.5), "did you mean 'temperature'"),
    ],
)
def test_unknown_keywords(bystander, tmp_path, call, hint):
    with pytest.raises(OptionError, match=hint):
        call(bystander[0], tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"top_p": 1.5}, {"top_k": -1}, {"max_tokens": 0}, {"min_p": math.nan}, {"seed": -1}, {"stop": 3.5}]
)
def test_option_values_out_of_range(bystander, options):
    with pytest.raises(OptionError, match=next(iter(options))):
        bystander[0].generate("x", **options)


def test_a_closed_model_says_so():
    llm = ex.load(FIXTURE, progress=None)
    llm.close()
    with pytest.raises(EngineClosed, match="load"):
        llm.generate("x")


def test_every_named_error_is_an_exl2_error():
    assert issubclass(OptionError, Exl2Error)
    assert issubclass(ModelNotFound, FileNotFoundError)


# ---- writing


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random dense model of two layers with a tokenizer of its own, and a text to calibrate on."""
    spec = importlib.util.spec_from_file_location("train_demo_model", ROOT / "tools" / "train_demo_model.py")
    tool = importlib.util.module_from_spec(spec)
    sys.modules["train_demo_model"] = tool
    spec.loader.exec_module(tool)
    folder = tmp_path_factory.mktemp("tiny")
    text = "\n\n".join(f"Chapter {n}. The sea was calm, and the {n} ships lay still in the harbour." for n in range(400))
    (folder / "text.txt").write_text(text)
    tokenizer = tool.train_tokenizer([text], 300)
    shape = tool.Shape(
        tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=1, context=128
    )
    tool.torch.manual_seed(0)
    tool.save_model(tool.Llama(shape), tokenizer, folder / "model")
    return folder


@contextmanager
def files_up_to(size_bytes):
    """No file can grow past `size_bytes`: what a full disk looks like to a writer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disk(capsys, size_bytes, *words):
    """Run the command line under the limit; it fails with exit code 1. Returns the message."""
    with files_up_to(size_bytes):
        code = main([*words, "--json", "--quiet"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert (code, error["type"]) == (1, "ConversionError")
    return error["message"]


def test_disk_full_while_writing_logits(tmp_path, capsys):
    ids, out = str(tmp_path / "ids.safetensors"), str(tmp_path / "out.safetensors")
    save(ids, {"input_ids": torch.ones(1, 16, dtype=torch.int32)})
    message = full_disk(capsys, 100_000, "logits", str(FIXTURE), "--ids", ids, "--out", out)
    assert "out.safetensors" in message
    assert "free" in message
    assert os.listdir(tmp_path) == ["ids.safetensors"]


@pytest.mark.parametrize("size_bytes", [2_000, 30_000, 80_000])
def test_disk_full_while_converting(tiny, tmp_path, size_bytes, capsys):
    words = ["convert", str(tiny / "model"), str(tmp_path / "out"), "--bpw", "4", "--calibration", str(tiny / "text.txt")]
    words += ["--rows", "2", "--length", "64"]
    assert "out" in full_disk(capsys, size_bytes, *words)
    assert not (tmp_path / "out").exists()
    assert main([*words, "--quiet"]) == 0, "the same command works when there is room"
    ex.load(tmp_path / "out", progress=None).close()
    assert os.listdir(tmp_path) == ["out"]


def test_a_destination_in_use_is_left_alone(tiny, tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(ConversionError, match="not empty"):
        ex.convert(tiny / "model", tmp_path, bpw=4, progress=None)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_quantised_source_is_refused(tmp_path):
    with pytest.raises(Exl2Error, match="(?i)exl2|quantis"):
        ex.convert(FIXTURE, tmp_path / "out", bpw=4, progress=None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("text", "words"), [("", "no text"), ("Too short.", "tokens")])
def test_texts_that_cannot_serve(tmp_path, text, words, capsys):
    (tmp_path / "t.txt").write_text(text)
    assert main(["eval", str(FIXTURE), "--text", str(tmp_path / "t.txt"), "--quiet"]) == 2
    assert words in capsys.readouterr().err

"""Bad input of every kind, through Python and the command line: a named error that says what, found, expected and what to do; nothing
half-written under the final name; and the engine that was running before answers as before."""

import json
import math
import os
import resource
import shutil
import struct
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
    Exl2Error,
    FormatError,
    ModelNotFound,
    OptionError,
    TokenizerError,
    UnknownArchitecture,
)
from exl2nb.io.safetensors import SafetensorsFile, save

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


DAMAGE = {  # what is changed of a tensor in the header
    "overlap": lambda tensor: {"data_offsets": [offset - 64 for offset in tensor["data_offsets"]]},
    "beyond the end": lambda tensor: {"data_offsets": [offset + (1 << 50) for offset in tensor["data_offsets"]]},
    "wrong dtype": lambda tensor: {"dtype": "F32"},
    "unknown dtype": lambda tensor: {"dtype": "I5"},
    "oversized": lambda tensor: {"shape": [1 << 40, 1 << 40]},
    "negative": lambda tensor: {"shape": [-tensor["shape"][0], tensor["shape"][1]]},
    "transposed": lambda tensor: {"shape": tensor["shape"][::-1]},
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_headers(model, damage, capsys):
    rewrite(model / WEIGHTS, lambda header: header[Q_WEIGHT].update(DAMAGE[damage](header[Q_WEIGHT])))
    check(model, FormatError, ["mlp.up_proj", "found", "expected"], capsys)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["layers.3.mlp.up_proj"], ["up_proj"]),
        ([f"layers.{layer}.self_attn.k_proj" for layer in (2, 5, 7)], ["found none of 3 tensors"]),
    ],
)
def test_all_missing_tensors_are_listed(model, names, words, capsys):
    def rename(header):
        for name in names:
            header[f"spare.{name}"] = header.pop(f"model.{name}.q_weight")

    rewrite(model / WEIGHTS, rename)
    check(model, FormatError, [*words, *(f"model.{name}.weight" for name in names)], capsys)


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
    ("changes", "error", "words"),
    [
        ({"num_hidden_layers": -1}, ConfigError, ["num_hidden_layers"]),
        ({"num_hidden_layers": 1 << 40}, ConfigError, ["num_hidden_layers"]),
        ({"hidden_size": "many"}, ConfigError, ["hidden_size"]),
        ({"num_attention_heads": 0}, ConfigError, ["num_attention_heads"]),
        ({"num_key_value_heads": 3}, ConfigError, ["num_key_value_heads"]),
        ({"rms_norm_eps": -1}, ConfigError, ["rms_norm_eps"]),
        ({"vocab_size": None}, ConfigError, ["vocab_size"]),
        ({"hidden_act": "softplus"}, ConfigError, ["hidden_act"]),
        ({"max_position_embeddings": 2.5}, ConfigError, ["max_position_embeddings"]),
        ({"intermediate_size": 1024}, FormatError, ["1024", "expected"]),
        (
            {"architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"},
            UnknownArchitecture,
            ["NoSuchForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"],
        ),
        ({"quantization_config": {"quant_method": "awq"}}, ConfigError, ["expected exl2, gptq or plain", "AWQ"]),
        ({"quantization_config": {"quant_method": "gguf"}}, ConfigError, ["expected exl2, gptq or plain", "llama.cpp"]),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ConfigError, ["expected exl2, gptq or plain", "take the original"]),
    ],
    ids=str,
)
def test_wrong_config_values(model, changes, error, words, capsys):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))
    check(model, error, words, capsys)


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        *(
            ("config.json", content, ConfigError, ["config.json"])
            for content in (
                b"",
                b"{",
                b"[1, 2]",
                b'{"hidden_size": NaN}',
                b'{"architectures": []}',
                "\ud800".encode("utf-8", "surrogatepass"),
            )
        ),
        (
            "quantize_config.json",
            b'{"bits": 4, "group_size": 128}',
            ConfigError,
            ["config.json says exl2, quantize_config.json says gptq", "expected one method"],
        ),
        ("tokenizer.json", None, TokenizerError, ["tokenizer.json", "copy it"]),
        ("tokenizer.json", b'{"version": "1.0"}', TokenizerError, ["tokenizer.json"]),
    ],
)
def test_wrong_files(model, name, content, error, words, capsys):
    (model / name).unlink() if content is None else (model / name).write_bytes(content)
    check(model, error, words, capsys)


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


# ---- writing


@pytest.fixture(scope="module")
def tiny(script, tmp_path_factory):
    """A random dense model of two layers with a tokenizer of its own, and a text to calibrate on."""
    tool = script("tools/train_demo_model.py")
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


def test_a_model_larger_than_the_memory(tmp_path, monkeypatch):
    """A sparse file can claim any size."""
    real = SafetensorsFile.read

    def read(self, name, **options):
        if "embed" in name:
            torch.empty(1 << 50, dtype=torch.uint8)
        return real(self, name, **options)

    monkeypatch.setattr(SafetensorsFile, "read", read)
    with pytest.raises(
        ex.errors.OutOfMemory, match=r"does not fit the machine's memory: .* needed, [0-9.]+ of [0-9.]+ GiB are free; close"
    ):
        ex.load(Path(ex.__file__).parent / "demo_model", device="cpu", progress=None)


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
    assert "larger than this process (ulimit -f) or file system may write" in message
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
def test_texts_too_short_to_evaluate(tmp_path, text, words, capsys):
    (tmp_path / "t.txt").write_text(text)
    assert main(["eval", str(FIXTURE), "--text", str(tmp_path / "t.txt"), "--quiet"]) == 2
    assert words in capsys.readouterr().err

"""What a failed download leaves in place of a model's file is named, whichever file it is."""

import json
import shutil
from pathlib import Path

import pytest

import exl2nb as ex
from exl2nb.core.errors import Exl2Error, OptionError
from exl2nb.core.files import placeholder
from exl2nb.eval.rows import read_text
from exl2nb.tokenizer.tokenizer import Tokenizer

DEMO = Path(ex.__file__).parent / "demo_model"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 12345\n"
PAGE = b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>"
ERROR = b"\xef\xbb\xbf<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>"
FILES = [
    "config.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
]


@pytest.fixture
def model(tmp_path):
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (POINTER, "a Git LFS pointer, .*git lfs pull"),
        (PAGE, "a web page, .*download"),
        (ERROR, "a web page"),
        (b"", "an empty file, .*download"),
    ],
)
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_model_that_is_something_else(model, name, content, words):
    (model / name).write_bytes(content)
    with pytest.raises(Exl2Error, match=f"{name}: found {words}"):
        ex.load(model, progress=None)


@pytest.mark.parametrize("content", [POINTER, PAGE])
@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tools.jinja", "chat_template.json"])
def test_templates(model, name, content):
    (model / name).parent.mkdir(exist_ok=True)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    (model / name).write_bytes(content)
    with pytest.raises(Exl2Error, match=r"found a (Git LFS pointer|web page)"):
        ex.load(model, progress=None)


def test_an_empty_template_is_one(model):
    (model / "chat_template.jinja").write_bytes(b"")
    assert Tokenizer.load(model).templates.templates.get("default", "") == ""


@pytest.mark.parametrize("content", [POINTER, PAGE, b""])
@pytest.mark.parametrize("names", [["tokenizer.model"], ["vocab.json", "merges.txt"]])
def test_tokenizers_to_convert(model, names, content):
    (model / "tokenizer.json").unlink()
    for name in names:
        (model / name).write_bytes(b"{}")
    (model / names[-1]).write_bytes(content)
    with pytest.raises(Exl2Error, match=rf"{names[-1]}: found (a Git LFS pointer|a web page|an empty file)"):
        Tokenizer.load(model)


@pytest.mark.parametrize("name", ["text.txt", "text.jsonl", "text.json", "text.jsonl.xz", "text.txt.gz", "text.parquet"])
def test_calibration_texts(tmp_path, name):
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(OptionError, match="a Git LFS pointer"):
        ex.convert(DEMO, tmp_path / "out", bpw=4.0, calibration=tmp_path / name, progress=None)
    if name == "text.txt":
        with pytest.raises(OptionError, match="a Git LFS pointer"):
            read_text(tmp_path / name)


def test_adapters(tmp_path, llm):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    (folder / "adapter_model.safetensors").write_bytes(POINTER)
    with pytest.raises(Exl2Error, match="adapter_model.safetensors: found a Git LFS pointer"):
        llm.loras.load(folder)


@pytest.mark.parametrize("content", [b"{}", b"PAR1", b"text about <html>", b"version 2 of a text", b"\x08\0\0\0\0\0\0\0{}"])
def test_other_files_are_themselves(content):
    assert placeholder(content) is None

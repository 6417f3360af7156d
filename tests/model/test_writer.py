import json
import os
from pathlib import Path

import pytest
import torch

from exl2nb.core.errors import ConversionError, FormatError
from exl2nb.io import atomic
from exl2nb.io.hf_config import read_config
from exl2nb.io.shards import TensorStore
from exl2nb.model.writer import write_model
from exl2nb.quant.bits import head_mix
from exl2nb.quant.exl2 import Exl2Tensors, encode

FIXTURE = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 50}


def fixture():
    with TensorStore(FIXTURE) as store:
        for name in reversed(store.names()):
            yield name, store.read(name)


def matrix(columns=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 64, (128, columns), generator=generator).byte()
    groups = head_mix(6).groups(128)
    index = torch.randint(0, 16, (len(groups), columns), generator=generator).byte()
    return encode(codes, index, torch.full((len(groups),), 0.01).half(), groups, torch.randperm(128, generator=generator))


def test_the_fixture_comes_back_byte_for_byte(tmp_path):
    config = read_config(FIXTURE)
    block = config.pop("quantization_config")
    made = write_model(tmp_path / "m", fixture(), config=config, source_dir=FIXTURE, quantization_config=block)
    for name in ("output.safetensors", "config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"):
        assert (made / name).read_bytes() == (FIXTURE / name).read_bytes(), name
    assert sorted(os.listdir(made)) == sorted(set(os.listdir(FIXTURE)) - {"model.safetensors.index.json"})
    assert os.listdir(tmp_path) == ["m"]


def test_shards(tmp_path):
    made = write_model(tmp_path / "m", fixture(), config=CONFIG, shard_bytes=2 << 20)
    files = sorted(path.name for path in made.glob("*.safetensors"))
    assert files == [f"output-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)] and len(files) > 3
    with TensorStore(made) as store, TensorStore(FIXTURE) as original:
        assert set(store.names()) == set(original.names())
        for name in original.names()[::20]:
            assert torch.equal(store.read(name), original.read(name))
    # the embedding alone is larger than this limit: it gets a file of its own
    assert len(list(write_model(tmp_path / "n", fixture(), config=CONFIG, shard_bytes=1 << 20).glob("*.safetensors"))) > len(files)


def test_padded_head(tmp_path):
    head = matrix(columns=50)
    made = write_model(tmp_path / "m", head.tensors("lm_head").items(), config=CONFIG)
    with TensorStore(made) as store:
        read = Exl2Tensors.read(store, "lm_head", in_features=128, out_features=50)
    assert read.out_features == 64 and torch.equal(read.reconstruct(), head.reconstruct())


def test_other_weights_are_not_copied(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("model.safetensors", "pytorch_model.bin", "x.index.json", "tokenizer.json", "NOTES", ".gitattributes"):
        (source / name).write_text(name)
    (source / "folder").mkdir()
    made = write_model(tmp_path / "m", [("model.norm.weight", torch.ones(4).half())], config=CONFIG, source_dir=source)
    assert sorted(os.listdir(made)) == [".gitattributes", "NOTES", "config.json", "output.safetensors", "tokenizer.json"]
    assert json.loads((made / "config.json").read_text()) == CONFIG


def test_an_existing_directory_is_left_alone_or_replaced_whole(tmp_path):
    (tmp_path / "m").mkdir()
    tensors = [("model.norm.weight", torch.ones(4).half())]
    write_model(tmp_path / "m", tensors, config=CONFIG)  # an empty folder is fine
    (tmp_path / "m" / "stray.safetensors").write_text("old")
    with pytest.raises(ConversionError, match="exists already"):
        write_model(tmp_path / "m", tensors, config=CONFIG)
    with pytest.raises(RuntimeError, match="boom"):
        write_model(tmp_path / "m", failing(RuntimeError("boom")), config=CONFIG, overwrite=True)
    assert (tmp_path / "m" / "stray.safetensors").exists() and os.listdir(tmp_path) == ["m"]
    write_model(tmp_path / "m", tensors, config=CONFIG, overwrite=True)
    assert sorted(os.listdir(tmp_path / "m")) == ["config.json", "output.safetensors"] and os.listdir(tmp_path) == ["m"]


def failing(error):
    yield "model.norm.weight", torch.ones(1 << 16).half()
    raise error


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_nothing_is_left_after_an_error(tmp_path, error):
    expected = ConversionError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        write_model(tmp_path / "m", failing(error), config=CONFIG, source_dir=FIXTURE)
    assert os.listdir(tmp_path) == []


def test_disk_full_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "free_bytes", lambda _: 7)
    with pytest.raises(ConversionError, match=r"the disk is full \(7 bytes free\)"):
        write_model(tmp_path / "m", failing(OSError(28, "No space left on device")), config=CONFIG)


def test_what_a_loader_would_refuse_is_not_written(tmp_path):
    good = matrix().tensors("a.q_proj")
    cases = [
        ([*good.items(), *good.items()], "found it twice"),
        ([], "found no tensors"),
        ([(k, v) for k, v in good.items() if not k.endswith("q_invperm")], "q_invperm"),
        ([(k, v.float() if k.endswith("scale_max") else v) for k, v in good.items()], "q_scale_max.*found float32"),
        ([(k, v + 1 if k.endswith("q_groups") else v) for k, v in good.items()], "q_groups"),
    ]
    for tensors, text in cases:
        with pytest.raises(FormatError, match=text):
            write_model(tmp_path / "m", tensors, config=CONFIG)
    assert os.listdir(tmp_path) == []
    with pytest.raises(ConversionError, match="cannot be made"):
        write_model(tmp_path / "no" / "m", good.items(), config=CONFIG)

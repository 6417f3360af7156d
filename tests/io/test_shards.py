import json
import os

import pytest
import torch

from exl2nb.core.errors import FormatError, ModelNotFound
from exl2nb.io.safetensors import save
from exl2nb.io.shards import TensorStore


def index(directory, table):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def test_several_files(tmp_path):
    save(tmp_path / "model-00001-of-00002.safetensors", {"a": torch.ones(2)})
    save(tmp_path / "model-00002-of-00002.safetensors", {"b": torch.zeros(3)})
    (tmp_path / "sub").mkdir()
    save(tmp_path / "sub" / "more.safetensors", {"c": torch.ones(1)})
    save(tmp_path / ".hidden.safetensors", {"d": torch.ones(1)})
    with TensorStore(tmp_path) as store:
        assert store.names() == ["a", "b"] and "a" in store and "c" not in store and len(store) == 2 and not store.is_exl2
        assert torch.equal(store.read("b"), torch.zeros(3)) and store.info("a").shape == (2,)
        assert [path.name for path in store.files] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        with pytest.raises(FormatError, match="tensor 'c': found none of that name in 2 files"):
            store.read("c")


def test_a_name_in_two_files(tmp_path):
    save(tmp_path / "a.safetensors", {"t": torch.ones(2)})
    save(tmp_path / "b.safetensors", {"t": torch.ones(2)})
    with pytest.raises(FormatError, match=r"b.safetensors: tensor 't': found it in a.safetensors too"):
        TensorStore(tmp_path)


def test_exl2_ignores_the_index_of_its_source(tmp_path):
    save(tmp_path / "output.safetensors", {"a.q_weight": torch.ones(2).int()})
    index(tmp_path, {"a.weight": "model-00001-of-00009.safetensors"})
    assert TensorStore(tmp_path).is_exl2


def test_index_of_a_plain_model_is_binding(tmp_path):
    save(tmp_path / "model-1.safetensors", {"a": torch.ones(2)})
    save(tmp_path / "consolidated.safetensors", {"a": torch.ones(2), "other": torch.ones(1)})
    index(tmp_path, {"a": "model-1.safetensors"})
    store = TensorStore(tmp_path)
    assert store.names() == ["a"] and [path.name for path in store.files] == ["model-1.safetensors"]
    index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    with pytest.raises(FormatError, match=r"index.json: tensor 'b': found no file 'model-2.safetensors'"):
        TensorStore(tmp_path)
    index(tmp_path, {"a": "model-1.safetensors", "b": "model-1.safetensors"})
    with pytest.raises(FormatError, match=r"model-1.safetensors: tensor 'b': found none"):
        TensorStore(tmp_path)
    index(tmp_path, {"a": "../model-1.safetensors"})
    with pytest.raises(FormatError, match="found no file"):
        TensorStore(tmp_path)
    for table in ([], {"a": 1}, None):
        index(tmp_path, table)
        with pytest.raises(FormatError, match="weight_map"):
            TensorStore(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(FormatError, match="invalid JSON"):
        TensorStore(tmp_path)


def test_nothing_to_read(tmp_path):
    with pytest.raises(ModelNotFound, match="no such directory"):
        TensorStore(tmp_path / "x")
    with pytest.raises(ModelNotFound, match=r"no .safetensors file; is this a model directory"):
        TensorStore(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelNotFound, match=r"found pytorch_model.bin: only safetensors are read"):
        TensorStore(tmp_path)


def test_a_broken_file_names_itself_and_closes_the_others(tmp_path):
    save(tmp_path / "a.safetensors", {"t": torch.ones(2)})
    (tmp_path / "b.safetensors").write_bytes(b"rubbish that is long enough")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(FormatError, match=r"b.safetensors"):
            TensorStore(tmp_path)
    assert len(os.listdir("/proc/self/fd")) <= before + 1

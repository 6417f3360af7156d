import json
import re
from pathlib import Path

import pytest
import torch

import exl2nb.demo_model
from exl2nb.core.errors import ConfigError, FormatError, ModelNotFound
from exl2nb.io.safetensors import SafetensorsFile, save
from exl2nb.io.shards import TensorStore
from exl2nb.model.inspect import inspect
from exl2nb.quant.exl2 import Exl2Tensors

FIXTURE = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
DENSE = Path(next(iter(exl2nb.demo_model.__path__)))


def test_exl2_model(monkeypatch):
    read = []
    real = SafetensorsFile.read
    monkeypatch.setattr(SafetensorsFile, "read", lambda self, name, **rows: read.append(name) or real(self, name, **rows))
    found = inspect(FIXTURE)
    assert all(name.endswith(".q_groups") for name in read)  # headers and group tables alone
    assert found.architecture == "LlamaForCausalLM" and found.layers == 12 and len(found.decoder) == 84 and found.target_bpw == 4.0
    assert found.decoder_bpw == pytest.approx(4.0, abs=0.005) and found.file_bytes == 7798472 and not found.tied
    with TensorStore(FIXTURE) as store:
        for matrix in found.matrices[::9]:
            if matrix.groups:
                truth = Exl2Tensors.read(store, matrix.key)
                assert (matrix.in_features, matrix.out_features, list(matrix.groups)) == (
                    truth.in_features,
                    truth.out_features,
                    truth.groups,
                )
                assert matrix.bpw == pytest.approx(truth.bpw) and matrix.nbytes == truth.nbytes
        assert found.total_bytes == sum(store.info(name).nbytes for name in store.names())
    assert found.head is not None and found.head.widths == {8: 128, 6: 128} and found.head.group_sizes == (128,)
    assert found.embedding is not None and found.embedding.format == "float16"


def test_dense_model():
    found = inspect(DENSE)
    assert found.layers == 12 and found.decoder_bpw == 16 and found.target_bpw is None and len(found.files) == 2
    assert {m.format for m in found.matrices} == {"float16"} and "█" * 12 in str(found)


def test_views():
    found = inspect(FIXTURE)
    text = str(found)
    assert "4.000 bits per weight (asked for 4)" in text and "\x1b" not in text and "\r" not in text
    rows = [line for line in found.bit_map().splitlines() if re.fullmatch(r"\w+ +[▁▂▃▄▅▆▇█]{12}", line)]
    assert [row.split()[0] for row in rows] == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert json.loads(json.dumps(found.to_dict()))["matrices"][0]["name"] == "self_attn.q_proj"
    frame = found.to_frame()
    assert len(frame) == 86 and frame["layer"].iloc[0] == 0 and frame["layer"].isna().sum() == 2
    assert "<script" not in found._repr_html_() and found._repr_html_().count("<tr>") == 10
    assert len(repr(found)) < 200 + len(str(FIXTURE))


def model(tmp_path, tensors, **config):
    save(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"], **config}))
    return tmp_path


def test_names_from_files_are_escaped(tmp_path):
    evil = "model.layers.0.<script>alert(1)</script>"
    page = inspect(model(tmp_path, {f"{evil}.weight": torch.ones(4, 4), "<b>\x1b[31m.weight": torch.ones(4, 4)}))
    assert "<script" not in page._repr_html_() and "<b>" not in page._repr_html_()
    assert "\x1b" not in str(page)


def test_refusals(tmp_path):
    with pytest.raises(ModelNotFound, match="no such directory"):
        inspect(tmp_path / "x")
    with pytest.raises(FormatError, match="without a matrix"):
        inspect(model(tmp_path, {"model.norm.weight": torch.ones(4)}))
    with pytest.raises(ConfigError, match="format HQQ"):
        inspect(model(tmp_path, {"a.weight": torch.ones(4, 4)}, quantization_config={"quant_method": "hqq"}))
    with pytest.raises(FormatError, match="a.q_scale"):
        inspect(model(tmp_path, {"a.q_weight": torch.ones(4, 32).int()}))


def test_one_odd_matrix_among_many_layers(tmp_path):
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(4, 4) for i in range(130)} | {
        "model.layers.3.mlp.gate.weight": torch.ones(4, 4)
    }
    lines = inspect(model(tmp_path, tensors)).bit_map().splitlines()
    assert max(map(len, lines)) < 140 and sum("up_proj" in line for line in lines) == 2

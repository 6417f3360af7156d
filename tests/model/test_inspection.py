import json
import re
from pathlib import Path

import pytest
import torch

import exl2nb as ex
import exl2nb.demo_model
from exl2nb.core.errors import ConfigError, FormatError, ModelNotFound, UnknownArchitecture
from exl2nb.io.safetensors import SafetensorsFile, save
from exl2nb.io.shards import TensorStore
from exl2nb.model.inspection import inspect
from exl2nb.quant.exl2 import Exl2Tensors

from .zoo import build, write_tokenizer
from .zoo import write as write_zoo

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


def test_facts_of_the_fixture():
    found = inspect(FIXTURE)
    text, page = str(found), found._repr_html_()
    for words in (
        "context 1024 tokens, vocabulary 4096, hidden size 256, 4 heads of 64 (2 for keys and values)",
        "quantised: EXL2, head at 6",
    ):
        assert words in text and words in page
    assert "chat template: " in text and "note:" not in text
    answer = json.loads(json.dumps(found.to_dict()))
    assert answer["sizes"]["context"] == 1024 and answer["notes"] == [] and answer["quantization"].startswith("EXL2")


UNUSUAL = {
    "gemma2": ["sliding window of 13 tokens on 2 of 3 layers", "attention softcap 3", "attention scale 0.22",
               "norms after attention and MLP", "activation gelu_tanh", "head tied to the embedding", "embedding scale 8",
               "logit softcap 5"],
    "qwen3": ["norms on queries and keys"],
    "phi3": ["sliding window of 17 tokens on all layers"],
    "phi4-mini": ["RoPE on 12 of 16 dimensions", "head tied to the embedding"],
    "gemma3": ["RoPE type linear, factor 8", "RoPE base 10000 on 2 local layers, 1e+06 on the others"],
    "smollm3": ["no RoPE on 1 of 5 layers"],
    "cohere": ["interleaved RoPE", "LayerNorm", "attention and MLP in parallel", "logit scale 0.3"],
    "gpt2": ["learned positions instead of RoPE", "ungated MLP", "biases on q, k, v, o, MLP"],
    "olmo2": ["norms on queries and keys (all heads together)", "norms after attention and MLP only"],
    "granite": ["residual scale 0.3"],
    "mixtral": ["mixture of experts: "],
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual(name, tmp_path):
    found = inspect(write_zoo(name, build(name), tmp_path))
    for words in UNUSUAL[name]:
        assert any(fact.startswith(words) for fact in found.facts.unusual), found.facts.unusual
    assert f"unusual: {'; '.join(found.facts.unusual)}" in str(found)
    assert not inspect(FIXTURE).facts.unusual


def test_gptq_facts(tmp_path):
    tensors = {"model.layers.0.mlp.up_proj.qweight": torch.zeros(8, 64, dtype=torch.int32),
               "model.layers.0.mlp.up_proj.qzeros": torch.zeros(2, 8, dtype=torch.int32),
               "model.layers.0.mlp.up_proj.scales": torch.zeros(2, 64).half(),
               "model.layers.0.mlp.up_proj.g_idx": torch.arange(64).int() // 32}  # fmt: skip
    settings = {"bits": 4, "group_size": 32, "desc_act": True, "sym": False, "meta": {"quantizer": ["gptqmodel:7.7.0"]}}
    directory = model(tmp_path, tensors)
    (directory / "quantize_config.json").write_text(json.dumps(settings))
    found = inspect(directory)
    assert found.matrices[0].format == "gptq" and found.matrices[0].groups == ((4, 32), (4, 32)) and found.target_bpw == 4
    sizes = {"vocab_size": 9, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes}))
    assert "quantised: GPTQ 4-bit, groups of 32, asymmetric, act-order, format gptq, by gptqmodel:7.7.0" in str(inspect(directory))


def test_code_of_the_repository_is_never_run(tmp_path, caplog):
    """auto_map in config.json and tokenizer_config.json: said, and not done."""
    directory = write_zoo("internlm2", build("internlm2"), tmp_path)
    write_tokenizer(directory)
    for file, names in (
        ("config.json", {"AutoModelForCausalLM": "modeling_x.X"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["t.T", None]}),
    ):
        path = directory / file
        path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": names}))
    for file in ("modeling_x.py", "t.py"):
        (directory / file).write_text("raise SystemExit('run')")
    assert [note.split(":")[0] for note in inspect(directory).facts.notes] == [
        "config.json names code of the repository (auto_map",
        "tokenizer_config.json names code of the repository (auto_map",
    ]
    assert "note: config.json names code of the repository (auto_map: AutoModelForCausalLM): it is never run" in str(inspect(directory))
    with caplog.at_level("WARNING", logger="exl2nb"):
        llm = ex.load(directory, progress=None)
    assert llm.generate("w1 w2", max_tokens=2, temperature=0, ignore_eos=True).finish_reason == "length"
    llm.close()
    assert sum("it is never run" in record.message for record in caplog.records) == 2
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["OwnForCausalLM"]}))
    with pytest.raises(UnknownArchitecture, match="the code named in its auto_map is never run"):
        ex.load(directory, progress=None)

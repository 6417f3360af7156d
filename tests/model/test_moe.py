"""What a mixture of experts adds to a model: bytes read, views, refusals; its logits are in test_archs."""

import json

import pytest
import torch

from exl2nb.cache.pool import KVCache
from exl2nb.cli import main
from exl2nb.core.errors import ConfigError, EngineClosed, FormatError
from exl2nb.io.shards import TensorStore
from exl2nb.llm.plan import plan
from exl2nb.model.archs import parse_config
from exl2nb.model.batch import Batch
from exl2nb.model.inspection import inspect
from exl2nb.model.layers import RoutedMLP
from exl2nb.model.layout import layer_linears, model_linears, role_groups
from exl2nb.model.loader import load_model

from .test_model import run
from .tiny import BASE, configure, edit
from .zoo import build, build_wide, config_of, write, write_exl2, write_tokenizer


def test_a_token_reads_its_experts_and_no_others(tmp_path):
    """Bytes per token, against a count by hand; and all experts that are not chosen may be NaN."""
    directory = write("mixtral", build("mixtral"), tmp_path)
    model, config = load_model(directory), config_of(directory)
    moe = config.moe
    assert moe is not None
    with TensorStore(directory) as store:
        sizes = {name: store.info(name).nbytes for name in store.names()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    embedding = sizes["model.embed_tokens.weight"]
    by_hand = sum(sizes.values()) - embedding * 130 // 131 - experts * (moe.num_experts - moe.top_k) // moe.num_experts
    assert abs(model.bytes_per_token - by_hand) < 0.2 * by_hand  # blobs pad to tiles of 16 outputs and carry headers
    assert inspect(directory).token_bytes == by_hand
    idle = [layer.mlp.unused_expert_bytes for layer in model.network.layers]
    assert model.bytes_per_token == model.weight_bytes - sum(idle) - embedding * 130 // 131

    token = torch.tensor([5])
    good = run(model, token)
    visited = _visited(model, token)
    experts = model_linears(config)
    idle = [e for e in experts if "." in e.role and int(e.role.partition(".")[2]) not in visited[e.layer]]
    edit(directory, {f"{expert.key}.weight": torch.full(expert.shape, torch.nan) for expert in idle})
    assert len(idle) == 3 * sum(moe.num_experts - len(chosen) for chosen in visited)
    assert torch.equal(run(load_model(directory), token), good)
    model.close()
    with pytest.raises(EngineClosed, match="closed"):
        model.bytes_per_token  # noqa: B018


def test_a_plan_counts_the_experts_of_a_token(tmp_path):
    directory = write("mixtral", build("mixtral"), tmp_path)
    [share] = plan(directory, devices={"cpu": "rest"}, context=64).shares
    found = inspect(directory)
    assert share.read == pytest.approx(found.token_bytes, rel=0.05)
    assert share.read < 0.9 * share.weights


def _visited(model, ids):
    """The experts that each routed layer chose, as a trace shows them."""
    points = [name for name in model.points if name.endswith("hook_expert_indices")]
    batch = Batch.single(ids.tolist(), start=0, pages=[0])
    seen = []
    model.trace(
        batch,
        KVCache(model.cache_spec(len(ids))),
        wanted=frozenset(points),
        seen=lambda point, value, start: seen.append(set(value.flatten().tolist())),
    )
    assert len(seen) == len(points), "a routed layer was not seen"
    return seen


def test_bench_reports_the_bytes_of_visited_experts(tmp_path, capsys):
    """What `bench` says a token reads: everything but the embedding and the experts that the routed layers report it did not visit."""
    directory = write_exl2(write("qwen2_moe", build_wide("qwen2_moe"), tmp_path / "dense"), tmp_path / "exl2", widths=(4,))
    write_tokenizer(directory)
    words = ["bench", str(directory), "--device", "cpu", "--context", "4", "--tokens", "16", "--rounds", "3", "--json", "--quiet"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["experts_per_token"] == "3 of 7"
    model = load_model(directory)
    visited = iter(_visited(model, torch.tensor([5])))
    unread = model.network.embedding.table.nbytes * (model.config.vocab_size - 1) // model.config.vocab_size
    for layer in model.network.layers:
        if isinstance(layer.mlp, RoutedMLP):
            chosen = next(visited)
            assert len(chosen) == 3
            unread += sum(blob.nbytes for part in (layer.mlp.up, layer.mlp.down) for e, blob in enumerate(part) if e not in chosen)
    assert found["weight_bytes"] == model.weight_bytes
    assert abs(found["bytes_per_token"] - (model.weight_bytes - unread)) <= 2  # means over experts of one size, rounded


def test_a_dense_model_reads_everything_but_the_embedding(tmp_path):
    directory = write("qwen3", build("qwen3"), tmp_path)
    model = load_model(directory)
    table = 131 * 64 * 4
    assert model.bytes_per_token == model.weight_bytes - table * 130 // 131
    assert inspect(directory).experts is None


def test_inspect_folds_experts(tmp_path):
    found = inspect(write_exl2(write("qwen2_moe", build_wide("qwen2_moe"), tmp_path / "dense"), tmp_path / "exl2"))
    text = str(found)
    assert "7 experts in a sparse layer, 3 for each token: decoding one reads" in text
    assert text.count("experts.*.gate_proj") == 2 and "experts.0" not in text  # a row of the table and one of the map
    assert "7 experts like" in found._repr_html_()
    assert found.to_dict()["experts"] == {"count": 7, "per_token": 3}
    assert len(found.decoder) == 4 * 4 + 2 * 3 + 2 * (7 * 3 + 3)


def test_modules_of_a_layer():
    config = parse_config({**BASE, "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 3, "num_experts_per_tok": 1})
    assert role_groups(layer_linears(config, 0)) == [
        ["q", "k", "v", "o"],
        *([f"gate.{i}", f"up.{i}", f"down.{i}"] for i in range(3)),
        ["shared_gate", "shared_up", "shared_down"],
    ]


def test_wrong_values_of_dbrx_are_named(tmp_path):
    raw = json.loads((write("dbrx", build("dbrx"), tmp_path) / "config.json").read_text())
    assert config_of(tmp_path).clip_qkv == 0.8
    for part, change, words in (
        ("ffn_config", {"moe_top_k": 7}, "moe_top_k is 7"),
        ("ffn_config", {"moe_normalize_expert_weights": -1}, "moe_normalize_expert_weights is -1"),
        ("ffn_config", {"ffn_act_fn": {"name": "relu"}}, "hidden_act is 'relu'"),
        ("attn_config", {"clip_qkv": 0}, "clip_qkv is 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_config({**raw, part: {**raw[part], **change}})
    assert parse_config({**raw, "ffn_config": {**raw["ffn_config"], "moe_normalize_expert_weights": None}}).moe.renormalize == 0


def test_stacked_experts_of_another_number_are_named(tmp_path):
    directory = write("dbrx", build("dbrx"), tmp_path)
    settings = json.loads((directory / "config.json").read_text())["ffn_config"]
    configure(directory, ffn_config={**settings, "moe_num_experts": 5})
    with pytest.raises(FormatError, match=r"mlp.v1': found shape \(576, 64\), expected \(480, 64\) for this config.json's 5 experts"):
        load_model(directory)


def test_every_missing_expert_is_listed(tmp_path):
    directory = write("mixtral", build("mixtral"), tmp_path)
    lost = ["model.layers.1.block_sparse_moe.gate.weight", *(f"model.layers.{i}.block_sparse_moe.experts.3.w2.weight" for i in (0, 1))]
    with pytest.raises(FormatError) as error:
        load_model(edit(directory, dict.fromkeys(lost)))
    assert all(name in str(error.value) for name in lost)

"""Loading: what is read, refused and freed."""

import gc
import mmap
import weakref
from pathlib import Path

import pytest
import torch

import exl2nb
from exl2nb.cache.pool import KVCache
from exl2nb.core.errors import ConfigError, DeviceError, FormatError, ModelNotFound, OptionError, UnknownArchitecture
from exl2nb.io.safetensors import SafetensorsFile
from exl2nb.model import loader
from exl2nb.model.batch import Batch
from exl2nb.model.loader import load_model, small_model_memory
from exl2nb.ops.memory_ops import large_pages

from .tiny import configure, edit, ids_of, save, save_exl2, truth, twin

DATA = Path(__file__).parents[1] / "data"
DEMO = Path(exl2nb.__file__).parent / "demo_model"


def all_logits(model, ids, mode="fp16"):
    cache = KVCache(model.cache_spec(256, mode=mode))
    return model.forward(Batch.single(ids.tolist(), start=0, pages=[0], logit_rows="all"), cache)


@pytest.mark.parametrize(
    ("directory", "key", "limit"), [(DEMO, "logits_fp16", 0.06), (DATA / "demo-exl2-4.0bpw", "logits_exl2_4.0bpw", 0.15)]
)
def test_recorded_gpu_logits(directory, key, limit):
    recorded = SafetensorsFile(DATA / "demo-logits.safetensors")
    model = load_model(directory)
    for ids, want in zip(recorded.read("input_ids"), recorded.read(key).float()):
        assert (all_logits(model, ids) - want).abs().max() < limit


def test_sharded_files(tmp_path):
    model = twin("llama", num_hidden_layers=3)
    ids = ids_of(131, 1, 20)
    want = truth(model, ids)[0]
    save(model, tmp_path, shard="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert (all_logits(load_model(tmp_path), ids[0], "fp32") - want).abs().max() < 1e-4 * want.std()


def test_own_head_wins_over_the_tied_embedding(tmp_path):
    edit(save(twin("qwen2", tie_word_embeddings=True), tmp_path), {"lm_head.weight": torch.zeros(131, 64)})
    assert not all_logits(load_model(tmp_path), torch.arange(5)).any()


Q = "model.layers.1.self_attn.q_proj"
DENSE_DAMAGE = {
    "missing": ({f"{Q}.weight": None}, [f"{Q}.weight", "found none", f"{Q}.q_weight"]),
    "missing norm": ({"model.norm.weight": None}, ["'model.norm.weight': found none"]),
    "missing embedding": ({"model.embed_tokens.weight": None}, ["'model.embed_tokens.weight': found none"]),
    "missing head": ({"lm_head.weight": None}, ["'lm_head.weight'", "tie_word_embeddings is false"]),
    "extra bias": ({f"{Q}.bias": torch.zeros(64)}, ["found 1 tensors", f"{Q}.bias"]),
    "extra layer": (
        {f"model.layers.2.{i}.weight": torch.zeros(4) for i in range(7)},
        ["found 7 tensors", "model.layers.2.0.weight", "and 2 more"],
    ),
    "wrong shape": ({f"{Q}.weight": torch.zeros(64, 32)}, [f"'{Q}.weight': found shape (64, 32), expected (64, 64)"]),
    "transposed": ({"model.layers.0.mlp.down_proj.weight": torch.zeros(96, 64)}, ["found shape (96, 64), expected (64, 96)"]),
    "1-D": ({f"{Q}.weight": torch.zeros(4096)}, ["found shape (4096,)"]),
    "wrong norm": ({"model.norm.weight": torch.zeros(63)}, ["found shape (63,), expected (64,)"]),
    "wrong dtype": ({f"{Q}.weight": torch.zeros(64, 64, dtype=torch.int32)}, ["found dtype torch.int32, expected float16"]),
}
EXL2_DAMAGE = {
    "missing part": ({f"{Q}.q_scale": None}, [f"'{Q}.q_scale': found none"]),
    "missing permutation": ({f"{Q}.q_invperm": None}, [f"'{Q}.q_invperm': found none"]),
    "half a module": (
        {"model.layers.0.mlp.up_proj.q_weight": None, "model.layers.0.mlp.up_proj.weight": torch.zeros(96, 64, dtype=torch.float16)},
        ["'model.layers.0.mlp.up_proj.weight'", "all of gate_proj, up_proj, down_proj quantised or none"],
    ),
    "wrong inputs": ({f"{Q}.q_invperm": torch.arange(96, dtype=torch.int32)}, [f"'{Q}.q_invperm': found shape (96,)", "64"]),
    "wrong outputs": ({f"{Q}.q_weight": torch.zeros(16, 96, dtype=torch.int32)}, [f"{Q}.q_"]),
    "not a permutation": ({f"{Q}.q_invperm": torch.zeros(64, dtype=torch.int32)}, [f"'{Q}.q_invperm': found the value 0 64 times"]),
    "plain beside": ({f"{Q}.weight": torch.zeros(64, 64)}, ["found 1 tensors", f"{Q}.weight"]),
}


@pytest.mark.parametrize("damage", [(save, name) for name in DENSE_DAMAGE] + [(save_exl2, name) for name in EXL2_DAMAGE])
def test_damage_is_named(damage, tmp_path):
    write, name = damage
    changes, words = (DENSE_DAMAGE if write is save else EXL2_DAMAGE)[name]
    edit(write(twin("llama"), tmp_path), changes)
    with pytest.raises(FormatError) as caught:
        load_model(tmp_path)
    assert all(word in str(caught.value) for word in (*words, str(tmp_path))), caught.value


def test_old_rotary_buffers_are_ignored(tmp_path):
    before = load_model(save(twin("llama"), tmp_path)).weight_bytes
    edit(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert load_model(tmp_path).weight_bytes == before


def test_exl2_needs_outputs_in_32s(tmp_path):
    with pytest.raises(FormatError, match=r"mlp\.(gate|up|down)_proj"):
        load_model(configure(save_exl2(twin("llama", intermediate_size=96), tmp_path), intermediate_size=80))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"hidden_size": 1 << 40}, ConfigError, "hidden_size"),
        ({"vocab_size": 4194304}, FormatError, "found shape"),
        ({"num_hidden_layers": 1000}, FormatError, "model.layers.2"),
        ({"hidden_size": 65536, "intermediate_size": 262144, "head_dim": 256, "num_attention_heads": 1024}, FormatError, "found shape"),
        ({"max_position_embeddings": 1 << 30}, ConfigError, "max_position_embeddings"),
        ({"architectures": ["BertModel"]}, UnknownArchitecture, "unknown architecture 'BertModel'; known: .*LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "gptq"}}, FormatError, "found no matrix in gptq"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5}}, ConfigError, "bits is 5; expected one of 2, 3, 4, 8"),
        ({"quantization_config": {"quant_method": "awq"}}, ConfigError, r"format AWQ .*take a GPTQ or EXL2 version"),
        ({"rope_parameters": {"rope_type": "mrope", "factor": 2}}, ConfigError, "rope_type is 'mrope'"),
        ({"num_key_value_heads": 3}, ConfigError, "num_key_value_heads"),
    ],
)
def test_config_that_does_not_fit_is_named(changes, error, words, tmp_path):
    configure(save(twin("llama"), tmp_path), **changes)
    with pytest.raises(error, match=words) as caught:
        load_model(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_arguments(tmp_path):
    with pytest.raises(OptionError, match="weights is 'fp8'; expected one of auto, fp32"):
        load_model(tmp_path, weights="fp8")
    with pytest.raises(OptionError, match="context is 0"):
        load_model(tmp_path, context=0)
    with pytest.raises(DeviceError, match="device is 'tpu'"):
        load_model(tmp_path, device="tpu")
    with pytest.raises(ModelNotFound):
        load_model(tmp_path)
    with pytest.raises(ModelNotFound):
        load_model(tmp_path / "nothing")


def test_progress_counts_layers(tmp_path):
    events = []
    load_model(save(twin("llama"), tmp_path), progress=events.append)
    assert [event.done for event in events] == [0, 1, 2, 3, 4, 4]
    assert {event.stage for event in events} == {"load"}
    assert (events[-1].state, events[-1].total) == ("done", 4)
    edit(tmp_path, {"model.norm.weight": None})
    events.clear()
    with pytest.raises(FormatError):
        load_model(tmp_path, progress=events.append)
    assert events == []


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_close_frees_the_memory():
    model = load_model(DEMO)
    assert model.weight_bytes == pytest.approx(2 * 11.5e6, rel=0.02)
    all_logits(model, torch.arange(8))
    alive = [weakref.ref(tensor) for tensor in model.network.tensors()]
    assert len(alive) == 1 + 12 * 6 + 2
    model.close()
    gc.collect()
    assert not any(reference() is not None for reference in alive)
    gc.collect()
    before = resident_bytes()
    for _ in range(6):  # 130 MB if it stayed
        model = load_model(DEMO)
        all_logits(model, torch.arange(8))
        model.close()
    assert resident_bytes() - before < 40e6


# ---- Weights of a small model on the CPU share memory of large pages; larger ones stay where they were packed


LINUX = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="a system without large pages")


@LINUX
def test_large_pages_are_writable_zeros():
    memory = large_pages(5 << 20)
    assert memory.shape == (5 << 20,)
    assert memory.dtype == torch.uint8
    assert not memory.any()
    memory[-1] = 7
    assert int(memory.sum()) == 7
    assert large_pages(0) is None


def test_a_system_without_them(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert large_pages(1 << 20) is None


@LINUX
def test_memory_follows_the_size_of_the_files(tmp_path, monkeypatch):
    (tmp_path / "a.safetensors").write_bytes(b"0" * 1000)
    assert small_model_memory(tmp_path, widened=False).numel() >= 1000
    assert small_model_memory(tmp_path, widened=True).numel() >= 2000
    monkeypatch.setattr(loader, "SMALL_MODEL_BYTES", 999)
    assert small_model_memory(tmp_path, widened=False) is None


@LINUX
@pytest.mark.parametrize("weights", ["auto", "fp32"])
def test_weights_of_a_small_model_share_memory(tmp_path, weights, monkeypatch):
    save(twin(), tmp_path)
    together = load_model(tmp_path, weights=weights)
    monkeypatch.setattr(loader, "SMALL_MODEL_BYTES", 0)
    apart = load_model(tmp_path, weights=weights)
    ours, others = list(together.network.tensors()), list(apart.network.tensors())
    assert len({tensor.untyped_storage().data_ptr() for tensor in ours}) == 1
    assert len({tensor.untyped_storage().data_ptr() for tensor in others}) > 1
    assert all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))

"""One tensor for all weights on the GPU: its size from headers, and that it holds every weight."""

import pytest
import torch

import exl2nb as ex
from exl2nb.cache.pool import KVCache
from exl2nb.core.progress import Meter
from exl2nb.model import gpu_memory
from exl2nb.model.batch import Batch
from exl2nb.model.gpu_memory import ARENA_ALIGN_BYTES, Arena, align_size, blob_bytes, kept_bytes
from exl2nb.model.inspection import StoredMatrix, inspect
from exl2nb.model.loader import Builder, load_model
from exl2nb.model.model import Model, Network
from exl2nb.model.sources import find_sources
from exl2nb.model.split import LayerRange
from exl2nb.model.store import open_store

from .zoo import build, config_of, write, write_exl2

NAMES = ["llama", "qwen2", "gemma2", "gpt2", "phi3", "qwen2_moe", "qwen3_moe-bias", "cohere", "olmo2"]


@pytest.fixture(scope="module", params=NAMES)
def folder(request, tmp_path_factory):
    """A model's files, dense or EXL2."""
    dense = write(request.param, build(request.param), tmp_path_factory.mktemp(request.param))
    if request.param in ("llama", "qwen3_moe-bias"):
        return write_exl2(dense, tmp_path_factory.mktemp(f"{request.param}-exl2"))
    return dense


def storages(model):
    return {tensor.untyped_storage().data_ptr() for tensor in model.network.tensors()}


def test_arena():
    arena = Arena(3 * ARENA_ALIGN_BYTES, "cpu")
    first, second = arena.keep(torch.arange(5.0)), arena.keep(torch.ones(3, 4, dtype=torch.float16).T)
    assert first.tolist() == [0, 1, 2, 3, 4]
    assert second.shape == (4, 3)
    assert second.is_contiguous()
    assert second.data_ptr() - first.data_ptr() == ARENA_ALIGN_BYTES
    large = torch.zeros(ARENA_ALIGN_BYTES)
    assert arena.keep(large) is large, "no room: it stays where it is"


def test_every_tensor_that_stays_goes_into_the_arena(folder):
    """With the sizes that the CPU's tensors have; the loaded model computes the same bits."""
    plain, config = load_model(folder), config_of(folder)
    arena = Arena(sum(align_size(tensor.nbytes) for tensor in plain.network.tensors()), "cpu")
    with open_store(config, folder) as store:
        builder = Builder(config, store, find_sources(config, store), widen=False, device="cpu", arena=arena)
        with Meter("load", total=config.num_layers + 2, unit="layers", sink=None) as meter:
            embedding, layers, head = builder.span(LayerRange("cpu", 0, config.num_layers), meter)
        model = Model(config, Network(embedding, tuple(layers), head), context=64)
    assert storages(model) == {arena.memory.untyped_storage().data_ptr()}
    batch = Batch.single(list(range(1, 20)), start=0, pages=[0], logit_rows="all")
    logits = [one.forward(batch, KVCache(one.cache_spec(256))) for one in (plain, model)]
    assert torch.equal(*logits)


def test_the_headers_tell_every_tensor(folder, monkeypatch):
    """All that are no blobs, byte for byte, and as many blobs; sizes of blobs on the GPU are tested below."""
    model, blobs = load_model(folder), []
    monkeypatch.setattr(gpu_memory, "blob_bytes", lambda parts: blobs.extend([parts] if parts else []) or 0)
    said = kept_bytes(config_of(folder), inspect(folder))
    tensors = list(model.network.tensors())
    assert said == sum(align_size(tensor.nbytes) for tensor in tensors if tensor.dtype != torch.uint8)
    assert len(blobs) == sum(tensor.dtype == torch.uint8 for tensor in tensors)


def matrix(groups, columns, kind="exl2", rows=0):
    return StoredMatrix("", None, "", kind, rows or sum(n for _, n in groups), columns, tuple(groups), 0.0, 0)


def test_sizes_of_blobs():
    """As pack_exl2, pack_gptq and pack_dense make them on a GPU."""
    assert blob_bytes([matrix([(6, 128), (5, 128), (4, 128), (4, 64)], 1000)]) == 285_440
    mixed = [[(5, 2048), (4, 2048)], [(4, 4096)], [(8, 32), (3, 4064)]]
    assert blob_bytes([matrix(groups, columns) for groups, columns in zip(mixed, (4096, 1024, 1024))]) == 13_503_744
    assert blob_bytes([matrix([(4, 128), (4, 72)], 48, "gptq")]) == 9216
    assert blob_bytes([matrix([(6, 32), (4, 128), (4, 128), (3, 96), (2, 32)], 96)]) == 27_648
    assert blob_bytes([matrix([], columns, "float16", rows=100) for columns in (16, 50)]) == 21_248


def test_the_cache_is_one_tensor():
    for mode in ("fp16", "q8", "q6", "fp8"):
        with ex.demo(progress=None, cache=mode) as llm:
            cache = llm.engine.cache
            assert len({pool.untyped_storage().data_ptr() for pool in (*cache.k, *cache.v)}) == 1
            assert sum(pool.nbytes for pool in (*cache.k, *cache.v)) == cache.spec.total_bytes == llm.cache_bytes


@pytest.mark.gpu
def test_the_gpu_holds_what_was_said(folder):
    model = load_model(folder, device="cuda")
    said = kept_bytes(config_of(folder), inspect(folder))
    assert len(storages(model)) == 1, f"{model.weight_bytes} bytes of weights, {said} were said: some did not fit"
    assert model.weight_bytes <= said
    model.close()

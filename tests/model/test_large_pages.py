"""Weights of a small model on the CPU lie side by side in memory of large pages; larger ones stay where they were packed."""

import mmap

import pytest
import torch

from exl2nb.model import loader
from exl2nb.model.loader import load_model, small_model_memory
from exl2nb.ops.memory import large_pages

from .tiny import save, twin

LINUX = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="a system without large pages")


@LINUX
def test_zeros_that_can_be_written():
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
def test_room_follows_the_files(tmp_path, monkeypatch):
    (tmp_path / "a.safetensors").write_bytes(b"0" * 1000)
    assert small_model_memory(tmp_path, widened=False).numel() >= 1000
    assert small_model_memory(tmp_path, widened=True).numel() >= 2000
    monkeypatch.setattr(loader, "SMALL_MODEL_BYTES", 999)
    assert small_model_memory(tmp_path, widened=False) is None


@LINUX
@pytest.mark.parametrize("weights", ["auto", "fp32"])
def test_a_small_model_lies_together(tmp_path, weights, monkeypatch):
    save(twin(), tmp_path)
    together = load_model(tmp_path, weights=weights)
    monkeypatch.setattr(loader, "SMALL_MODEL_BYTES", 0)
    apart = load_model(tmp_path, weights=weights)
    ours, others = list(together._network.tensors()), list(apart._network.tensors())
    assert len({tensor.untyped_storage().data_ptr() for tensor in ours}) == 1
    assert len({tensor.untyped_storage().data_ptr() for tensor in others}) > 1
    assert all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))

"""What a conversion holds at once, at a 7B shape in small: the batches, moments and limits of a GPU, divided by 256, on the CPU."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from exl2nb.converter import hessian, layers, measuring, memory, sensitivity
from exl2nb.converter.job import ConversionJob
from exl2nb.model.loader import read_model_config

from .test_job import write_model

SMALLER = 256
# 4096 x 11008 in sixteenths; 4 tokens of calibration per input, and heads so many that attention scores weigh what they do there
SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 32}
SHAPE |= {"head_dim": 8, "vocab_size": 2000, "max_position_embeddings": 64, "attention_bias": False}
ROWS = {"rows": 32, "length": 32, "report_rows": 8}


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self._known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _gone(self, key, nbytes):
        self._known.discard(key)
        self.now -= nbytes


@pytest.fixture
def gpu_in_small(monkeypatch):
    """The limits of a GPU, divided; what goes from it to the host is still counted, but for the statistics of all layers."""
    changes = {
        hessian: {"MOST_IN_F64": 512, "SCORES": (1 << 25) // SMALLER, "INNER": (1 << 25) // SMALLER, "WHOLE": 64, "BLOCK": 32},
        memory: {
            "MOST_IN_F64": 512,
            "PIECE": (1 << 25) // SMALLER,
            "COPIES_BYTES": (1 << 30) // SMALLER,
            "STREAM_BYTES": 0,
            "SPAN_ROWS": 32,
            "RESULT": (1 << 24) // SMALLER,
        },
        layers: {"HELD_BYTES": 0},
        measuring: {"HELD_STATISTICS": 0},
    }

    def batches(config, x, first, last):
        rows = hessian.gpu_rows(config, x.shape[1])
        return [slice(start, min(start + rows, last)) for start in range(first, last, rows)]

    for module, values in changes.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    for module in (hessian, layers, sensitivity):
        monkeypatch.setattr(module, "batches", batches)


def test_what_is_alive_at_once_is_below_the_stated_bound(gpu_in_small, tmp_path):
    source = write_model(tmp_path / "model", **SHAPE)
    text = " ".join(f"w{(i * i + 7 * i) % 90}" for i in range(6000))
    live, peaks = Live(), {}

    def sink(event):
        peaks[event.stage] = max(peaks.get(event.stage, 0), live.peak)
        live.peak = live.now

    with live:
        ConversionJob(source, tmp_path / "out", bpw=4.0, calibration=[text], device="cpu", **ROWS).run(sink)
    plan = memory.planned_on_gpu(read_model_config(source), **ROWS)
    assert 0.4 * plan.sweep < peaks["measure"] < max(plan.sweep, plan.measure)
    assert 0.4 * plan.quantize < peaks["quantize"] < memory.SLACK * plan.quantize
    assert memory.SLACK * SMALLER * max(plan.sweep, plan.measure, plan.quantize) < 7.5 * 2**30

"""The memory plan of a conversion: the stated bound against what is alive at once, at a 7B shape in small and for whole runs."""

import subprocess
import sys
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from exl2nb.converter import hessian, memory_estimate, pipeline, quantization, sensitivity
from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.converter.memory_estimate import Asked, plan_cpu_memory, plan_gpu_memory
from exl2nb.converter.sensitivity import DISK_BYTES
from exl2nb.converter.settings import EFFORT_OPTIONS
from exl2nb.model.archs import parse_config
from exl2nb.model.loader import read_model_config

from .test_conversion_job import CONFIG, OPTIONS, convert, output, write_model

SEVEN_B = {
    **CONFIG,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
CHILD = """
import sys, threading, time
import torch
from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.ops import libraries

def resident():
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

libraries(), torch.ones(64, 64) @ torch.ones(64, 64)
before, peak, done = resident(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
try:
    text = " ".join(f"w{(i * i + 7 * i) % 90}" for i in range(5000))
    job = ConversionJob(sys.argv[1], sys.argv[2], bpw=4.0, calibration=[text], rows=8, length=256, report_rows=2, device="cpu")
    job.run()
finally:
    done = True
    thread.join()
print(peak - before, job.memory().nbytes)
"""


@pytest.mark.parametrize("effort", EFFORT_OPTIONS.values(), ids=EFFORT_OPTIONS)
def test_seven_b_fits_in_16_gb_however_deep(effort):
    options = {"rows": effort.rows, "length": effort.length, "report_rows": 8}
    shallow = plan_cpu_memory(parse_config(SEVEN_B), Asked(**options))
    assert shallow.nbytes < 10e9
    deep = plan_cpu_memory(parse_config({**SEVEN_B, "num_hidden_layers": 128}), Asked(**options))
    assert deep.nbytes == pytest.approx(shallow.nbytes, abs=2e9)  # never weights: those of 96 more layers are 78 GB
    assert deep.disk < 70e9
    for changes in (
        {"vocab_size": 128256, "intermediate_size": 14336},
        {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944},
    ):
        assert (
            plan_cpu_memory(
                parse_config({**SEVEN_B, "num_attention_heads": 28, "num_key_value_heads": 4, **changes}), Asked(**options)
            ).nbytes
            < 15.6e9
        )
    assert plan_cpu_memory(parse_config(SEVEN_B), Asked(**options, polish=True)).nbytes < 16e9


def test_what_memory_has_no_room_for_is_on_the_disk():
    few, many = (plan_cpu_memory(parse_config(SEVEN_B), Asked(rows=rows, length=1024)) for rows in (4, 256))
    stream = 4 * 256 * 1024 * 4096
    assert few.disk == 0
    assert 2 * stream <= many.disk <= 12 * stream + DISK_BYTES
    assert many.nbytes < few.nbytes + 4e9


@pytest.mark.parametrize("rows", [32, 80])
def test_seven_b_fits_on_a_gpu_of_8_gb_however_deep(rows):
    shallow = plan_gpu_memory(parse_config(SEVEN_B), Asked(rows=rows, length=512, report_rows=8)).nbytes
    assert shallow < 7.5 * 2**30  # the driver and torch take half a GB
    deep = plan_gpu_memory(parse_config({**SEVEN_B, "num_hidden_layers": 128}), Asked(rows=rows, length=512, report_rows=8)).nbytes
    assert deep == shallow


def test_the_same_bytes_however_little_is_held(source, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(quantization, "HELD_BYTES", 0)  # every stage of a layer begins at its start again
    begun, steps = [], quantization.reference.steps
    monkeypatch.setattr(quantization.reference, "steps", lambda *a, **k: begun.append(1) or steps(*a, **k))
    assert output(convert(source, tmp_path / "tight").path) == output(whole.path)
    assert len(begun) > 3 * 4 * 2  # layers, stages, streams


@pytest.mark.gpu
def test_a_gpu_stays_within_its_bound(tmp_path):
    changes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 2, "vocab_size": 16000, "num_attention_heads": 16}
    source = write_model(tmp_path / "model", **changes, head_dim=128, num_key_value_heads=16, max_position_embeddings=512)
    text = " ".join(f"w{(i * i + 7 * i) % 90}" for i in range(12000))
    options = {"calibration": [text], "rows": 16, "length": 512, "report_rows": 4, "device": "cuda"}
    job, before = ConversionJob(source, tmp_path / "out", bpw=4.0, **options), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    job.run()
    taken, bound = torch.cuda.max_memory_allocated() - before, job.gpu_memory().nbytes
    assert 0.2 * bound < taken < bound


def test_sparse_models_and_the_job(source, tmp_path):
    mixtral = {
        **CONFIG,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "attention_bias": False,
    }
    few, many = (plan_cpu_memory(parse_config({**mixtral, "num_local_experts": count}), Asked(rows=4, length=32)) for count in (2, 16))
    assert 0 < few.nbytes < many.nbytes
    job = ConversionJob(source, tmp_path / "out", bpw=4.0, **OPTIONS)
    assert job.memory() == plan_cpu_memory(parse_config(CONFIG), Asked(rows=6, length=32, report_rows=8))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # half a minute on a machine of its own
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_stays_within_the_bound(tmp_path):
    changes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "vocab_size": 16000, "num_attention_heads": 8}
    source = write_model(tmp_path / "model", **changes, head_dim=64, num_key_value_heads=4, max_position_embeddings=512)
    done = subprocess.run([sys.executable, "-c", CHILD, str(source), str(tmp_path / "out")], capture_output=True, text=True, check=True)
    taken, bound = map(int, done.stdout.split()[-2:])
    assert 0.3 * bound < taken < bound


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
        hessian: {
            "MOST_IN_F64": 512,
            "MAX_SCORE_NUMBERS": (1 << 25) // SMALLER,
            "MAX_INNER_NUMBERS": (1 << 25) // SMALLER,
            "MAX_WHOLE_OUTPUTS": 64,
            "BLOCK_OUTPUTS": 32,
        },
        memory_estimate: {
            "MOST_IN_F64": 512,
            "SPLIT_NUMBERS": (1 << 25) // SMALLER,
            "COPIES_BYTES": (1 << 30) // SMALLER,
            "STREAM_BYTES": 0,
            "SPAN_ROWS": 32,
            "RESULT_NUMBERS": (1 << 24) // SMALLER,
        },
        quantization: {"HELD_BYTES": 0},
        pipeline: {"HELD_STATISTICS": 0},
    }

    def batches(config, x, first, last):
        rows = hessian.gpu_rows(config, x.shape[1])
        return [slice(start, min(start + rows, last)) for start in range(first, last, rows)]

    for module, values in changes.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    for module in (hessian, quantization, sensitivity):
        monkeypatch.setattr(module, "row_batches", batches)


def test_what_is_alive_at_once_is_below_the_stated_bound(gpu_in_small, tmp_path):
    source = write_model(tmp_path / "model", **SHAPE)
    text = " ".join(f"w{(i * i + 7 * i) % 90}" for i in range(6000))
    live, peaks = Live(), {}

    def sink(event):
        peaks[event.stage] = max(peaks.get(event.stage, 0), live.peak)
        live.peak = live.now

    with live:
        ConversionJob(source, tmp_path / "out", bpw=4.0, calibration=[text], device="cpu", **ROWS).run(sink)
    plan = memory_estimate.plan_gpu_memory(read_model_config(source), Asked(**ROWS))
    assert 0.4 * plan.sweep < peaks["measure"] < max(plan.sweep, plan.measure)
    assert 0.4 * plan.quantize < peaks["quantize"] < memory_estimate.ALLOCATOR_SLACK * plan.quantize
    assert memory_estimate.ALLOCATOR_SLACK * SMALLER * max(plan.sweep, plan.measure, plan.quantize) < 7.5 * 2**30

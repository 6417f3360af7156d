"""Faults from outside: kills at any moment, full disks, weights and activations that are not finite, targets that change."""

import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.core.errors import ConversionError, FormatError, Interrupted, OptionError
from exl2nb.io import safetensors
from tests.model.tiny import edit

from .test_conversion_job import OPTIONS, TEXT, convert, output, write_model

CHILD = """
import os, signal, sys, threading, time
from exl2nb.converter.conversion_job import ConversionJob
src, dst, text, event, delay, device = sys.argv[1:]
count = 0
def sink(_):
    global count
    if count == int(event):
        threading.Thread(target=lambda: (time.sleep(float(delay)), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
    count += 1
ConversionJob(src, dst, bpw=4.0, calibration=[text], rows=6, length=32, polish=True, device=device).run(sink)
"""


@pytest.fixture(scope="module")
def polished(source, tmp_path_factory):
    """Bytes of the model and its report, and how many events there were."""
    events = []
    done = convert(source, tmp_path_factory.mktemp("out") / "polished", events.append, polish=True)
    return output(done.path), (done.path / "conversion.json").read_bytes(), len(events)


def kill_again_and_again(source, dst, moments, device):
    """Start the conversion in processes that are killed, then finish it here."""
    killed = 0
    for event, delay in moments:
        arguments = [str(source), str(dst), TEXT[0], str(event), str(delay), device]
        done = subprocess.run([sys.executable, "-c", CHILD, *arguments], check=False)
        assert done.returncode in (0, -signal.SIGKILL)
        if done.returncode == 0:  # the kill came too late
            assert (dst / "config.json").exists()
            break
        killed += 1
        if (dst / "config.json").exists():  # killed after the directory had appeared: it is whole
            assert output(dst)
            break
    if not (dst / "config.json").exists():
        convert(source, dst, device=device, polish=True)
    return killed


def test_killed_at_a_handful_of_moments(source, polished, tmp_path, device):
    rng = random.Random(0)
    moments = [(event, rng.random() * 0.02) for event in (4, polished[2] // 2, polished[2] - 12)]
    assert kill_again_and_again(source, tmp_path / "out", moments, device) >= 1
    assert output(tmp_path / "out") == polished[0]
    assert (tmp_path / "out" / "conversion.json").read_bytes() == polished[1]


@pytest.mark.gpu
def test_killed_while_a_gpu_works(source, tmp_path):
    events = []
    done = convert(source, tmp_path / "whole", events.append, device="cuda", polish=True)
    moments = [(event, 0.01) for event in (1, 4, len(events) // 2, len(events) - 6)]  # measuring and quantising
    assert kill_again_and_again(source, tmp_path / "out", moments, "cuda") >= 1
    assert output(tmp_path / "out") == output(done.path)
    assert (tmp_path / "out" / "conversion.json").read_bytes() == (done.path / "conversion.json").read_bytes()


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.timeout(1800)
def test_killed_at_thirty_random_moments():
    """`tools/kill_conversions.py` alone: a hundred."""
    tool = Path(__file__).parents[2] / "tools" / "kill_conversions.py"
    done = subprocess.run([sys.executable, str(tool), "--kills", "30"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] >= 30
    assert not found["wrong"]
    assert {"polish", "quantize"} <= found["by_stage"].keys()


def test_another_bitrate_on_resume(source, polished, tmp_path):
    class Stop(Exception):
        pass

    def bomb(event):
        if event.stage == "quantize" and event.done == 2:
            raise Stop

    with pytest.raises(Stop):
        convert(source, tmp_path / "out", bomb, bpw=6.0, polish=True)
    stages = []
    done = convert(source, tmp_path / "out", lambda e: stages.append(e.stage), polish=True)
    assert "measure" not in stages  # taken over
    assert done.target_bpw == 4.0
    assert output(done.path) == polished[0]  # as if nobody had asked for 6


@pytest.mark.parametrize(("place", "words"), [("shutil.disk_usage", "free"), ("exl2nb.io.atomic.free_bytes", "disk is full")])
def test_a_full_disk_is_named(source, tmp_path, monkeypatch, place, words):
    """Before anything is written, and while files are."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(place, lambda path: usage._replace(free=1000) if "usage" in place else 10)
    with pytest.raises(ConversionError, match=words):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_not_finite_are_named(tmp_path):
    source = write_model(tmp_path / "bad")
    up, down, q = (f"model.layers.{i}.{name}.weight" for i, name in ((1, "mlp.up_proj"), (1, "mlp.down_proj"), (2, "self_attn.q_proj")))
    with safetensors.SafetensorsFile(source / "model.safetensors") as file:
        good = {name: file.read(name).float() for name in (up, down, q)}

    def spoilt(name, value):
        return good[name].index_put((torch.tensor([3]), torch.tensor([4])), torch.tensor(value))

    for changes, error, words in (
        ({up: spoilt(up, torch.inf)}, FormatError, r"up_proj.weight.*infinity"),
        ({up: good[up], down: good[down] * 1e38}, ConversionError, r"layer \d.*(NaN|infinity)"),
        ({q: spoilt(q, torch.nan)}, (ConversionError, FormatError), r"layer.*(NaN|infinity)"),
    ):
        edit(source, changes)
        with pytest.raises(error, match=words):
            convert(source, tmp_path / "out")


def test_inputs_of_low_rank(tmp_path):
    """Dead channels, inputs that are always zero and rows that are all alike: Hessians of low rank, down to none at all."""
    source = write_model(tmp_path / "dead")
    with safetensors.SafetensorsFile(source / "model.safetensors") as file:
        tensors = {name: file.read(name).clone() for name in file.names()}
    tensors["model.layers.0.input_layernorm.weight"][:40] = 0
    for name in ("layers.1.mlp.gate_proj.weight", "layers.2.self_attn.v_proj.weight", "layers.2.self_attn.v_proj.bias"):
        tensors[f"model.{name}"][:] = 0  # silu(0) * up: down reads nothing but zeros
    done = convert(edit(source, tensors), tmp_path / "out", calibration=["w1 " * 4000], rows=2)
    assert all(torch.isfinite(torch.tensor([m.loss, m.predicted_kl])).all() for m in done.matrices)
    assert done.bpw <= 4.0


def test_iterate_pause_and_leave(source, tmp_path):
    job = ConversionJob(source, tmp_path / "out", bpw=4.0, **OPTIONS)
    events = list(job)
    assert job.result is not None
    stages = {stage: list(some)[-1] for stage, some in itertools.groupby(events, lambda event: event.stage)}
    assert [(stage, last.share) for stage, last in stages.items()] == [(stage, 1.0) for stage in stages], (
        "announced are the steps that come"
    )
    assert events[-1].work_share == 1.0
    assert list(stages) == ["calibrate", "equalize", "measure", "allocate", "quantize", "write"]
    job = ConversionJob(source, tmp_path / "two", bpw=4.0, **OPTIONS)
    for event in job:
        if event.stage == "measure":
            job.pause()
            job.resume()
        if event.stage == "quantize":
            break
    assert job.result is None
    assert not (tmp_path / "two").exists()
    paused = ConversionJob(source, tmp_path / "three", bpw=4.0, **OPTIONS)
    paused.pause()
    paused.cancel()
    with pytest.raises(Interrupted):
        paused.run()
    with pytest.raises(OptionError, match="device"):
        ConversionJob(source, tmp_path / "four", bpw=4.0, device="abacus")


def test_targets(source, tmp_path):
    done = convert(source, tmp_path / "out", bpw=None, target={"bytes": 90_000}, report_rows=0)
    assert done.nbytes <= 90_000
    assert done.quality is None
    frozen = {m.key: m.groups for m in done.matrices if m.layer == 0}
    other = convert(source, tmp_path / "b", bpw=5.0, frozen=frozen, measurement=done.measurement)
    assert {m.key: m.groups for m in other.matrices if m.layer == 0} == frozen
    for wrong in ({}, {"bpw": 4.0, "target": {"bytes": 9}}):
        with pytest.raises(OptionError, match="not both|expected a number from 2 to 8"):
            ConversionJob(source, tmp_path / "c", **wrong)

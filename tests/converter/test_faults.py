"""What goes wrong outside of us: kills at any moment, full disks, weights and activations that are not numbers, targets that change."""

import os
import random
import signal
import subprocess
import sys

import pytest
import torch

from exl2nb.converter.job import ConversionJob
from exl2nb.core.errors import ConversionError, FormatError, Interrupted, OptionError
from exl2nb.io import safetensors
from exl2nb.model.archs import parse_config

from .test_job import CONFIG, OPTIONS, TEXT, output, write_model

EVERYTHING = {**OPTIONS, "polish": True}  # every stage there is
CHILD = """
import os, signal, sys, threading, time
from exl2nb.converter.job import ConversionJob
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
def whole(source, tmp_path_factory):
    events = []
    done = ConversionJob(source, tmp_path_factory.mktemp("out") / "whole", bpw=4.0, **EVERYTHING).run(events.append)
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
        ConversionJob(source, dst, bpw=4.0, device=device, **EVERYTHING).run()
    return killed


def test_killed_at_a_handful_of_moments(source, whole, tmp_path, device):
    rng = random.Random(0)
    moments = [(event, rng.random() * 0.02) for event in (4, whole[2] // 2, whole[2] - 12)]
    assert kill_again_and_again(source, tmp_path / "out", moments, device) >= 1
    assert output(tmp_path / "out") == whole[0]
    assert (tmp_path / "out" / "conversion.json").read_bytes() == whole[1]


@pytest.mark.gpu
def test_killed_while_a_gpu_works(source, tmp_path):
    events = []
    done = ConversionJob(source, tmp_path / "whole", bpw=4.0, device="cuda", **EVERYTHING).run(events.append)
    moments = [(event, 0.01) for event in (1, 4, len(events) // 2, len(events) - 6)]  # measuring and quantising
    assert kill_again_and_again(source, tmp_path / "out", moments, "cuda") >= 1
    assert output(tmp_path / "out") == output(done.path)
    assert (tmp_path / "out" / "conversion.json").read_bytes() == (done.path / "conversion.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_fifty_random_moments(source, whole, tmp_path, seed, device):
    rng = random.Random(seed)
    moments = [(rng.randrange(whole[2]), rng.random() * 0.05) for _ in range(5)]
    kill_again_and_again(source, tmp_path / "out", moments, device)
    assert output(tmp_path / "out") == whole[0]


def test_another_bitrate_on_resume(source, whole, tmp_path):
    class Stop(Exception):
        pass

    def bomb(event):
        if event.stage == "quantize" and event.done == 2:
            raise Stop

    with pytest.raises(Stop):
        ConversionJob(source, tmp_path / "out", bpw=6.0, **EVERYTHING).run(bomb)
    stages = []
    done = ConversionJob(source, tmp_path / "out", bpw=4.0, **EVERYTHING).run(lambda e: stages.append(e.stage))
    assert "measure" not in stages  # taken over
    assert done.target_bpw == 4.0
    assert output(done.path) == whole[0]  # as if nobody had asked for 6


def test_a_full_disk_says_so(source, tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ConversionError, match="free"):
        ConversionJob(source, tmp_path / "out", bpw=4.0, **OPTIONS).run()
    assert not (tmp_path / "out").exists()


def test_activations_that_overflow_name_the_layer(source, tmp_path):
    bad = write_model(tmp_path / "bad")
    tensors = {}
    with safetensors.SafetensorsFile(bad / "model.safetensors") as file:
        tensors = {name: file.read(name).float() for name in file.names()}
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1e38
    safetensors.save(bad / "model.safetensors", tensors)
    with pytest.raises(ConversionError, match=r"layer \d.*(NaN|infinity)"):
        ConversionJob(bad, tmp_path / "out", bpw=4.0, **OPTIONS).run()
    tensors["model.layers.2.self_attn.q_proj.weight"][0, 0] = float("nan")
    safetensors.save(bad / "model.safetensors", tensors)
    with pytest.raises((ConversionError, FormatError), match=r"layer.*(NaN|infinity)"):
        ConversionJob(bad, tmp_path / "out2", bpw=4.0, **OPTIONS).run()


def test_inputs_of_low_rank(tmp_path):
    """Dead channels, inputs that are always zero and rows that are all alike: Hessians of low rank, down to none at all."""
    source = write_model(tmp_path / "dead")
    with safetensors.SafetensorsFile(source / "model.safetensors") as file:
        tensors = {name: file.read(name) for name in file.names()}
    tensors["model.layers.0.input_layernorm.weight"][:40] = 0
    tensors["model.layers.1.mlp.gate_proj.weight"][:] = 0  # silu(0) * up: down reads nothing but zeros
    tensors["model.layers.2.self_attn.v_proj.weight"][:] = 0
    tensors["model.layers.2.self_attn.v_proj.bias"][:] = 0
    safetensors.save(source / "model.safetensors", tensors)
    done = ConversionJob(source, tmp_path / "out", bpw=4.0, calibration=["w1 " * 4000], rows=2, length=32).run()
    assert all(torch.isfinite(torch.tensor([m.loss, m.predicted_kl])).all() for m in done.matrices)
    assert done.bpw <= 4.0


def test_iterate_pause_and_leave(source, tmp_path):
    job = ConversionJob(source, tmp_path / "out", bpw=4.0, **OPTIONS)
    stages = [event.stage for event in job]
    assert job.result is not None
    assert list(dict.fromkeys(stages)) == ["calibrate", "measure", "allocate", "quantize", "write"]
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


def test_targets(source, whole, tmp_path):
    done = ConversionJob(source, tmp_path / "out", target={"bytes": 90_000}, report_rows=0, **OPTIONS).run()
    assert done.nbytes <= 90_000
    assert done.quality is None
    frozen = {m.key: m.groups for m in done.matrices if m.layer == 0}
    other = ConversionJob(source, tmp_path / "b", bpw=5.0, frozen=frozen, measurement=done.measurement, **OPTIONS).run()
    assert {m.key: m.groups for m in other.matrices if m.layer == 0} == frozen
    for wrong in ({}, {"bpw": 4.0, "target": {"bytes": 9}}):
        with pytest.raises(OptionError, match="not both|expected a number from 2 to 8"):
            ConversionJob(source, tmp_path / "c", **wrong)
    assert parse_config(CONFIG).num_layers == 3
    assert os.listdir(tmp_path / "out")

"""The plan beside what the GPU gives away: after loading, and at the worst moment of a text of full length."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHOICES = ((4096, 1, "fp16"), (2048, 8, "q4"), (4096, 4, "q6"))
SCRIPT = """
import json, sys, torch
import exl2nb as ex
path, choices = sys.argv[1], json.loads(sys.argv[2])
torch.zeros(1, device="cuda")
first = torch.cuda.mem_get_info()[0]
for context, batch, cache in choices:
    plan = ex.plan(path, context=context, batch=batch, cache=cache, device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base, kept = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    llm = ex.load(path, device="cuda", context=context, cache=cache, cache_tokens=context * batch, progress=None)
    torch.cuda.synchronize()
    loaded, reserved = base - torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved() - kept
    long = [5 + i % 200 for i in range(context - 16)]
    for handle in [llm.stream([7 + i, *long[1:]], max_tokens=8, temperature=0.8, seed=1, ignore_eos=True) for i in range(batch)]:
        handle.result()
    llm.generate(["It was"] * batch, max_tokens=8, temperature=0.8, seed=1, ignore_eos=True)
    torch.cuda.synchronize()
    most = torch.cuda.memory_stats()["reserved_bytes.all.peak"] - kept
    outside = first - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()  # code that CUDA has loaded in this process, and graphs
    print(json.dumps({"loaded": loaded, "reserved": reserved, "peak": most + outside, "outside": outside, "weights": llm.weight_bytes,
                      "cache": llm.cache_bytes, "parts": plan.parts, "total": plan.total}), flush=True)
    llm.close()
    del llm
"""


def maker():
    spec = importlib.util.spec_from_file_location("make_random_model", ROOT / "benchmarks" / "make_random_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_random_model"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def measured(folder):
    """What the GPU gave for every choice, in a process of its own: CUDA's code is loaded once a process."""
    command = [sys.executable, "-c", SCRIPT, str(folder), json.dumps(CHOICES)]
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def report(choice, found):
    """One line: part by part what was said and what was taken, MiB."""
    parts = found["parts"]
    after = parts["weights"] + parts["cache"] + parts["rounding"]
    pairs = {
        "weights": (parts["weights"], found["weights"]),
        "cache": (parts["cache"], found["cache"]),
        "after load": (after, found["loaded"]),
        "of them torch": (after, found["reserved"]),
        "at most": (found["total"], found["peak"]),
        "code and graphs": (parts["graphs"], found["outside"]),
        "work": (parts["work"], found["peak"] - found["outside"] - found["reserved"]),
    }
    words = ", ".join(f"{name} {said / 2**20:.1f} said {took / 2**20:.1f} taken" for name, (said, took) in pairs.items())
    return f"{choice}: {words}; after load {after / found['loaded'] - 1:+.2%}, at most {found['total'] / found['peak'] - 1:+.2%}"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["tinyllama", "llama3-8b"])
def test_plan_is_what_load_takes(shape, tmp_path_factory):
    make = maker()
    folder = tmp_path_factory.mktemp("models") / shape
    make.make(make.SHAPES[shape], folder, bpw=4.0)
    wrong = []
    for choice, found in zip(CHOICES, measured(folder), strict=True):
        words, parts = report(choice, found), found["parts"]
        print(shape, words)
        after = parts["weights"] + parts["cache"] + parts["rounding"]
        good = parts["cache"] == found["cache"] and 0 <= parts["weights"] - found["weights"] < 0.005 * found["weights"]
        good = good and after == found["reserved"] and after == pytest.approx(found["loaded"], rel=0.02)
        if not good or found["total"] != pytest.approx(found["peak"], rel=0.02, abs=64 * 2**20):
            wrong.append(words)
    assert not wrong, "\n".join(wrong)

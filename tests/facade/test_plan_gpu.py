"""The plan beside what the GPU gives away: after loading, and at the worst moment of a text of full length."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys, threading, time, torch
import exl2nb as ex
path, context, batch, cache = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.zeros(1, device="cuda")
ex.plan(path, device="cuda")  # loads what planning itself loads
def used():
    return base - torch.cuda.mem_get_info()[0]
base = torch.cuda.mem_get_info()[0]
plan = ex.plan(path, context=context, batch=batch, cache=cache, device="cuda")
llm = ex.load(path, device="cuda", context=context, cache=cache, cache_tokens=context * batch, progress=None)
torch.cuda.synchronize()
loaded, most, over = used(), [0], threading.Event()
def watch():
    while not over.is_set():
        most[0] = max(most[0], used())
        time.sleep(0.001)
threading.Thread(target=watch, daemon=True).start()
long = [5 + i % 200 for i in range(context - 16)]
for handle in [llm.stream([7 + i, *long[1:]], max_tokens=8, temperature=0.8, seed=1, ignore_eos=True) for i in range(batch)]:
    handle.result()
llm.generate(["It was"] * batch, max_tokens=8, temperature=0.8, seed=1, ignore_eos=True)
over.set()
reserved = torch.cuda.memory_stats()["reserved_bytes.all.peak"]
after = used()
llm.close()
print(json.dumps({"loaded": loaded, "peak": max(most[0], after), "after": after, "reserved": reserved, "weights": llm.weight_bytes,
                  "parts": plan.parts, "total": plan.total}))
"""


def maker():
    spec = importlib.util.spec_from_file_location("make_random_model", ROOT / "benchmarks" / "make_random_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_random_model"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["tinyllama", "llama3-8b"])
def test_plan_is_what_load_takes(shape, tmp_path_factory):
    """Each in a process of its own, for CUDA's own code is loaded once a process."""
    make = maker()
    folder = tmp_path_factory.mktemp("models") / shape
    make.make(make.SHAPES[shape], folder, bpw=4.0)
    for context, batch, cache in ((4096, 1, "fp16"), (2048, 8, "q4"), (4096, 4, "q6")):
        command = [sys.executable, "-c", SCRIPT, str(folder), str(context), str(batch), cache]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout.splitlines()[-1])
        parts = found["parts"]
        rest = parts["weights"] + parts["cache"] + parts["rounding"]
        shown = {name: round(value / 2**20, 1) for name, value in {**found, **parts, "rest": rest, "parts": 0}.items()}
        print(
            shape, context, batch, cache, shown, f"rest {rest / found['loaded'] - 1:+.2%}, peak {found['total'] / found['peak'] - 1:+.2%}"
        )
        step = 20 * 2**20  # a segment of the allocator: what one tensor more or less may cost
        assert parts["weights"] == pytest.approx(found["weights"], rel=0.005)
        assert rest == pytest.approx(found["loaded"], rel=0.02, abs=step), shown
        assert found["total"] == pytest.approx(found["peak"], rel=0.02, abs=3 * step), shown

"""The memory plan against what loading takes, on the CPU and on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import exl2nb as ex
from exl2nb.cli import main
from exl2nb.core.errors import DeviceError, ModelNotFound, OptionError

from .lora_maker import write_lora

ROOT = Path(__file__).parents[2]
DEMO = Path(ex.__file__).parent / "demo_model"


@pytest.mark.parametrize(("cache", "context"), [("fp16", 1000), ("q4", 4096)])
def test_plan_is_what_load_uses(cache, context):
    planned = ex.plan(DEMO, context=context, cache=cache, batch=5)
    with ex.load(DEMO, context=context, cache=cache, cache_tokens=5 * context, rope_scale=4, progress=None) as llm:
        assert planned.weights == pytest.approx(llm.weight_bytes, rel=0.02)
        page = 256 * planned.token_bytes
        assert abs(planned.cache - llm.cache_bytes) <= 5 * page, "each sequence rounds up to whole pages"


def test_a_draft_model_is_planned(capsys):
    alone, both = (ex.plan(DEMO, context=512, batch=3, draft=draft) for draft in (None, DEMO))
    with ex.load(DEMO, draft=DEMO, context=512, cache_tokens=3 * 512, progress=None) as llm:
        assert both.weights == 2 * alone.weights
        assert both.cache == 2 * alone.cache == 2 * llm.cache_bytes
    assert "demo_model with demo_model" in str(both)
    assert main(["plan", "demo", "--draft", str(DEMO), "--context", "512", "--batch", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"]["weights"] == both.weights
    alone, both = (ex.plan(DEMO, device="cuda", free=2**30, draft=draft) for draft in (None, DEMO))
    assert both.graphs > alone.graphs + 16 * alone.logits, "captured rounds of draft tokens"
    assert both.logits == alone.logits
    with pytest.raises(OptionError, match="a copy that loading makes"):
        ex.plan(DEMO, draft="self")
    with pytest.raises(OptionError, match="draft with devices"):
        ex.plan(DEMO, devices=["cpu"], draft=DEMO)


def test_verdict_and_advice():
    roomy = ex.plan(DEMO, free=10**10)
    assert roomy.fits
    assert "fits" in str(roomy)
    small = ex.plan(DEMO, context=4096, batch=4, free=100 * 2**20)
    assert not small.fits
    assert 0 < small.longest < 4096
    assert f"try context={small.longest} or cache='q4'" in str(small)
    assert ex.plan(DEMO, context=small.longest, batch=4, free=100 * 2**20).fits, "the advice works"
    assert "use fewer bits" in ex.plan(DEMO, free=1000).verdict()
    long = ex.plan(DEMO, context=5000, free=8 << 30).verdict()
    assert "the model itself reads 1024 tokens at most; take context=1024" in long


def test_repr_is_safe_and_complete():
    planned = ex.plan(DEMO)
    text = planned._repr_html_()
    assert all(name in text for name in ("weights", "cache", "work", "logits"))
    assert sum(planned.parts.values()) == planned.total


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no GPU"):
        ex.plan(DEMO, device="cuda")


def test_command(capsys):
    assert main(["plan", "demo", "--batch", "2", "--cache", "q8", "--free", "1GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batch"], found["cache_mode"], found["free"], found["fits"]) == (2, "q8", 2**30, True)
    assert main(["plan", "demo", "--free", "1GiB"]) == 0
    assert "weights" in capsys.readouterr().out
    assert main(["plan", "demo", "--batch", "0"]) == 2


# ---- on a GPU

CHOICES = ((4096, 1, "fp16"), (2048, 8, "q4"), (4096, 4, "q6"))
SCRIPT = """
import json, sys, torch
import exl2nb as ex
path, choices, draft = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] or None
more = {"speculation": {"kind": "draft", "adaptive": False}} if draft else {}
torch.zeros(1, device="cuda")
first = torch.cuda.mem_get_info()[0]
for context, batch, cache in choices:
    plan = ex.plan(path, context=context, batch=batch, cache=cache, device="cuda", draft=draft)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base, kept = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    llm = ex.load(path, device="cuda", context=context, cache=cache, cache_tokens=context * batch, draft=draft, progress=None)
    torch.cuda.synchronize()
    loaded, reserved = base - torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved() - kept
    long = [5 + i % 200 for i in range(context - 16)]
    for handle in [llm.stream([7 + i, *long[1:]], max_tokens=8, temperature=0.8, seed=1, ignore_eos=True) for i in range(batch)]:
        handle.result()
    llm.generate(["It was"] * batch, max_tokens=8, temperature=0.8, seed=1, ignore_eos=True)
    for count in range(1, 8) if draft else ():
        more["speculation"]["max_tokens"] = count
        for some in (1, batch):
            llm.generate(["It was"] * some, max_tokens=64, temperature=0.8, seed=1, ignore_eos=True, **more)
    torch.cuda.synchronize()
    most = torch.cuda.memory_stats()["reserved_bytes.all.peak"] - kept
    outside = first - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()  # code that CUDA has loaded in this process, and graphs
    print(json.dumps({"loaded": loaded, "reserved": reserved, "peak": most + outside, "outside": outside, "weights": llm.weight_bytes,
                      "cache": llm.cache_bytes, "parts": plan.parts, "total": plan.total}), flush=True)
    llm.close()
    del llm
"""


def measured(folder, choices=CHOICES, draft=""):
    """What the GPU gave for every choice, in a process of its own: CUDA's code is loaded once a process."""
    command = [sys.executable, "-c", SCRIPT, str(folder), json.dumps(choices), str(draft)]
    path = os.pathsep.join(part for part in (os.environ.get("PYTHONPATH", ""), str(ROOT)) if part)
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
def test_plan_is_what_load_takes_on_a_gpu(shape, script, tmp_path_factory):
    make = script("benchmarks/make_random_model.py")
    folder = tmp_path_factory.mktemp("models") / shape
    make.make(make.SHAPES[shape], folder, bpw=4.0)
    wrong = []
    for choice, found in zip(CHOICES, measured(folder), strict=True):
        words, parts = report(choice, found), found["parts"]
        print(shape, words)
        after = parts["weights"] + parts["cache"] + parts["rounding"]
        good = parts["cache"] == found["cache"] and 0 <= parts["weights"] - found["weights"] < 0.005 * found["weights"]
        kept = found["reserved"] - after  # the workspace of a step of one token
        good = good and 0 <= kept <= 0.1 * parts["work"] and found["reserved"] == pytest.approx(found["loaded"], rel=0.02)
        if not good or found["total"] != pytest.approx(found["peak"], rel=0.02, abs=64 * 2**20):
            wrong.append(words)
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
def test_plan_is_what_a_draft_model_takes_on_a_gpu(script, tmp_path):
    """Its weights, its cache, and every captured round and verifying step of one request and of four."""
    make = script("benchmarks/make_random_model.py")
    for name, bpw in (("target", 4.0), ("draft", 2.5)):
        make.make(make.SHAPES["tinyllama"], tmp_path / name, bpw=bpw)
    choice = 2048, 4, "q4"
    [found] = measured(tmp_path / "target", [choice], tmp_path / "draft")
    words = report(choice, found)
    print(words)
    assert found["total"] == pytest.approx(found["peak"], rel=0.05, abs=96 * 2**20), words


def test_adapters_are_planned(tmp_path, capsys):
    """From their headers what loading takes; shown in text, HTML and by the command."""
    with ex.demo(device="cpu", progress=None) as llm:
        folders = [write_lora(tmp_path / f"a{rank}", llm.config, rank=rank) for rank in (4, 20)]
        for folder in folders:
            llm.loras.load(folder)
        planned = ex.plan(DEMO, loras=folders, free=10**10)
        assert planned.adapters == llm.loras.nbytes and planned.total == ex.plan(DEMO, free=10**10).total + planned.adapters
    assert planned.at(batch=3).adapters == planned.adapters and "adapters" in str(planned) and "adapters" in planned._repr_html_()
    assert "adapters" not in str(ex.plan(DEMO))
    old = {key: value for key, value in planned.formula.to_dict().items() if key != "adapters"}
    assert type(planned.formula).from_dict(old).adapters == 0
    assert main(["plan", "demo", "--lora", str(folders[0]), "--lora", f"{folders[1]}=0.5", "--free", "1GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"]["adapters"] == planned.adapters
    with pytest.raises(ModelNotFound, match="adapter_config"):
        ex.plan(DEMO, loras=[DEMO])

"""The public face: sorted, lazy, cheap to import."""

import json
import subprocess
import sys

import pytest

import exl2nb

HEAVY = (
    "torch",
    "numpy",
    "pandas",
    "transformers",
    "tokenizers",
    "safetensors",
    "jinja2",
    "IPython",
    "ipywidgets",
    "anywidget",
    "huggingface_hub",
)


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_all_is_sorted_and_resolves():
    assert exl2nb.__all__ == sorted(exl2nb.__all__)
    for name in exl2nb.__all__:
        assert getattr(exl2nb, name) is not None
    assert set(exl2nb.__all__) <= set(dir(exl2nb))


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="public names: ConversionJob, Image, Job, LLM, MemoryPlan, check, compare, convert"):
        _ = exl2nb.lode


def test_import_loads_nothing_heavy():
    loaded = json.loads(fresh("import sys, json, exl2nb; print(json.dumps(sorted(sys.modules)))"))
    assert not [name for name in HEAVY if name in loaded]


@pytest.fixture(scope="module")
def engine():
    """What a process that imports torch, then the engine, loads the demo model and imports the converter has to say; seconds, so once."""
    return json.loads(
        fresh("""
import json, os, signal, sys, threading, torch
state = lambda: repr((dict(os.environ), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)], threading.active_count(),
                      torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()))
found = {"before": state()}
import exl2nb, exl2nb.llm, exl2nb.model.loader, exl2nb.generator.engine
found |= {"after": state(), "cuda": torch.cuda.is_initialized()}
exl2nb.demo(device="cpu", progress=None).close()
found["loaded"] = [name for name in sys.modules if name.startswith("exl2nb.")]
import exl2nb.converter.conversion_job, exl2nb.model.gpu_forward
found["compiler"] = "torch._dynamo" in sys.modules
print(json.dumps(found))
""")
    )


def test_import_changes_nothing(engine):
    """Neither environment, nor signal handlers, nor threads, nor output; the facade included, once torch itself is in."""
    assert engine["after"] == engine["before"]
    assert not engine["cuda"], "importing the engine made a CUDA context"


def test_the_engine_does_not_bring_torchs_compiler(engine):
    """Importing it takes as long as importing torch itself."""
    assert not engine["compiler"], "importing the engine imported torch._dynamo"


def test_loading_brings_what_the_model_uses(engine):
    """A text model neither sees nor has adapters: each of these modules would be a part of its time to load."""
    unused = (
        "model.vision",
        "model.lora",
        "model.traced_forward",
        "model.split",
        "llm.plan",
        "eval.",
        "generator.beams",
        "server",
        "widgets",
    )
    assert not [name for name in engine["loaded"] if name.removeprefix("exl2nb.").startswith(unused)]
    assert "exl2nb.generator.engine" in engine["loaded"]


def test_import_is_quick():
    best = min(float(fresh("import time; t = time.perf_counter(); import exl2nb; print(time.perf_counter() - t)")) for _ in range(3))
    assert best < 0.5  # about 0.01 s; half a second is what a notebook user would notice

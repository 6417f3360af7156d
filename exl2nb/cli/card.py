"""`exl2nb bench MODEL --report`: what this machine does with a model, as Markdown to paste into an issue."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import exl2nb
from exl2nb.cli.bench import measure, spare
from exl2nb.cli.doctor import cpu_name
from exl2nb.cli.models import demo_directory
from exl2nb.core.progress import Sink

BATCHES = (1, 8)
CACHES = ("fp16", "q8", "q6", "q4")
ROWS, LENGTH = 2, 256  # of the packaged evaluation text, for every KL


def measured(
    folder: Path, *, device: str | None, cache: str, context: int, tokens: int, rounds: int, progress: Sink | None
) -> dict[str, Any]:
    """Load a model, time it, and compare what it computes.

    Returns:
        machine: of texts. model: name, bpw, weight_bytes, load_s. memory: planned and most_used bytes on a GPU (else None), and the
        longest context of each cache that fits beside the weights. speed: a dict of `bench.measure` per batch. kl: nats per token, of each
        cache against fp32's, and `cpu`, of the demo model on this GPU against the CPU (None on a CPU).
    """
    import torch

    from exl2nb.llm.functions import compare, inspect
    from exl2nb.llm.load import load
    from exl2nb.llm.memory import plan

    longest = max(context + tokens + spare(max(BATCHES)) + 1, LENGTH)
    start = time.perf_counter()
    tokens_kept = max(BATCHES) * (longest + 256)
    with load(folder, device=device, cache=cache, context=longest, cache_tokens=tokens_kept, progress=progress) as llm:
        load_s, gpu = time.perf_counter() - start, llm.model.device.startswith("cuda")
        planned = plan(folder, context=longest + 256, cache=cache, batch=max(BATCHES), device="cuda" if gpu else "cpu")
        speed = [{"batch": batch, **measure(llm, batch=batch, context=context, tokens=tokens, rounds=rounds)} for batch in BATCHES]
        most_used = torch.cuda.max_memory_reserved() if gpu else None
        kl = {mode: compare(llm, llm, rows=ROWS, length=LENGTH, cache=mode, progress=progress).kl_mean for mode in CACHES}
        name, weight_bytes = llm.name, llm.model.weight_bytes
    free = plan(folder, device="cuda" if gpu else "cpu")  # the model is closed: all of its memory is free again
    return {
        "machine": machine(gpu),
        "model": {"name": name, "bpw": inspect(folder).decoder_bpw, "weight_bytes": weight_bytes, "load_s": load_s},
        "memory": {
            "planned": planned.total if gpu else None,
            "most_used": most_used,
            "free": free.free,
            "longest": {mode: free.at(cache=mode).longest for mode in CACHES},
        },
        "speed": speed,
        "kl": {**kl, "cpu": against_the_cpu(progress) if gpu else None},
    }


def against_the_cpu(progress: Sink | None) -> float:
    """KL of the demo model on the GPU against the CPU, nats per token: whether the kernels for this card compute what they should."""
    from exl2nb.llm.functions import compare
    from exl2nb.llm.load import load

    with load(demo_directory(), device="cpu", progress=progress) as here, load(demo_directory(), device="cuda", progress=progress) as there:
        return compare(here, there, rows=ROWS, length=LENGTH, progress=progress).kl_mean


def machine(gpu: bool) -> dict[str, str]:
    """What it ran on."""
    import torch

    from exl2nb.ops import _load, kernel_code

    found = {}
    if gpu:
        card = torch.cuda.get_device_properties()
        capability, size = f"{card.major}.{card.minor}", card.total_memory / 2**30
        found["card"] = f"{card.name}, compute capability {capability}, {card.multi_processor_count} SMs, {size:.1f} GiB"
        driver = ".".join(map(str, _load.driver() or ()))
        try:
            compiler = f"NVRTC {'.'.join(map(str, kernel_code.nvrtc().version))}"
        except kernel_code.NoCompiler:
            compiler = "no NVRTC"
        found["CUDA"] = f"driver for {driver}, torch for {torch.version.cuda}, {compiler}"
    found["processor"] = f"{cpu_name()}, {torch.get_num_threads()} threads, {_load.load().isa}"
    found["system"] = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    return found


def markdown(found: dict[str, Any]) -> str:
    """`measured` as two tables."""
    from exl2nb.llm.memory import size_text

    model, memory, kl = found["model"], found["memory"], found["kl"]
    facts = dict(found["machine"])
    facts["model"] = f"{model['name']}, {model['bpw']:.2f} bits per weight, {size_text(model['weight_bytes'])} of weights"
    facts["load"] = f"{model['load_s']:.1f} s"
    if memory["most_used"] is not None:
        facts["memory"] = f"{size_text(memory['planned'])} planned, {size_text(memory['most_used'])} used at most"
    if memory["free"] is not None:
        fitting = ", ".join(f"{mode} {tokens}" for mode, tokens in memory["longest"].items())
        facts["longest context"] = f"{fitting} tokens, in {size_text(memory['free'])} of free memory"
    facts["KL of a cache"] = ", ".join(f"{mode} {kl[mode]:.2g}" for mode in CACHES) + " nats against fp32"
    if kl["cpu"] is not None:
        facts["KL against the CPU"] = f"{kl['cpu']:.2g} nats, demo model in fp16"
    title = found["machine"].get("card", found["machine"]["processor"]).split(",")[0]
    lines = [f"### exl2nb {exl2nb.__version__} on {title}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {text.replace('|', '/')} |" for name, text in facts.items()]
    lines += ["", "| sequences | prefill tok/s | decode tok/s | ms per step | GB/s of weights |", "|---|---|---|---|---|"]
    lines += [f"| {s['batch']} | {s['prefill_tok_s']} | {s['decode_tok_s']} | {s['decode_ms']:.2f} | {s['gb_s']} |" for s in found["speed"]]
    return "\n".join(lines)

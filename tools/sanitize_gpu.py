"""compute-sanitizer over the tests that need a GPU: one process per family of kernels, some tests of each, for these tools are slow.

    python tools/sanitize_gpu.py [--tools memcheck racecheck] [--jobs 4] [--limit 600] [--only attention ...] [--logs DIR]

racecheck follows persistent chains and stream-K only where EXL2NB_KERNEL_OPTIONS has -DEXL2NB_EVERY_LANE_ARRIVES, as in `make sanitize`;
else it reports handovers there that are ordered (benchmarks/cuda/racecheck_patterns.cu).

With four jobs on an H100, 16 cores: memcheck two minutes, racecheck some more; --jobs 9 runs all families at once.

Prints one line a family: the sanitizer's own summary, how many tests ran, seconds. Ends with 1 where it found anything, where a test failed
or where a family did not come to its end. In memcheck torch's memory cache is off wherever nothing is captured, so that every tensor has
borders of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Family:
    """files: below tests/. memcheck, racecheck: pytest's -k for each tool; racecheck takes minutes for what memcheck does in seconds."""

    files: tuple[str, ...]
    memcheck: str
    racecheck: str
    captures: bool = False


FAMILIES = {
    "products": Family(
        ("ops/test_cuda_weights.py", "ops/test_cuda_blob.py"),
        "(any_number_of_rows and (all or short)) or stream_k or parts_side or dense_weights or odd_number or (decoded and all) "
        "or cuda_blob",
        "(any_number_of_rows and short) or stream_k or parts_side or dense_weights or (decoded and all and 224)",
    ),
    "chains": Family(
        ("model/test_gpu_step.py",),
        "one_launch and (mixed or biases or narrow or (4 and 32) or (gptq and 8))",
        "one_launch and (mixed or narrow)",
    ),
    "few rows": Family(("model/test_gpu_step.py",), "few_rows", "few_rows"),
    "short prompts": Family(
        ("model/test_gpu_forward.py",), "short_prompts and (fp16 or q4) and (9 or 20 or 128)", "short_prompts and fp16 and 20"
    ),
    "layers": Family(
        ("model/test_gpu_forward.py",),
        "step_kernels and (gpt2 or gemma2 or glm4 or mixtral)",
        "step_kernels and (gpt2 or gemma2)",
    ),
    "graphs": Family(
        ("model/test_gpu_forward.py", "generator/test_gpu_executor.py"), "sparse_model or full_gpu", "sparse_model", captures=True
    ),
    "experts": Family(
        ("ops/test_cuda_moe.py",),
        "mathematics and (order or all or tied or post or dense or shared) and not 60",
        "mathematics and shared and not (60 or alike)",
    ),
    "adapters": Family(
        ("model/test_gpu_lora.py",),
        "(equals and gain and (wide or dense) and (several or slice or prompt)) or (ranks and (17 or 300)) or no_adapter or room "
        "or (inside and wide and (two or seven or six))",
        "(equals and gain and wide and several) or (ranks and 300) or (inside and wide and 40 and (one or four or sixteen))",
    ),
    "attention": Family(
        ("ops/test_cuda_attention.py",),
        "(pairs_apart and (80 or 128)) or (head_dims and (q4 or fp16 or q8) and (24 or 64 or 256)) or (holds_the_formats and 80) "
        "or (gather and k4v8) or (any_length and k16v4) or (several_queries and 8-1-128) or (several_chunks and queries2) "
        "or (norms_and_clip and whole and 48)",
        "(pairs_apart and 80 and k4v16) or (head_dims and (q4 or fp16) and 64) or (several_chunks and queries2 and q4) "
        "or (norms_and_clip and whole and 48 and True)",
    ),
    "sampling": Family(("ops/test_cuda_sample.py",), "next_step or (tokens and 4099) or ties", "next_step or (tokens and 4099 and min_p)"),
    "prompts and GPTQ": Family(
        ("ops/test_prefill.py", "ops/test_cuda_weights.py", "ops/test_gptq.py"),
        "rows_on_the_gpu or rotation_on or decoded or definition or beside_other or (kernels_are and (40-0 or 48-16 or 512-256 or 1024))",
        "(rows_on_the_gpu and 77-30) or (rotation_on and 80) or beside_other or (kernels_are and (40-0 or 48-16 or 512-256))",
    ),
}


def run(sanitizer: str, tool: str, name: str, limit_s: float, logs: Path | None) -> tuple[bool, str]:
    """Whether a family is clean under a tool, and the line that says so; everything it wrote goes to a file of `logs`."""
    family, begun = FAMILIES[name], time.time()
    files = [str(ROOT / "tests" / file) for file in family.files]
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "--tb=line", *files, "-k", getattr(family, tool)]
    plain = {} if family.captures or tool != "memcheck" else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # where a test asks for more memory than there is, the refusal is what it wants to see
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = [sanitizer, "--tool", tool, "--print-limit", "5", "--error-exitcode", "9", *quiet, *pytest, "--timeout=0"]
    try:
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **plain}, capture_output=True, text=True, timeout=limit_s)
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        text, code = (late.stdout or b"").decode(errors="replace"), -1
    if logs is not None:
        (logs / f"{tool}-{name.split()[0]}.log").write_text(text)
    found = [line.strip("= \n") for line in re.findall(r"^=+ (?:Invalid|Error|Race|Program hit|Uninit|Barrier).*$", text, re.M)]
    summary = (re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text) or ["no summary"])[-1]
    tests = (re.findall(r"\d+ (?:passed|failed).*", text) or ["tests did not end"])[-1]
    said = f"{tool:10} {name:18} {summary}; {tests}; {time.time() - begun:.0f} s, exit {code}"
    return code == 0, "\n".join([said, *(f"    {line[:160]}" for line in found[:4])])


def main() -> None:
    """Run the families, several at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=("memcheck", "racecheck"), default=["memcheck", "racecheck"])
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--limit", type=float, default=600, help="seconds for one family under one tool")
    parser.add_argument("--logs", type=Path, help="a folder for everything that they write")
    args = parser.parse_args()
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    beside = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve().parent / "compute-sanitizer"
    sanitizer = shutil.which("compute-sanitizer") or (str(beside) if beside.exists() else "")
    if not sanitizer:
        sys.exit("compute-sanitizer was not found: it is part of the CUDA toolkit; put its folder on PATH")
    work = [(tool, name) for tool in args.tools for name in args.only]
    clean = True
    with ThreadPoolExecutor(args.jobs) as pool:
        for good, line in pool.map(lambda one: run(sanitizer, one[0], one[1], args.limit, args.logs), work):
            clean = clean and good
            print(line, flush=True)
    sys.exit(not clean)


if __name__ == "__main__":
    main()

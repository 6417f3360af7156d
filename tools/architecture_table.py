"""Write docs/internals/architectures.md: what the tests of architectures say, one row per tiny model, every cell from this run.

.venv/bin/python tools/architecture_table.py
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/model/test_archs.py", "tests/model/test_converted.py", "tests/model/test_gptq.py")
# column: the test behind it
COLUMNS = {
    "parity": "test_logits_equal_transformers",
    "EXL2": "test_exl2_equals_the_reconstructed_weights",
    "EXL2 round trip": "test_there_and_back",
    "chunked": "test_any_cut_gives_the_same_bits",
    "batched": "test_any_batch_gives_the_same_bits",
    "GPTQ": "test_gptq_equals_transformers",
    "inspect": "test_inspect_sees_every_matrix_of_a_checkpoint",
}
NOTES = {"gemmoe": " with Mixtral's experts, for want of a public definition"}  # what a class is that Transformers does not have
HEAD = """# Architectures

Written by `tools/architecture_table.py` from a run of the tests; do not edit. `tests/model/test_model.py` has more RoPE variants
of Llama, Mistral and Qwen2. `tests/model/test_gpu.py` compares every row on the GPU with the CPU.

- **parity**: three random models of different sizes (grouped, single and full KV heads, odd widths) against Transformers in fp32:
  at most 1e-4 of the logits' standard deviation with an fp32 cache, 5e-3 with an fp16 one. The torch reference of the converter
  agrees to 1e-4 too.
- **EXL2**: random matrices of 2 to 8 bits against the reference on the reconstructed weights.
- **EXL2 round trip**: the converter's output has ExLlamaV2's names and shapes, loads, and agrees with the reconstructed weights
  (ten models in Transformers too).
- **chunked**: prompt at once, in chunks and token by token, as one call and op by op: the same bits.
- **batched**: alone and in a batch: the same bits.
- **GPTQ**: a GPTQ checkpoint (2 to 8 bits, act-order and plain, both zero conventions, in turns) against Transformers with the
  dequantised weights.
- **inspect**: lists every matrix of a plain checkpoint under its name, fused ones split.

Where Transformers has no class of that name, the test uses the class that computes the same. GemMoE has no public definition: its
test model is Gemma with Mixtral's experts in place of the MLPs, as its config says. GPTQ files of DBRX are those of AutoGPTQ and
GPTQModel, which quantise a copy whose experts are separate linears; files with a quantised router, or all experts as one matrix,
are refused as incomplete.

"""


def run() -> dict[str, dict[str, bool]]:
    """Model -> test -> whether all its cases passed.

    Raises:
        SystemExit: the tests could not be run.
    """
    results: dict[str, dict[str, bool]] = {}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-m", "not gpu", *TESTS]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode not in (0, 1):  # a test that fails is a cell; anything else is no run
            raise SystemExit("the tests did not run: nothing was written")
        for case in ElementTree.parse(report).iter("testcase"):
            match = re.fullmatch(r"(\w+)\[(.+?)(-\d)?\]", case.get("name", ""))
            if match and match[1] in COLUMNS.values():
                passed = not any(child.tag in ("failure", "error", "skipped") for child in case)
                row = results.setdefault(match[2], {})
                row[match[1]] = row.get(match[1], True) and passed
    return results


def table(results: dict[str, dict[str, bool]]) -> str:
    """The rows, in the order of the zoo."""
    sys.path.insert(0, str(ROOT / "tests" / "model"))
    sys.path.insert(0, str(ROOT / "tests"))
    from model.zoo import ZOO  # type: ignore[import-not-found]

    lines = ["| model | architecture | Transformers class | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 3) + "|"]
    for name, entry in ZOO.items():
        marks = {True: "yes", False: "**no**", None: "-"}
        cells = [marks[results.get(name, {}).get(test)] for test in COLUMNS.values()]
        lines.append(f"| {name} | {entry.arch} | {entry.model}{NOTES.get(name, '')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help must not start minutes of tests
    (ROOT / "docs" / "internals" / "architectures.md").write_text(HEAD + table(run()), encoding="utf-8")

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
of Llama, Mistral and Qwen2. `tests/model/test_gpu_forward.py` compares every row on the GPU with the CPU.

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

## Keys of config.json

A key of `config.json` that changes the result and is not implemented is an error that names the key, its value, the supported values and
what to do. `exl2nb/model/config_fields.py` has the rules. Each entry of the table says which keys it reads (`reads`, and the fields that
name keys), which ones are harmless at some values only (`neutral`) and which ones never matter (`ignored`). An unknown key is refused if
its name suggests arithmetic (`scale`, `norm`, `rope`, `window`, ...) and its value switches something on. Inside of `rope_scaling` and
`rope_parameters` every unknown key is refused. `tests/model/test_config_keys.py` compares the table with the configuration classes of
Transformers, so a key that a class gets later fails a test; it compares the defaults of absent keys too.

These settings of supported architectures are refused:

| architecture | setting | why |
|---|---|---|
| Gemma, Gemma 2, Gemma 3 | `use_bidirectional_attention: true` | attention is causal |
| Gemma 3 | `attn_logit_softcapping` | Transformers has the key and does not apply it |
| Gemma 3 with pictures | `final_logit_softcapping` | this class of Transformers does not apply it |
| GPT-2, GPT-BigCode | `scale_attn_by_inverse_layer_idx: true`, `add_cross_attention: true`, `multi_query: false` | not implemented |
| DBRX | `uniform_expert_assignment: true`, two different `rope_theta` | not implemented; ambiguous |
| MiniCPM | `sparse_config`, `use_mup: false` | not implemented |
| Qwen 1 | `no_bias: false`, `rotary_pct` below 1, `scale_attn_weights: false` | not implemented |
| Cohere, Cohere 2 | `use_parallel_block: false` and other blocks of Cohere's trainer | not implemented |
| Qwen3-VL | `use_sliding_window: true`, `mrope_interleaved: false` | this class has neither |
| Mistral 3, Llava, Gemma 3, Qwen-VL | an unlisted `model_type` in `text_config` or `vision_config` | another model |
| all | `layer_types` that disagree with the windows, `factor` without a RoPE type | ambiguous |

Two settings limit the context instead, because they change the result from a length on. A longer context is an error.

- Ministral 3, `llama_4_scaling_beta`: the queries at position p are scaled by
  1 + beta * log(1 + floor(p / original_max_position_embeddings)). The factor is exactly 1 up to `original_max_position_embeddings`
  tokens (16384 in the published models), and that is the limit. The kernels rotate queries and keys by one table and have no factor for
  queries alone.
- Qwen 1, `use_dynamic_ntk` and `use_logn_attn` (both on where absent): they begin at `seq_length`.

## Tests

"""


SEEING_TESTS = (
    "tests/model/vision/test_parity.py",
    "tests/model/vision/test_conversion.py",
    "tests/model/vision/test_trace.py",
    "tests/llm/test_pictures.py",
)
SEEING_COLUMNS = {
    "tower": "test_towers_equal_transformers",
    "logits": "test_logits_with_pictures_equal_transformers",
    "answers": "test_answers_equal_transformers",
    "chunked": "test_any_cut_gives_the_same_bits",
    "beside texts": "test_beside_texts_and_other_pictures_answers_are_the_same",
    "converted": "test_a_converted_model_sees_what_the_original_sees",
    "trace": "test_logits_are_the_chat_s",
}
SEEING_HEAD = """
## Models that see

The same of `tests/model/vision` and `tests/llm/test_pictures.py`; `tests/model/vision/test_gpu.py` compares every row on the GPU
with the CPU.

- **tower**: features of pictures of odd sizes, and of videos for Qwen's classes, against Transformers in fp32: 1e-4 of their
  standard deviation.
- **logits**: of prompts with several pictures: 1e-4. **answers**: through `llm.chat`, preprocessing and template included: the same tokens.
- **chunked**, **beside texts**: however a prompt is cut, and whatever else is in the batch: the same.
- **converted**: an EXL2 conversion keeps its tower and sees with it. **trace**: `llm.trace` reads what a chat reads.

"""


def run(tests: tuple[str, ...], columns: dict[str, str]) -> dict[str, dict[str, bool]]:
    """Model -> test -> whether all its cases passed.

    Raises:
        SystemExit: the tests could not be run.
    """
    results: dict[str, dict[str, bool]] = {}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-m", "not gpu", *tests]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode not in (0, 1):  # a test that fails is a cell; anything else is no run
            raise SystemExit("the tests did not run: nothing was written")
        for case in ElementTree.parse(report).iter("testcase"):
            match = re.fullmatch(r"(\w+)\[(.+?)(-\d)?\]", case.get("name", ""))
            if match and match[1] in columns.values():
                passed = not any(child.tag in ("failure", "error", "skipped") for child in case)
                row = results.setdefault(match[2], {})
                row[match[1]] = row.get(match[1], True) and passed
    return results


def table(results: dict[str, dict[str, bool]]) -> str:
    """The rows, in the order of the zoo."""
    from model.zoo import ZOO  # type: ignore[import-not-found]

    rows = {name: f"{entry.arch} | {entry.model}{NOTES.get(name, '')}" for name, entry in ZOO.items()}
    return lines("architecture | Transformers class", rows, COLUMNS, results)


def seeing_table(results: dict[str, dict[str, bool]]) -> str:
    """The rows of models that see."""
    from model.vision.zoo import ZOO  # type: ignore[import-not-found]

    return lines("class", {name: entry.cls for name, entry in ZOO.items()}, SEEING_COLUMNS, results)


def lines(head: str, rows: dict[str, str], columns: dict[str, str], results: dict[str, dict[str, bool]]) -> str:
    """A table with a row for each model, a column for each test."""
    made = [f"| model | {head} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2 + head.count("|")) + "|"]
    marks = {True: "yes", False: "**no**", None: "-"}
    for name, row in rows.items():
        made.append(f"| {name} | {row} | {' | '.join(marks[results.get(name, {}).get(test)] for test in columns.values())} |")
    return "\n".join(made) + "\n"


def main() -> None:
    """Write the page, or one of its parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("texts", "pictures"), help="run and write this part alone")
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "model")]
    page = ROOT / "docs" / "internals" / "architectures.md"
    texts, mark, pictures = page.read_text(encoding="utf-8").partition(SEEING_HEAD.splitlines()[1])
    if args.part != "pictures":
        texts = HEAD + table(run(TESTS, COLUMNS)) + "\n"
    if args.part != "texts":
        mark, pictures = "", SEEING_HEAD.lstrip() + seeing_table(run(SEEING_TESTS, SEEING_COLUMNS))
    page.write_text(f"{texts.rstrip()}\n\n{mark}{pictures}", encoding="utf-8")


if __name__ == "__main__":
    main()

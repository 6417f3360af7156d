"""Conversion on a GPU: the demo model as a user converts it, and a 7B shape layer by layer, extrapolated to all of its layers.

    python benchmarks/convert_gpu.py demo [--bpw 4.0] [--effort quick] [--text FILE]
    python benchmarks/convert_gpu.py llama2-7b [--layers 1 3] [--effort quick] [--memory 7.2]

`demo`: seconds of `exl2nb convert` in a process of its own (start of Python and report included), then of a first and of a further bitrate
inside one process; two runs must give the same bytes; KL on the text that comes with the package, as `quality.py` measures it.

Another shape: dense random weights of some layers are written, converted, and timed by stage. The seconds of all layers are those of the
fewest, plus what each further layer took; what the sweep keeps goes to the host from the first layer on, and as many layers run twice, as
with all of them; the allocation is timed with the measurement repeated for every layer. Peaks are torch's own on the GPU, by stage, and the
process's on the host, to which the streams are added that the other layers would keep. With `--memory` the smallest conversion is done once
more without the limit and must give the same bytes. One number of layers, such as `--layers 32`, is converted and not extrapolated.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from make_random_model import KEYS, SHAPES, Shape, write_tokenizer

import exl2nb
from exl2nb.converter import sensitivity
from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.converter.convert_keywords import EFFORT_OPTIONS, REPORT_ROWS
from exl2nb.converter.measurement import Measurement
from exl2nb.converter.memory_estimate import Asked, plan_gpu_memory
from exl2nb.converter.result import Conversion
from exl2nb.core.progress import Progress
from exl2nb.io import safetensors
from exl2nb.model.loader import read_model_config

DEMO = Path(exl2nb.__file__).parent / "demo_model"


def write_dense(shape: Shape, layers: int, out: Path) -> None:
    """A Llama of random fp16 weights with so many layers, a file per layer."""
    out.mkdir(parents=True)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    rng = torch.Generator(place).manual_seed(0)

    def made(n: int, k: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(n, k, generator=rng, device=place) * (scale / k**0.5)).half().cpu()

    for layer in range(layers):
        name = f"model.layers.{layer}"
        tensors = {
            f"{name}.{KEYS[role]}.weight": made(n, k, 0.1 if role in ("o", "down") else 1.0) for role, (k, n) in shape.linears().items()
        }
        ones = {f"{name}.{norm}.weight": torch.ones(shape.hidden_size).half() for norm in ("input_layernorm", "post_attention_layernorm")}
        safetensors.save(out / f"model-{layer}.safetensors", {**tensors, **ones})
    ends = {"model.embed_tokens.weight": made(shape.vocab_size, shape.hidden_size, shape.hidden_size**0.5)}
    ends |= {"lm_head.weight": made(shape.vocab_size, shape.hidden_size), "model.norm.weight": torch.ones(shape.hidden_size).half()}
    safetensors.save(out / "model-ends.safetensors", ends)
    config = {**dataclasses.asdict(shape), "num_hidden_layers": layers, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float16"}
    (out / "config.json").write_text(json.dumps(config))
    write_tokenizer(out, shape.vocab_size)


def convert(source: Path, out: Path, **options: Any) -> tuple[Conversion, float]:
    """Convert and say how long it took."""
    begin = time.perf_counter()
    done = ConversionJob(source, out, **options).run()
    return done, time.perf_counter() - begin


class Peaks:
    """A sink that notes the most GPU memory of each stage: bytes of tensors, and bytes that torch had taken from the driver."""

    def __init__(self) -> None:
        self.allocated, self.reserved = dict[str, int](), dict[str, int]()
        self._reset()

    def __call__(self, event: Progress) -> None:
        for found, most in ((self.allocated, torch.cuda.max_memory_allocated()), (self.reserved, torch.cuda.max_memory_reserved())):
            found[event.stage] = max(found.get(event.stage, 0), most)
        self._reset()

    def _reset(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()


def kept(shape: Shape, effort: str) -> tuple[int, int]:
    """Every how many layers the sweep of the whole model keeps a stream, and bytes of those that it keeps on the host at once."""
    stream, layers = 4 * EFFORT_OPTIONS[effort].rows * EFFORT_OPTIONS[effort].length * shape.hidden_size, shape.num_hidden_layers
    room = sensitivity.HOST_BYTES + sensitivity.DISK_BYTES
    return sensitivity.kept_spacing(stream, layers, room), min(
        sensitivity.HOST_BYTES, stream * sensitivity.kept_streams(stream, layers, room)
    )


def digest(model: Path) -> str:
    """Hash of the weight files."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(model.glob("*.safetensors")))).hexdigest()[:16]


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    """For printing."""
    return {stage: round(took, 2) for stage, took in seconds.items()}


def demo(args: argparse.Namespace, work: Path) -> dict[str, object]:
    """The demo model."""
    from convert import quality

    from exl2nb.eval.rows import token_rows
    from exl2nb.tokenizer.tokenizer import Tokenizer

    command = [sys.executable, "-m", "exl2nb.cli", "convert", "demo", str(work / "user"), "--bpw", str(args.bpw), "--effort", args.effort]
    begin = time.perf_counter()
    subprocess.run([*command, "--device", args.device, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    whole = time.perf_counter() - begin
    runs, results = [], list[Conversion]()
    for number in range(2):
        kept = {"work_dir": work / f"work{number}", "device": args.device, "effort": args.effort}
        first, took = convert(DEMO, work / f"first{number}", bpw=args.bpw, **kept)
        further, again = convert(DEMO, work / f"further{number}", bpw=args.bpw - 1, **kept)
        results.append(first)
        runs.append(
            {"first_s": round(took, 2), **rounded(first.seconds), "further_s": round(again, 2), "further": rounded(further.seconds)}
        )
    rows = token_rows(Tokenizer.load(DEMO), args.text.read_text(encoding="utf-8"), rows=args.rows, length=512)
    kl, perplexity = quality(DEMO, [work / "first0"], rows)[0]
    hashes = {digest(work / name) for name in ("user", "first0", "first1")}
    return {
        "exl2nb convert, s": round(whole, 2),
        "in process": runs,
        "same bytes three times": len(hashes) == 1,
        "bytes": results[0].nbytes,
        "report": str(results[0].quality),
        "kl": kl,
        "ppl": perplexity,
        "kl_rows": len(rows),
    }


def shape(args: argparse.Namespace, work: Path) -> dict[str, object]:
    """Another model's shape."""
    wanted, found, results = SHAPES[args.shape], {}, list[Conversion]()
    every, streams = kept(wanted, args.effort)
    sensitivity.STREAM_BYTES = 0
    warm = Shape(hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, vocab_size=4096)
    write_dense(warm, 1, work / "warm")
    convert(work / "warm", work / "warm-out", bpw=args.bpw, device=args.device)
    sensitivity.kept_spacing = lambda nbytes, layers, room: every
    host = sensitivity.HOST_BYTES
    options, peaks = {"bpw": args.bpw, "device": args.device, "effort": args.effort}, Peaks()
    for layers in sorted(args.layers):
        write_dense(wanted, layers, work / f"dense{layers}")
        torch.cuda.empty_cache()
        peaks, sensitivity.HOST_BYTES = Peaks(), host * layers // wanted.num_hidden_layers  # the same share of streams goes to files
        job, begin = ConversionJob(work / f"dense{layers}", work / f"out{layers}", **options), time.perf_counter()
        results.append(done := job.run(peaks))
        found[layers] = {"s": round(time.perf_counter() - begin, 2), **rounded(done.seconds)}
        print(json.dumps({"layers": layers, **found[layers], "GiB": gib(max(peaks.reserved.values()))}), flush=True)
    last, few, many = results[-1], min(args.layers), max(args.layers)
    return {
        "shape": args.shape,
        "by layers": found,
        **(extrapolated(found, last.measurement, wanted.num_hidden_layers, args.bpw) if few < many else {}),
        "peak GPU GiB": gib(max(peaks.allocated.values())),
        "peak GPU GiB reserved": gib(max(peaks.reserved.values())),
        "outside torch (libraries, context; other processes) GiB": gib(outside(args.device)),
        "by stage": {stage: f"{gib(most)} ({gib(peaks.reserved[stage])} reserved)" for stage, most in peaks.allocated.items()},
        "stated bound GiB": gib(bound(wanted, work / f"dense{many}", args.effort)),
        "peak host GiB": gib(used := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        **({"with all layers' streams at most": gib(used + streams)} if many < wanted.num_hidden_layers else {}),
        **({} if args.memory is None or few == many else {"same bytes without the limit": unlimited(work, few, options)}),
        "report": str(last.quality),
    }


def extrapolated(found: dict[int, dict[str, float]], measurement: Measurement, layers: int, bpw: float) -> dict[str, object]:
    """Seconds of all layers, from those of the fewest and of the most that were converted."""
    few, many = min(found), max(found)
    each = {name: (found[many][name] - found[few][name]) / (many - few) for name in found[few]}
    solving = allocation(measurement, layers, bpw)
    return {
        "each layer, s": rounded(each),
        "allocation of all layers, s": round(solving, 2),
        f"extrapolated to {layers} layers, s": round(found[few]["s"] + (layers - few) * each["s"] + solving - found[few]["allocate"], 1),
    }


def gib(nbytes: int) -> float:
    """For printing."""
    return round(nbytes / 2**30, 2)


def outside(device: str) -> int:
    """Bytes of the GPU that are taken and not torch's tensors or its reserve: this process's own where no other one uses the GPU."""
    if device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def bound(shape: Shape, model: Path, effort: str) -> int:
    """What `ConversionJob.gpu_memory` states for the whole model."""
    layers = shape.num_hidden_layers
    config = dataclasses.replace(read_model_config(model), num_layers=layers, windows=(0,) * layers)
    return plan_gpu_memory(
        config, Asked(rows=EFFORT_OPTIONS[effort].rows, length=EFFORT_OPTIONS[effort].length, report_rows=REPORT_ROWS)
    ).nbytes


def unlimited(work: Path, layers: int, options: dict[str, Any]) -> bool:
    """Whether the conversion gives the same bytes where it may use the whole GPU."""
    torch.cuda.set_per_process_memory_fraction(1.0)
    convert(work / f"dense{layers}", work / "again", **options)
    return digest(work / "again") == digest(work / f"out{layers}")


def allocation(measurement: Measurement, layers: int, bpw: float) -> float:
    """Seconds to solve with the last layer's linears repeated for all layers."""
    last = max(m.layer for m in measurement.linears.values())
    many = {
        key.replace(f"layers.{last}.", f"layers.{layer}."): dataclasses.replace(m, layer=layer)
        for layer in range(layers)
        for key, m in measurement.linears.items()
        if m.layer == last
    }
    head = {key: m for key, m in measurement.linears.items() if m.role == "head"}
    begin = time.perf_counter()
    dataclasses.replace(measurement, linears={**many, **head}).solve(bpw)
    return time.perf_counter() - begin


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES), help="demo: the real demo model; another one: random weights")
    parser.add_argument("--bpw", type=float, default=4.0)
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--text", type=Path, default=DEMO / "evaluation.txt", help="text to judge the demo model on")
    parser.add_argument("--rows", type=int, default=48, help="of 512 tokens, to judge the demo model on")
    parser.add_argument("--memory", type=float, help="GiB of the GPU that may be used, the driver's own aside; more is an error")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.memory:
        torch.cuda.set_per_process_memory_fraction(args.memory * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    with tempfile.TemporaryDirectory() as temporary:
        found = (demo if args.shape == "demo" else shape)(args, Path(temporary))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

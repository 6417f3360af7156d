"""Convert a dense model at several bitrates and print bits, bytes, seconds, perplexity and KL to the source, in one table.

    python benchmarks/convert.py MODEL --calibration TEXT --text TEXT [--bpw 3 4 6] [--rows 96] [--length 512]

One measurement serves all bitrates. KL and perplexity are measured by the torch reference network in fp32 on the reconstructed weights, so
they are the format's cost alone and no kernel's. KL is judged on `--text`, which should share nothing with the calibration text. With
`--limits FILE` (a JSON like tests/data/demo-peer-quality.json) the last columns show the ratio to another converter's numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path

import torch

from exl2nb.converter.calibration import read_calibration
from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.converter.rounding import dense_weight
from exl2nb.core.progress import TextSink
from exl2nb.eval.rows import token_rows
from exl2nb.io.shards import TensorStore
from exl2nb.model import reference
from exl2nb.model.layout import model_linears
from exl2nb.model.loader import read_model_config
from exl2nb.quant.exl2 import Exl2Tensors
from exl2nb.tokenizer.tokenizer import Tokenizer


def dense_weights(directory: Path, device: str = "cpu") -> dict[str, torch.Tensor]:
    """All weights of a model, EXL2 matrices reconstructed: f32."""
    config = read_model_config(directory)
    with TensorStore(directory) as store:
        weights = {name: store.read(name).float() for name in store.names() if name.endswith((".weight", ".bias"))}
        for linear in model_linears(config):
            if f"{linear.key}.q_weight" in store:
                weights[f"{linear.key}.weight"] = dense_weight(Exl2Tensors.read(store, linear.key), linear.out_features)
    return {name: weight.to(device) for name, weight in weights.items()}


@torch.inference_mode()
def quality(source: Path, models: list[Path], ids: torch.Tensor, device: str = "cpu") -> list[tuple[float, float]]:
    """Mean KL(source || model) and perplexity of each model."""
    config, (plain, *others) = read_model_config(source), (dense_weights(path, device) for path in (source, *models))
    kl, nll = [0.0] * len(models), [0.0] * len(models)
    for row in ids.to(device).split(2):
        wanted = reference.logits(config, plain, row).log_softmax(-1)
        for i, weights in enumerate(others):
            got = reference.logits(config, weights, row).log_softmax(-1)
            kl[i] += float((wanted.exp() * (wanted - got)).sum(dtype=torch.float64))
            nll[i] -= float(got[:, :-1].gather(-1, row[:, 1:, None].long()).sum(dtype=torch.float64))
    rows, length = ids.shape
    return [(k / (rows * length), math.exp(n / (rows * (length - 1)))) for k, n in zip(kl, nll)]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--bpw", type=float, nargs="+", default=[3.0, 4.0, 6.0])
    parser.add_argument("--calibration", help="text to calibrate on; default: the packaged one")
    parser.add_argument("--text", type=Path, help="text to judge on; without it only bits, bytes and seconds are printed")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--calibration-rows", type=int)
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--limits", type=Path, help="JSON with kl and bytes per bitrate under `exl2`")
    parser.add_argument("--keep", type=Path, help="keep the models here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out, table = args.keep or Path(temporary), []
        for bpw in args.bpw:
            begin = time.monotonic()
            job = ConversionJob(
                args.model,
                out / f"{bpw:g}bpw",
                bpw=bpw,
                calibration=args.calibration,
                rows=args.calibration_rows,
                effort=args.effort,
                work_dir=Path(temporary) / "work",
            )
            done = job.run(TextSink())
            table.append((done, time.monotonic() - begin))
            stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in done.seconds.items())
            print(f"{bpw:g} bpw: {table[-1][1]:.1f} s ({stages})")
        numbers: list[tuple[float, float] | None] = [None] * len(table)
        if args.text:
            text, _ = read_calibration(args.text)
            ids = token_rows(Tokenizer.load(args.model), text, rows=args.rows, length=args.length)
            numbers = [*quality(args.model, [done.path for done, _ in table], ids)]
        limits = json.loads(args.limits.read_text())["exl2"] if args.limits else {}
        print(f"{'target':>6} {'bpw':>8} {'bytes':>12} {'seconds':>8} {'KL':>9} {'ppl':>9}  ratio of KL, bytes")
        for (done, seconds), pair in zip(table, numbers):
            line = f"{done.target_bpw:6g} {done.bpw:8.4f} {done.nbytes:12,} {seconds:8.1f}"
            line += f" {pair[0]:9.5f} {pair[1]:9.4f}" if pair else ""
            peer = limits.get(f"{done.target_bpw:.1f}")
            print(line + (f"  {pair[0] / peer['kl']:.3f} {done.nbytes / peer['bytes']:.4f}" if peer and pair else ""))


if __name__ == "__main__":
    main()

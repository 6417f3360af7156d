"""Decode and prompts of a model on several devices beside one GPU, and beside what reading and copying the weights allow.

    python benchmarks/devices.py --seconds 500 --out devices.json  # Llama-3-8B: 25, 50 and 75 % of the layers on the host
    python benchmarks/devices.py --shape llama2-70b --bpw 2.55     # where there are several GPUs, also layers over 2, 4 and 8 of them
    python benchmarks/devices.py --shares 50 --streaming both      # half on the host, prompts on the CPU and through the GPU
    python benchmarks/devices.py --cpu --shape tinyllama           # without a GPU: two and four parts on the CPU beside one

The bound adds up, over the devices, bytes of weights that lie there and that a step reads over the bandwidth that was measured here, of the
host the mean of right before and right after each case, as other guests of a machine take their share; `reached` says whether decoding has
80 % of it. Layers that the host lends to the GPU count as the host's there; `lent_bound_tok_s` counts them as read by the GPU, whose link
brings them meanwhile (link_ms: what that takes).
`prompt_s` is the time to the first token of a prompt of --prompt tokens, of which nothing is cached;
`prompt_floor_s` what copying the host's layers takes at the bandwidth measured here. Runs unattended: a case that fails is noted with its
error, cases that find no time before --seconds are named, and what was measured until then is in --out after every case. Prints JSON; the
models stay in build/bench.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from decode import model_directory
from make_random_model import SHAPES

import exl2nb as ex
from exl2nb.llm.plan import plan_split
from exl2nb.ops.memory_ops import read_memory

PROMPT, PROBE = [*range(5, 133)], 1 << 30  # tokens that decoding begins with; bytes that are read to learn a bandwidth
WANTED = 0.8  # of the bound


def bandwidth(device: str) -> float:
    """Bytes a second that a device reads, the best of five."""
    data = torch.ones(PROBE, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        if device == "cpu":
            read_memory(data)
        else:
            data.view(torch.int64).sum()
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return PROBE / best


def link() -> float:
    """Bytes a second from locked memory of the host to a GPU, the best of five."""
    data, there = torch.ones(PROBE, dtype=torch.uint8, pin_memory=True), torch.empty(PROBE, dtype=torch.uint8, device="cuda")
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        there.copy_(data, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return PROBE / best


def measured(model: Path, args: argparse.Namespace, options: dict[str, Any]) -> tuple[float, float, str]:
    """Tokens a second of decoding and seconds to the first token of a prompt, the best rounds; and where the layers were."""
    tokens, rounds, batch = args.tokens, args.rounds, args.batch
    room = max(1024, args.prompt + 256)
    with ex.load(model, context=room, cache_tokens=max(4 * room, 512 * batch), progress=None, **options) as llm:
        llm.cache.reuse = False
        first_token = float("inf")
        for turn in range(rounds + 1):
            prompt = [5 + (number * 7 + turn) % 190 for number in range(args.prompt)]
            begun = time.perf_counter()
            llm.generate(prompt, max_tokens=1, temperature=0, ignore_eos=True)
            first_token = min(first_token, time.perf_counter() - begun)
        best = 0.0
        for turn in range(rounds + 1):  # the first one warms up
            first = last = 0.0
            count = 0
            for event in llm.batch([PROMPT] * batch, max_tokens=tokens, temperature=0, ignore_eos=True):
                if event.tokens:  # others tell of the prompt's progress
                    last = time.perf_counter()
                    first = first or last
                    count += len(event.tokens)
            if turn:
                best = max(best, (count - batch) / (last - first))
        return best, first_token, llm.model.where


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--bpw", type=float, default=4.0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt that is timed")
    parser.add_argument("--shares", nargs="*", type=int, default=[25, 50, 75], help="%% of the layers on the host")
    parser.add_argument("--streaming", choices=("on", "off", "both"), default="on", help="prompts through the host's layers on the GPU")
    parser.add_argument("--model", type=Path, help="a directory of this shape, in place of one in --models")
    parser.add_argument("--cpu", action="store_true", help="two and four parts on the CPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case that would likely end later")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    parser.add_argument("--models", type=Path, default=Path("build/bench"))
    args = parser.parse_args()
    begun = time.perf_counter()
    model = args.model or model_directory(args.models, args.shape, args.bpw)
    layers = SHAPES[args.shape].num_hidden_layers
    cards = 0 if args.cpu else torch.cuda.device_count()
    cases: dict[str, dict[str, Any]]
    if args.cpu:
        cases = {"one": {"device": "cpu"}, "2 parts": {"devices": ["cpu"] * 2}, "4 parts": {"devices": ["cpu"] * 4}}
    else:
        cases = {"one GPU": {"device": "cuda"}}
        for share in args.shares:
            held = {"gpu_layers": layers * (100 - share) // 100}
            if args.streaming != "off":
                cases[f"{share} % on the host"] = held
            if args.streaming != "on":
                cases[f"{share} % on the host, prompts on the CPU"] = held | {"stream_from": 0}
        cases |= {f"{count} GPUs": {"devices": [f"cuda:{i}" for i in range(count)]} for count in (2, 4, 8) if count <= cards}
    speeds = {"cpu": bandwidth("cpu"), **({"cuda": bandwidth("cuda")} if cards else {})}
    copied = link() if cards else None
    found: dict[str, dict[str, Any]] = {}
    report: dict[str, Any] = {}
    longest = 0.0  # seconds of a case
    for name, options in cases.items():
        started = time.perf_counter()
        if started - begun + longest > args.seconds:
            found[name] = {"left_out": f"no time in {args.seconds:g} s"}
        else:
            try:
                found[name] = case(model, options, speeds, copied, args)
            except (ex.errors.Exl2Error, RuntimeError) as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
            longest = max(longest, time.perf_counter() - started)
        print(f"{name}: {found[name]}", flush=True)
        report = {"shape": args.shape, "bpw": args.bpw, "batch": args.batch, "prompt": args.prompt, "read_bytes_s": speeds}
        report["link_bytes_s"] = copied
        report["cases"] = found
        if args.out is not None:
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def case(model: Path, options: dict[str, Any], speeds: dict[str, float], copied: float | None, args: argparse.Namespace) -> dict[str, Any]:
    """One line of the report."""
    asked = options.get("devices") or ({"cuda": f"{options['gpu_layers']} layers", "cpu": "rest"} if "gpu_layers" in options else None)
    lies, runs = (
        plan_split(model, devices=asked or [options["device"]], context=4096, streaming=streaming).shares
        for streaming in (False, options.get("stream_from") != 0)
    )
    host = sum(share.weights for share in lies[:-1] if share.device == "cpu")
    on_host = any(share.device == "cpu" for share in lies)
    read = [bandwidth("cpu")] if on_host else []
    speed, first_token, where = measured(model, args, options)
    if on_host:
        read.append(bandwidth("cpu"))
        speeds = speeds | {"cpu": sum(read) / len(read)}
    bound, lent_bound = (1 / sum(share.read / speeds[share.device.partition(":")[0]] for share in each) for each in (lies, runs))
    share = round(speed / bound / args.batch, 3)
    found = {"tok_s": round(speed, 1), "bound_tok_s": round(bound, 1), "share": share, "reached": share >= WANTED}
    lent = lies[0].read - runs[0].read
    if lent and copied:
        found |= {"lent_bound_tok_s": round(lent_bound, 1), "lent_share": round(speed / lent_bound / args.batch, 3)}
        found["link_ms"] = round(1e3 * lent / copied, 2)
    found["prompt_s"] = round(first_token, 4)
    if host and copied:
        found["prompt_floor_s"] = round(host / copied, 4)  # with the embedding, which is not copied
    return found | {"host_gb_s": [round(one / 1e9, 1) for one in read], "where": where}


if __name__ == "__main__":
    main()

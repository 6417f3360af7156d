"""`exl2nb bench`: how fast a model runs here: load, prefill, decode, bytes read per token.

With --report also memory and KL, as Markdown to paste into an issue.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import exl2nb
from exl2nb.cli.console import Console
from exl2nb.cli.doctor import cpu_name
from exl2nb.cli.generate import read_template
from exl2nb.cli.models import add_load_options, add_model, demo_directory, locate, open_llm
from exl2nb.core.errors import OptionError
from exl2nb.core.progress import Sink

if TYPE_CHECKING:
    from exl2nb.llm.llm import LLM

WARM_UP = 32  # tokens; caches, graphs and clocks settle
REPORT_BATCH_SIZES = (1, 8)  # of a report
REPORT_CACHE_MODES = ("fp16", "q8", "q6", "q4")
KL_ROWS = 2  # of the packaged evaluation text, for every KL
KL_ROW_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_model(parser, cache="fp16")
    parser.add_argument("--batch", type=int, default=1, help="sequences in the batch (1)")
    parser.add_argument("--context", type=int, default=128, help="prompt tokens of each sequence before decoding is timed (128)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens decoded per sequence and round (128)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median counts (3)")
    parser.add_argument("--template", metavar="NAME|FILE", help="time prompts in this chat template; `model` = the model's own")
    add_load_options(parser)
    parser.add_argument("--report", action="store_true", help="measure 1 and 8 sequences, memory and KL; print Markdown to paste")


def run(args: argparse.Namespace, console: Console) -> int:
    """Load, warm up, time."""
    for name in ("batch", "context", "tokens", "rounds"):
        if getattr(args, name) < 1:
            raise OptionError(f"bench: --{name} is {getattr(args, name)}; expected at least 1")
    if args.report:
        folder = locate(args.model, console.sink, revision=args.revision)
        if args.batch != 1:
            raise OptionError(f"bench: --batch {args.batch} was given with --report, which measures 1 and 8 sequences; leave --batch out")
        if args.template is not None:
            raise OptionError("bench: --template was given with --report, whose numbers are compared between machines; leave it out")
        options = {name: getattr(args, name) for name in ("device", "cache", "context", "tokens", "rounds")}
        report = card_report(folder, **options, progress=console.sink)
        console.result(report, markdown(report))
        return 0
    template, start = read_template(args.template), time.perf_counter()
    longest = args.context + args.tokens + spare(args.batch) + 1
    with open_llm(
        args, console.sink, cache=args.cache, context=longest, cache_tokens=args.batch * (longest + 256),
        max_sequences=max(16, args.batch),
    ) as llm:  # fmt: skip
        found: dict[str, Any] = {"model": llm.name, "device": llm.model.device, "load_s": round(time.perf_counter() - start, 3)}
        prompt = None if args.template is None else chat_prompts(llm, template, args.context)
        found |= measure(llm, batch=args.batch, context=args.context, tokens=args.tokens, rounds=args.rounds, prompt=prompt)
    found |= {name: value for name in ("draft", "template") if (value := getattr(args, name)) is not None}
    found |= {"cache": args.cache, "batch": args.batch, "context": args.context, "tokens": args.tokens, "rounds": args.rounds}
    console.result(found, "\n".join(f"{name:24} {value}" for name, value in found.items()))
    return 0


def chat_prompts(llm: LLM, template: str | None, context: int) -> Callable[[int], list[int]]:
    """Prompts of `context` tokens in a chat template (None: the model's own), another one for each number.

    Raises:
        OptionError: the template alone takes more tokens.
    """

    def rendered(number: int) -> list[int]:
        words = " ".join(f"{number + i}," for i in range(context))
        return llm.tokenizer.encode(llm.render_chat(f"Add these numbers: {words}", template=template))

    one, two = rendered(1), rendered(2)
    end = next((i for i, (a, b) in enumerate(zip(reversed(one), reversed(two))) if a != b), 0)  # tokens after the message
    begin = next(i for i, (a, b) in enumerate(zip(one, two)) if a != b)
    if context <= begin + end:
        raise OptionError(f"bench: --context is {context}; expected more than {begin + end}, the tokens that the template takes")

    def prompt(number: int) -> list[int]:
        ids = rendered(number)
        return [*ids[: context - end], *ids[len(ids) - end :]]

    return prompt


def measure(
    llm: LLM, *, batch: int, context: int, tokens: int, rounds: int, prompt: Callable[[int], list[int]] | None = None
) -> dict[str, Any]:
    """Prefill and decode of `batch` sequences through the engine, tokens counted as they reach Python.

    Args:
        prompt: gives `context` ids for a number, others for another; None: ids without meaning.

    Returns:
        Medians over the rounds: prefill_tok_s, decode_tok_s (all sequences together, from where each of them has begun), decode_ms (a
        step), and gb_s, the weights' bytes a step reads over its time. Warm-up is excluded. weight_bytes: what is loaded;
        bytes_per_token: what decoding one token reads of it, of a mixture's experts those that it visits. decode_context: tokens of a
        sequence while decoding was timed, prompt included, on average: more than `context`, since sequences grow, and the first ones of
        a batch decode during the prefill of the others.
        rounds_in_which_texts_ended_early: where there were any; a smaller batch makes steps quicker.

    Raises:
        OptionError: in every round, some sequences ended before all of them had started.
    """
    vocab = llm.config.vocab_size
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    llm.cache.reuse = False
    llm.generate([3 + i % (vocab - 3) for i in range(min(context, 64))], max_tokens=WARM_UP, **options)
    prefill, decode, lengths, early = [], [], [], 0
    for number in range(rounds + 1):
        if prompt is not None:
            prompts = [prompt(1 + number * batch + b) for b in range(batch)]
        else:
            prompts = [[3 + (number * 997 + b * 31 + i * 7) % (vocab - 3) for i in range(context)] for b in range(batch)]
        begun = time.perf_counter()
        handles = [llm.stream(prompt, max_tokens=tokens + spare(batch) + 1, **options) for prompt in prompts]
        first, _, before = _drain(handles, 1)
        if batch > 1:
            for handle in handles:  # tokens decoded before the last prefill ended are not counted
                while (chunk := handle.poll()) is not None:
                    before += len(chunk.tokens)
        start = time.perf_counter()
        last, written, _ = _drain(handles, tokens)
        for handle in handles:
            handle.cancel()
        for handle in handles:
            handle.result()
        if number and written:  # the first round warms up
            prefill.append(batch * context / (first - begun))
            decode.append(written / (last - start))
            lengths.append(context + (before + written / 2) / batch)
            if written < batch * tokens:  # an ended sequence leaves a smaller batch, whose steps are quicker
                early += 1
    if not decode:
        msg = f"{batch} texts of {tokens + spare(batch) + 1} tokens ended before all of them had begun: nothing to time; give more --tokens"
        raise OptionError(msg)
    speed = statistics.median(decode)
    step, moe = batch / speed, llm.config.moe
    return {
        "prefill_tok_s": round(statistics.median(prefill), 1),
        "decode_tok_s": round(speed, 1),
        "decode_ms": round(1e3 * step, 4),
        "decode_context": round(statistics.median(lengths), 1),
        "weight_bytes": llm.model.weight_bytes,
        "bytes_per_token": llm.model.bytes_per_token,
        **({} if moe is None else {"experts_per_token": f"{moe.top_k} of {moe.num_experts}"}),
        "gb_s": round(llm.model.bytes_per_token / step / 1e9, 1),
        **({"rounds_in_which_texts_ended_early": early} if early else {}),
    }


def spare(batch: int) -> int:
    """Extra tokens per sequence, so that all of them decode until the last one has been timed."""
    return 64 + (0 if batch == 1 else 4 * batch)  # some are written while this thread waits for a processor


def _drain(handles: list[Any], count: int) -> tuple[float, int, int]:
    """Take `count` more tokens of every handle.

    Returns: the time of the last one; tokens taken, fewer where a sequence ended; the same with what the last chunks had beyond `count`.
    """
    taken = seen = 0
    for handle in handles:
        left = count
        while left > 0:
            chunk = next(handle, None)
            if chunk is None:
                break
            left -= len(chunk.tokens)
        taken += count - max(left, 0)
        seen += count - left
    return time.perf_counter(), taken, seen


def card_report(
    folder: Path, *, device: str | None, cache: str, context: int, tokens: int, rounds: int, progress: Sink | None
) -> dict[str, Any]:
    """Load a model, time it, and compare what it computes.

    Returns:
        machine: of texts. model: name, bpw, weight_bytes, load_s. memory: planned and most_used bytes on a GPU (else None), and the
        longest context of each cache that fits beside the weights. speed: a dict of `measure` per batch. kl: nats per token, of each
        cache against fp32's, and `cpu`, of the demo model on this GPU against the CPU (None on a CPU).
    """
    import torch

    from exl2nb.llm.functions import compare, inspect
    from exl2nb.llm.load import load
    from exl2nb.llm.plan import plan

    longest = max(context + tokens + spare(max(REPORT_BATCH_SIZES)) + 1, KL_ROW_TOKENS)
    start = time.perf_counter()
    tokens_kept = max(REPORT_BATCH_SIZES) * (longest + 256)
    with load(folder, device=device, cache=cache, context=longest, cache_tokens=tokens_kept, progress=progress) as llm:
        load_s, gpu = time.perf_counter() - start, llm.model.device.startswith("cuda")
        planned = plan(folder, context=longest + 256, cache=cache, batch=max(REPORT_BATCH_SIZES), device="cuda" if gpu else "cpu")
        speed = [
            {"batch": batch, **measure(llm, batch=batch, context=context, tokens=tokens, rounds=rounds)} for batch in REPORT_BATCH_SIZES
        ]
        most_used = torch.cuda.max_memory_reserved() if gpu else None
        kl = {
            mode: compare(llm, llm, rows=KL_ROWS, length=KL_ROW_TOKENS, cache=mode, progress=progress).kl_mean
            for mode in REPORT_CACHE_MODES
        }
        name, weight_bytes = llm.name, llm.model.weight_bytes
    free = plan(folder, device="cuda" if gpu else "cpu")  # the model is closed: all of its memory is free again
    return {
        "machine": machine(gpu),
        "model": {"name": name, "bpw": inspect(folder).decoder_bpw, "weight_bytes": weight_bytes, "load_s": load_s},
        "memory": {
            "planned": planned.total if gpu else None,
            "most_used": most_used,
            "free": free.free,
            "longest": {mode: free.at(cache=mode).longest for mode in REPORT_CACHE_MODES},
        },
        "speed": speed,
        "kl": {**kl, "cpu": against_the_cpu(progress) if gpu else None},
    }


def against_the_cpu(progress: Sink | None) -> float:
    """KL of the demo model on the GPU against the CPU, nats per token: whether the kernels for this card compute what they should."""
    from exl2nb.llm.functions import compare
    from exl2nb.llm.load import load

    with load(demo_directory(), device="cpu", progress=progress) as here, load(demo_directory(), device="cuda", progress=progress) as there:
        return compare(here, there, rows=KL_ROWS, length=KL_ROW_TOKENS, progress=progress).kl_mean


def machine(gpu: bool) -> dict[str, str]:
    """What it ran on."""
    import torch

    from exl2nb.ops import _load, kernel_code

    found = {}
    if gpu:
        card = torch.cuda.get_device_properties()
        capability, size = f"{card.major}.{card.minor}", card.total_memory / 2**30
        found["card"] = f"{card.name}, compute capability {capability}, {card.multi_processor_count} SMs, {size:.1f} GiB"
        driver = ".".join(map(str, _load.driver_cuda_version() or ()))
        try:
            compiler = f"NVRTC {'.'.join(map(str, kernel_code.nvrtc().version))}"
        except kernel_code.NoCompiler:
            compiler = "no NVRTC"
        found["CUDA"] = f"driver for {driver}, torch for {torch.version.cuda}, {compiler}"
    found["processor"] = f"{cpu_name()}, {torch.get_num_threads()} threads, {_load.load_libraries().isa}"
    found["system"] = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    return found


def markdown(found: dict[str, Any]) -> str:
    """`card_report` as two tables."""
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
    facts["KL of a cache"] = ", ".join(f"{mode} {kl[mode]:.2g}" for mode in REPORT_CACHE_MODES) + " nats against fp32"
    if kl["cpu"] is not None:
        facts["KL against the CPU"] = f"{kl['cpu']:.2g} nats, demo model in fp16"
    title = found["machine"].get("card", found["machine"]["processor"]).split(",")[0]
    lines = [f"### exl2nb {exl2nb.__version__} on {title}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {text.replace('|', '/')} |" for name, text in facts.items()]
    lines += ["", "| sequences | prefill tok/s | decode tok/s | ms per step | GB/s of weights |", "|---|---|---|---|---|"]
    lines += [f"| {s['batch']} | {s['prefill_tok_s']} | {s['decode_tok_s']} | {s['decode_ms']:.2f} | {s['gb_s']} |" for s in found["speed"]]
    return "\n".join(lines)

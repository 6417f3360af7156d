"""`exl2nb bench`: how fast a model runs here: load, prefill, decode, bytes read per token, share of the memory's speed."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

from exl2nb.cli.console import Console
from exl2nb.cli.models import add_load_options, add_model, open_llm
from exl2nb.core.errors import OptionError

if TYPE_CHECKING:
    from exl2nb.llm.model import LLM

WARM_UP = 32  # tokens; caches, graphs and clocks settle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_model(parser, cache="fp16")
    parser.add_argument("--batch", type=int, default=1, help="sequences in the batch (1)")
    parser.add_argument("--context", type=int, default=128, help="prompt tokens of each sequence before decoding is timed (128)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens decoded per sequence and round (128)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median counts (3)")
    add_load_options(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Load, warm up, time."""
    from exl2nb.core.errors import OptionError

    for name in ("batch", "context", "tokens", "rounds"):
        if getattr(args, name) < 1:
            raise OptionError(f"bench: --{name} is {getattr(args, name)}; expected at least 1")
    start = time.perf_counter()
    longest = args.context + args.tokens + spare(args.batch) + 1
    with open_llm(
        args, console.sink, cache=args.cache, context=longest, cache_tokens=args.batch * (longest + 256),
        max_sequences=max(16, args.batch),
    ) as llm:  # fmt: skip
        found: dict[str, Any] = {"model": llm.name, "device": llm.model.device, "load_s": round(time.perf_counter() - start, 3)}
        found |= measure(llm, batch=args.batch, context=args.context, tokens=args.tokens, rounds=args.rounds)
    found |= {} if args.draft is None else {"draft": args.draft}
    found |= {"cache": args.cache, "batch": args.batch, "context": args.context, "tokens": args.tokens, "rounds": args.rounds}
    console.result(found, "\n".join(f"{name:24} {value}" for name, value in found.items()))
    return 0


def measure(llm: LLM, *, batch: int, context: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Prefill and decode of `batch` sequences through the engine, tokens counted as they reach Python.

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

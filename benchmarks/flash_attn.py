"""flash-attn beside torch's attention and ours, on prompts of real shapes, and in whole prompts. Needs a GPU and flash-attn.

    python benchmarks/flash_attn.py                                   # attention alone: milliseconds of one layer
    python benchmarks/flash_attn.py --models llama3-8b@2048,2000,8192 # and prompts of models of random weights, with and without it

`flash`: `ops.prefill_attention.attend_prefix` where flash-attn is installed; `torch`: the same function without it, None where torch's
kernels cannot (windows, capped scores); `ours`: the paged kernel that reads the cache, which runs those. `error`: the largest difference of
flash to `torch`, else `ours`, over the largest value. One JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import exl2nb as ex
from exl2nb.ops import prefill_attention
from exl2nb.ops.layer_ops import paged_attention

HEADS = {"tinyllama": (32, 4, 64), "llama2-7b": (32, 32, 128), "llama3-8b": (32, 8, 128)}  # query heads, KV heads, head_dim
PLACES = [(100, 100), (512, 512), (2000, 2000), (2048, 2048), (256, 4096), (2048, 8192), (8192, 8192), (32768, 32768)]  # tokens, keys
WINDOWED = [(2048, 2048, 1024, 0.0), (8192, 8192, 4096, 0.0), (2048, 2048, 0, 50.0), (8192, 8192, 4096, 50.0)]  # ..., window, softcap
PAGE, OURS = 256, 8192  # keys up to which our kernel is timed


@contextmanager
def without_flash():
    """As if flash-attn were not installed."""
    found = prefill_attention.flash_attention
    prefill_attention.flash_attention = lambda: prefill_attention.FlashAttention(None, why="left out")  # pyright: ignore
    try:
        yield
    finally:
        prefill_attention.flash_attention = found


def milliseconds(work: Callable[[], Any], rounds: int = 7) -> float:
    """Median, after two that warm up."""
    times = []
    for number in range(rounds + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if number > 1:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def case(name: str, n: int, length: int, window: int, softcap: float) -> dict[str, Any]:
    """One shape."""
    query_heads, kv_heads, dim = HEADS[name]
    g = torch.Generator("cuda").manual_seed(n)
    q, k, v = (
        torch.randn(rows, heads, dim, generator=g, device="cuda").half()
        for rows, heads in ((n, query_heads), (length, kv_heads), (length, kv_heads))
    )
    options = {"scale": dim**-0.5, "window": window, "softcap": softcap}
    flash = prefill_attention.attend_prefix(q, k, v, **options).float()
    times: dict[str, float | None] = {
        "flash": milliseconds(lambda: prefill_attention.attend_prefix(q, k, v, **options)),
        "torch": None,
        "ours": None,
    }
    other = None
    with without_flash():
        if prefill_attention.can_attend(dim, window=window, softcap=softcap):
            other = prefill_attention.attend_prefix(q, k, v, **options).float()
            times["torch"] = milliseconds(lambda: prefill_attention.attend_prefix(q, k, v, **options))
    if length <= OURS:
        pages = -(-length // PAGE)
        pools = [torch.zeros(pages, kv_heads, PAGE, dim, dtype=torch.float16, device="cuda") for _ in range(2)]
        for pool, rows in zip(pools, (k, v)):
            for page in range(pages):
                part = rows[page * PAGE : (page + 1) * PAGE]
                pool[page, :, : len(part)] = part.transpose(0, 1)
        ids = [torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([list(range(pages))], [0, n], [length])]
        wide = q.float().contiguous()
        mine = paged_attention(wide, *pools, *ids, **options)
        other = mine if other is None else other
        times["ours"] = milliseconds(lambda: paged_attention(wide, *pools, *ids, **options), 3)
    error = None if other is None else float((flash - other.view_as(flash)).abs().max() / flash.abs().max())
    shown = {kind: None if took is None else round(took, 4) for kind, took in times.items()}
    return {"heads": name, "tokens": n, "keys": length, "window": window, "softcap": softcap, **shown, "error": error}


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[], metavar="SHAPE[:BPW]@TOKENS,...", help="as in prefill.py")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where models are kept; missing ones are made")
    args = parser.parse_args()
    flash = prefill_attention.flash_attention()
    if flash.call is None:
        raise SystemExit(f"flash_attn: {flash.why}")
    for name in HEADS:
        for n, length in PLACES:
            print(json.dumps(case(name, n, length, 0, 0.0)), flush=True)
    for n, length, window, softcap in WINDOWED:
        print(json.dumps(case("llama3-8b", n, length, window, softcap)), flush=True)
    for one in args.models:
        from prefill import folder_of, prefill_s

        model, _, counts = one.partition("@")
        tokens = [int(count) for count in counts.split(",")]
        room = max(tokens) + 512
        with ex.load(folder_of(model, args.folder), device="cuda", context=room, cache_tokens=room, progress=None) as llm:
            for count in tokens:
                found: dict[str, Any] = {"model": model, "tokens": count}
                found["flash_ms"] = round(1e3 * statistics.median(prefill_s(llm, count, 5)), 2)
                with without_flash():
                    found["torch_ms"] = round(1e3 * statistics.median(prefill_s(llm, count, 5)), 2)
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

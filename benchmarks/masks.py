"""Structured output on a vocabulary of real size: time of a mask, what the engine thread waits for it, and what sampling costs with it.

    python benchmarks/masks.py [tokenizer.json] [--engine xgrammar]

Without a file a byte-level tokenizer of 128 256 tokens is trained on the source of the installed packages (half a minute). `--engine
xgrammar` measures the other engine on the same text, where it is installed. One thread; times in microseconds, best of 7 per token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from exl2nb.constraint.structure import MatcherConstraint, Structure
from exl2nb.ops import draw_rows
from exl2nb.sampling.chain import sample_row
from exl2nb.sampling.constraint import Allowed
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.sampler_state import SamplerState
from exl2nb.tokenizer.tokenizer import Tokenizer

VOCAB = 128_256
ROUNDS = 7
PLAIN = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
HARD = json.loads(json.dumps(PLAIN))
HARD["properties"]["name"]["maxLength"] = 80
HARD["properties"]["tags"]["items"]["pattern"] = "^[a-z ]+$"
TEXT = {
    "name": "Johann Sebastian Bach, composer of the well-tempered clavier",
    "age": 65,
    "tags": ["music", "baroque organ", "fugue"],
    "kind": "beta",
}


def trained() -> tokenizers.Tokenizer:
    """A byte-level BPE of the size of Llama 3's."""

    def texts() -> Iterator[str]:
        left = 60_000_000
        for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")[:60_000]
            left -= len(text)
            if left < 0:
                return
            yield text

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    made.train_from_iterator(texts(), trainer)
    return made


def clock(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - started)


def show(name: str, times: list[float]) -> None:
    ordered = sorted(times)
    figures = f"median {statistics.median(times):7.1f}  mean {statistics.mean(times):7.1f}  p90 {ordered[int(0.9 * len(ordered))]:7.1f}"
    print(f"{name:34} {figures}  max {ordered[-1]:8.1f}")


class Inline(MatcherConstraint):
    """Computes a mask when asked for it, so that its time can be told."""

    def _prepare(self) -> None:
        pass


def best(walks: list[list[float]]) -> list[float]:
    """For every token the best of the walks: the machine may be busy with other things."""
    return [min(times) for times in zip(*walks)]


class Drawing:
    """A greedy draw from one row, with a mask and without: the op that sampling calls, which reads the bits as they are."""

    def __init__(self, size: int) -> None:
        self._row = torch.randn(1, size, generator=torch.Generator().manual_seed(0)) * 2
        self._greedy = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)

    def __call__(self, allowed: Allowed | None = None) -> float:
        """Microseconds."""
        bits = None if allowed is None else torch.from_numpy(allowed.bits).unsqueeze(0)
        return clock(lambda: draw_rows(self._row, self._greedy, bits))


def masks(structure: Structure, ids: list[int], size: int) -> None:
    """Walk the text: a mask by itself, and what is left to wait for after a step of the model of 3 ms."""
    computed, drawn, unmasked, waits, accepts = [], [], [], [], []
    draw = Drawing(size)
    for _ in range(ROUNDS):
        constraint = Inline(structure._matcher.deep_copy(), size, "schema")
        times: list[float] = []
        masked: list[float] = []
        free: list[float] = []
        for token in ids:
            times.append(clock(constraint.allowed))
            free.append(draw())
            masked.append(draw(constraint.allowed()))
            constraint.accept(token)
        computed.append(times)
        drawn.append(masked)
        unmasked.append(free)
        constraint, times, taken = structure.start(), [], []
        for token in ids:
            time.sleep(0.003)
            times.append(clock(constraint.allowed))
            taken.append(clock(lambda c=constraint, t=token: c.accept(t)))
        waits.append(times)
        accepts.append(taken)
    bits, with_mask, without = best(computed), best(drawn), best(unmasked)
    show("mask, as bits", bits)
    show("greedy draw without a mask", without)
    show("greedy draw, reading the bits", with_mask)
    show("what a mask costs: bits, reading", [one + two - three for one, two, three in zip(bits, with_mask, without)])
    show("wait for it beside a 3 ms step", best(waits))
    show("accept, next mask begun", best(accepts))


def sampling(structure: Structure, ids: list[int], size: int) -> None:
    row = (np.random.default_rng(0).normal(size=size) * 2).astype(np.float32)
    settings: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "top_p 0.9": {"top_p": 0.9}}
    for name, kwargs in settings.items():
        for masked in (False, True):
            walks = []
            for _ in range(ROUNDS):
                times: list[float] = []
                walks.append(times)
                state = SamplerState(SamplingParams(seed=1, **kwargs), constraint=structure.start() if masked else None)
                for token in ids:
                    biased = row.copy()
                    biased[token] = 40.0  # so that it follows the text
                    time.sleep(0.001)
                    times.append(clock(lambda r=biased, s=state: sample_row(r, s)))
            show(f"sampling, {name}{', structured' if masked else ''}", best(walks))


def other(tokenizer: tokenizers.Tokenizer, schema: dict[str, Any], ids: list[int]) -> None:
    import xgrammar  # pyright: ignore[reportMissingImports]

    size = tokenizer.get_vocab_size()
    words = [""] * size
    for text, i in tokenizer.get_vocab(True).items():
        words[i] = text
    info = xgrammar.TokenizerInfo(words, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[1])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    grammars: list[Any] = []
    print(f"compile {clock(lambda: grammars.append(compiler.compile_json_schema(json.dumps(schema)))):.0f}")
    bits, walks = xgrammar.allocate_token_bitmask(1, size), []
    for _ in range(ROUNDS):
        matcher = xgrammar.GrammarMatcher(grammars[0])
        times: list[float] = []
        walks.append(times)
        for token in ids:
            times.append(clock(lambda m=matcher: m.fill_next_token_bitmask(bits)))
            assert matcher.accept_token(token)
    show("xgrammar, bits only", best(walks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", nargs="?", type=Path)
    parser.add_argument("--engine", choices=["llguidance", "xgrammar"], default="llguidance")
    args = parser.parse_args()
    backend = tokenizers.Tokenizer.from_file(str(args.tokenizer)) if args.tokenizer else trained()
    words = Tokenizer(backend)
    words.eos_ids = frozenset({1})
    size, ids = backend.get_vocab_size(), backend.encode(json.dumps(TEXT)).ids
    print(f"{size} tokens, text of {len(ids)}")
    for name, schema in (("plain schema", PLAIN), ("maxLength and pattern", HARD)):
        print(f"\n{name}")
        if args.engine == "xgrammar":
            other(backend, schema, ids)
            continue
        made: list[Structure] = []
        for _ in range(2):
            taken = clock(lambda s=schema, m=made: m.append(Structure("schema", s, words, size)))
            print(f"compile {taken:.0f}{' (the first one with the vocabulary)' if len(made) == 1 and name.startswith('plain') else ''}")
        masks(made[-1], ids, size)
        if name.startswith("plain"):
            sampling(made[-1], ids, size)


if __name__ == "__main__":
    main()

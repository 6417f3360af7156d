"""What the demo found out, as plain data: the terminal table, the JSON and the HTML report are made from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from exl2nb.cli.console import mega, table


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model of the table.

    name: "FP16" or "4.0 bpw". path: its directory. target_bpw: asked for, None for the reference. bpw: reached, over the decoder's linears.
    head_bits: of the head. bytes: its .safetensors files. ppl, kl_mean, kl_p99 (nats), top1 (share): on the evaluation text; the KL of the
    reference is 0 by definition. decode_tok_s: single-stream generation. convert_s: seconds its conversion took. sample: streamed text.
    bits: module key -> bits per weight. histogram: (low, high, share of tokens) of KL. passage_kl: KL after each token of the passage.
    """

    name: str
    path: str
    target_bpw: float | None
    bpw: float
    head_bits: float
    bytes: int
    ppl: float
    kl_mean: float
    kl_p99: float
    top1: float
    decode_tok_s: float
    convert_s: float | None
    sample: str
    bits: dict[str, float]
    histogram: list[tuple[float, float, float]]
    passage_kl: list[float]


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The whole run.

    entries: reference first, then from many bits to few. passage: texts of the passage's tokens. machine: name -> value.
    """

    entries: tuple[Entry, ...]
    prompt: str
    rows: int
    length: int
    passage: tuple[str, ...]
    machine: dict[str, str]
    total_s: float
    created: str
    version: str
    report: str = ""

    @property
    def reference(self) -> Entry:
        """The FP16 model."""
        return self.entries[0]

    @property
    def quantised(self) -> tuple[Entry, ...]:
        """All others."""
        return self.entries[1:]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def table(self) -> str:
        """The table for a terminal."""
        header = ["model", "bpw", "files", "of FP16", "perplexity", "KL mean", "KL p99", "top-1", "tok/s", "converted"]
        rows = []
        for entry in self.entries:
            base = entry.target_bpw is None
            rows.append(
                [
                    entry.name,
                    f"{entry.bpw:.3f}",
                    mega(entry.bytes),
                    f"{entry.bytes / self.reference.bytes:.0%}",
                    f"{entry.ppl:.2f}",
                    "-" if base else f"{entry.kl_mean:.4f}",
                    "-" if base else f"{entry.kl_p99:.3f}",
                    "-" if base else f"{entry.top1:.1%}",
                    f"{entry.decode_tok_s:.0f}",
                    "-" if entry.convert_s is None else f"{entry.convert_s:.1f} s",
                ]
            )
        return table(header, rows)

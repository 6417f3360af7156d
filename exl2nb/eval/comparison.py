"""Perplexity, and how far predictions are from those of a reference, token by token, without keeping logits; summaries and tables."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exl2nb.core.errors import OptionError
from exl2nb.core.progress import Meter, Sink
from exl2nb.eval.rows import RowRunner, check_ids
from exl2nb.model.model import Model

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Perplexity:
    """Result of `perplexity`.

    logprob: f32 `(rows, T - 1)`, nats: log p(token t+1 | tokens 0..t of its row). The first token of a row is not predicted.
    """

    logprob: Tensor

    @property
    def nats(self) -> float:
        """Mean negative log-likelihood of a token."""
        return -self.logprob.double().mean().item()

    @property
    def ppl(self) -> float:
        """exp(nats)."""
        return math.exp(min(self.nats, 700.0))

    @property
    def row_ppl(self) -> list[float]:
        """Perplexity of each row."""
        return [math.exp(min(x, 700.0)) for x in (-self.logprob.double().mean(dim=1)).tolist()]

    def __repr__(self) -> str:
        rows, predicted = self.logprob.shape
        return f"Perplexity(ppl={self.ppl:.4f}, nats={self.nats:.5f}, {rows} rows of {predicted + 1} tokens)"


def next_token_logprob(logprobs: Tensor, row: Tensor, start: int) -> Tensor:
    """Pick log p(next token): logprobs `(n, V)` of positions start.. of row `(T,)` -> f32 `(n,)` on the host, one less at the row's end."""
    targets = row[start + 1 : start + 1 + len(logprobs)].long().to(logprobs.device)
    return logprobs[: len(targets)].gather(1, targets[:, None])[:, 0].float().cpu()


def perplexity(model: Model, ids: Tensor, progress: Sink | None = None, *, cache: str = "fp32") -> Perplexity:
    """Perplexity over rows, each read from an empty context.

    Args:
        ids: int `(rows, T)`, T at least 2.

    Raises:
        OptionError, ContextOverflow: ids do not fit the model.
    """
    ids = check_ids(model, ids)
    runner = RowRunner(model, ids.shape[1], cache)
    rows: list[Tensor] = []
    with Meter("perplexity", total=ids.numel(), unit="tokens", sink=progress) as meter:
        for row in ids:
            parts = []
            for start, piece in runner.pieces(row):
                parts.append(next_token_logprob(piece.double().log_softmax(dim=-1), row, start))
            rows.append(torch.cat(parts).float())
            meter.step(len(row))
    return Perplexity(torch.stack(rows))


BAR_CHARACTERS = " ▁▂▃▄▅▆▇█"
KL_BIN_EDGES_NATS = (0.0, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0)  # nats; the last bin is open


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    """`other` measured against `reference` on the same rows.

    ids int32 `(rows, T)`. kl f32 `(rows, T)`: KL(reference || other) in nats after each token. same_top1 bool `(rows, T)`.
    reference_logprob, logprob f32 `(rows, T - 1)`: log p(next token) of each model. forward_s: seconds spent in `other`'s forward pass.
    """

    reference: str
    other: str
    ids: Tensor
    kl: Tensor
    same_top1: Tensor
    reference_logprob: Tensor
    logprob: Tensor
    forward_s: float = 0.0

    @property
    def ppl(self) -> float:
        """Perplexity of `other`."""
        return _ppl(self.logprob)

    @property
    def reference_ppl(self) -> float:
        """Perplexity of `reference`."""
        return _ppl(self.reference_logprob)

    @property
    def kl_mean(self) -> float:
        """Mean KL over all positions, nats."""
        return self.kl.double().mean().item()

    @property
    def kl_p99(self) -> float:
        """99th percentile of KL over all positions, nats (linear interpolation)."""
        ordered = self.kl.double().flatten().sort().values
        position = 0.99 * (len(ordered) - 1)
        low = math.floor(position)
        high = min(low + 1, len(ordered) - 1)
        return torch.lerp(ordered[low], ordered[high], position - low).item()

    @property
    def top1(self) -> float:
        """Share of positions where both models find the same token most likely."""
        return self.same_top1.double().mean().item()

    def summary(self) -> dict[str, Any]:
        """The numbers as plain values."""
        rows, length = self.ids.shape
        numbers = {"ppl": self.ppl, "reference_ppl": self.reference_ppl, "kl_mean": self.kl_mean, "kl_p99": self.kl_p99, "top1": self.top1}
        return {"reference": self.reference, "other": self.other, "rows": rows, "length": length, **numbers}

    def histogram(self) -> list[tuple[float, float, float]]:
        """(low, high, share of tokens) of KL in fixed steps; the last `high` is infinity."""
        edges = torch.tensor(KL_BIN_EDGES_NATS[1:], dtype=torch.float64)
        bins = torch.bucketize(self.kl.double().flatten(), edges, right=True)
        counts = torch.bincount(bins, minlength=len(KL_BIN_EDGES_NATS)).double() / self.kl.numel()
        return [(low, high, share) for low, high, share in zip(KL_BIN_EDGES_NATS, [*KL_BIN_EDGES_NATS[1:], math.inf], counts.tolist())]

    def by_position(self, parts: int = 32) -> list[float]:
        """Mean KL of `parts` equal stretches of the row, averaged over rows: does error grow with context?"""
        parts = min(parts, self.kl.shape[1])
        return [chunk.double().mean().item() for chunk in torch.tensor_split(self.kl, parts, dim=1)]

    def to_frame(self, tokens: Sequence[str] | None = None) -> pd.DataFrame:
        """One line per token: row, position, id, (text,) kl, same_top1, and log p of the NEXT token under both (NaN at a row's end).

        Args:
            tokens: text of every id of the vocabulary; adds a `text` column.
        """
        import pandas as pd

        rows, length = self.ids.shape
        pad = torch.full((rows, 1), math.nan)
        ids = self.ids.flatten()
        columns: dict[str, Any] = {
            "row": torch.arange(rows).repeat_interleave(length).numpy(),
            "position": torch.arange(length).repeat(rows).numpy(),
            "id": ids.numpy(),
        }
        if tokens is not None:
            columns["text"] = [tokens[i] for i in ids.tolist()]
        columns |= {
            "kl": self.kl.flatten().numpy(),
            "same_top1": self.same_top1.flatten().numpy(),
            "reference_logprob": torch.cat([self.reference_logprob, pad], dim=1).flatten().numpy(),
            "logprob": torch.cat([self.logprob, pad], dim=1).flatten().numpy(),
        }
        return pd.DataFrame(columns)

    def __str__(self) -> str:
        rows, length = self.ids.shape
        shares = [share for _, _, share in self.histogram()]
        top = max(shares)
        bars = "".join(BAR_CHARACTERS[math.ceil(8 * share / top)] for share in shares)
        lines = [
            f"{self.other} against {self.reference}, {rows} rows of {length} tokens",
            f"  perplexity        {self.ppl:10.4f}   (reference {self.reference_ppl:.4f})",
            f"  KL mean           {self.kl_mean:10.5f}   nats",
            f"  KL 99th percentile{self.kl_p99:10.5f}   nats",
            f"  same top token    {self.top1:10.2%}",
            f"  KL histogram      |{bars}|   0 .. {KL_BIN_EDGES_NATS[-1]:g} nats and more",
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Comparison({self.other} | {self.reference}: kl_mean={self.kl_mean:.5f}, ppl={self.ppl:.4f}, top1={self.top1:.4f})"

    def _repr_html_(self) -> str:
        rows, length = self.ids.shape
        facts = [
            ("Perplexity", f"{self.ppl:.3f}", f"reference {self.reference_ppl:.3f}"),
            ("KL mean", f"{self.kl_mean:.5f}", "nats a token"),
            ("KL 99th percentile", f"{self.kl_p99:.4f}", "nats"),
            ("Same top token", f"{self.top1:.2%}", "of positions"),
        ]
        cells = "".join(
            f'<div style="min-width:8em"><div style="opacity:.7">{name}</div>'
            f'<div style="font-size:1.5em;font-variant-numeric:tabular-nums">{value}</div><div style="opacity:.7">{note}</div></div>'
            for name, value, note in facts
        )
        title = f"{html.escape(self.other)} against {html.escape(self.reference)}: {rows} rows of {length} tokens"
        return (
            f'<div style="font:13px/1.4 system-ui,sans-serif;max-width:75em"><div style="font-weight:600;margin-bottom:.5em">{title}</div>'
            f'<div style="display:flex;flex-wrap:wrap;gap:1.5em;align-items:start">{cells}{self.histogram_svg()}</div></div>'
        )

    def histogram_svg(self) -> str:
        """The KL histogram as inline SVG in the current text colour, with a text alternative."""
        bars = self.histogram()
        top, width, height = max(share for _, _, share in bars), 22, 60
        label = ", ".join(f"{low:g} to {high:g}: {share:.1%}" for low, high, share in bars)
        parts = []
        for index, (low, high, share) in enumerate(bars):
            tall = height * share / top
            x = index * (width + 2)
            range_text = f"{low:g} to {high:g} nats" if math.isfinite(high) else f"{low:g} nats and more"
            parts.append(
                f'<g><title>{range_text}: {share:.1%}</title><rect x="{x}" y="{height - tall:.1f}" width="{width}"'
                f' height="{max(tall, 0.5):.1f}" rx="1.5" fill="currentColor" opacity=".55"/>'
                f'<text x="{x}" y="{height + 11}" font-size="8" text-anchor="middle"'
                f' fill="currentColor" opacity=".8">{_short(low)}</text></g>'
            )
        full = len(bars) * (width + 2)
        return (
            f'<svg role="img" aria-label="Share of tokens by KL in nats: {label}" viewBox="-8 -2 {full + 14} {height + 26}"'
            f' width="{full + 14}" height="{height + 26}">{"".join(parts)}'
            f'<text x="{full / 2}" y="{height + 22}" font-size="8" text-anchor="middle"'
            f' fill="currentColor" opacity=".8">KL of a token, nats (share of tokens)</text></svg>'
        )


def _ppl(logprob: Tensor) -> float:
    return math.exp(min(-logprob.double().mean().item(), 700.0))


def _short(edge: float) -> str:
    """An edge in at most four characters: .003 for 0.003."""
    return f"{edge:g}".replace("0.", ".").replace("1e-04", "1e-4")


def token_divergence(reference: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """KL and agreement of two sets of log-probabilities.

    Args:
        reference: f64 `(n, V)` log-probabilities.
        other: the same of the other model.

    Returns:
        KL(reference || other) in nats f64 `(n,)`, never below 0, and whether the most likely token is the same, bool `(n,)`.
    """
    kl = (reference.exp() * (reference - other)).sum(dim=-1).clamp_min(0)
    return kl, reference.argmax(dim=-1) == other.argmax(dim=-1)


class _Columns:
    """Per-token results of one model against the reference, gathered piece by piece."""

    def __init__(self) -> None:
        self.kl: list[Tensor] = []
        self.same: list[Tensor] = []
        self.logprob: list[Tensor] = []
        self.seconds = 0.0


def compare_many(
    reference: Model,
    others: Mapping[str, Model],
    ids: Tensor,
    progress: Sink | None = None,
    *,
    reference_name: str = "reference",
    cache: str = "fp32",
    adapters: Mapping[str, int] | None = None,
) -> dict[str, Comparison]:
    """Compare several models with one reference, which is run once.

    Args:
        others: name -> model, each of the same vocabulary.
        ids: int `(rows, T)`, T at least 2; each row is read from an empty context.
        reference_name: what the reference is called in the result.
        cache: mode of the others' KV caches; the reference has an FP32 one. A model against itself shows what its cache costs.
        adapters: row of `Model.adapters` by the name of one of the others, which runs with it.

    Returns:
        name -> Comparison, in the order of `others`.

    Raises:
        OptionError, ContextOverflow: vocabularies differ or the ids do not fit a model.

    Cost: one forward pass of every model over the ids; memory is a piece of logits (at most 64 MiB at fp32) a model plus 13 bytes a token.
    """
    for name, model in others.items():
        if model.config.vocab_size != reference.config.vocab_size:
            raise OptionError(
                f"compare: vocabulary of {name} is {model.config.vocab_size}, of {reference_name} {reference.config.vocab_size};"
                " expected the same tokenizer; compare a model with the one it was made from"
            )
        ids = check_ids(model, ids)
    ids = check_ids(reference, ids)
    if ids.shape[1] < 2:
        raise OptionError("compare: rows of 1 token; expected at least 2, as the first token of a row is not predicted")
    runners = {name: RowRunner(model, ids.shape[1], cache, adapter=(adapters or {}).get(name, -1)) for name, model in others.items()}
    base, base_logprob = RowRunner(reference, ids.shape[1]), []
    columns = {name: _Columns() for name in others}
    with Meter("compare", total=ids.numel(), unit="tokens", sink=progress) as meter:
        for row in ids:
            streams = {name: runner.pieces(row) for name, runner in runners.items()}
            for start, logits in base.pieces(row):
                expected = logits.double().log_softmax(dim=-1)
                base_logprob.append(next_token_logprob(expected, row, start))
                for name, stream in streams.items():
                    _measure(columns[name], stream, expected, row)
            meter.step(len(row))
    shape = tuple(ids.shape)
    shared = torch.cat(base_logprob).view(shape[0], -1)
    return {
        name: Comparison(
            reference=reference_name,
            other=name,
            ids=ids,
            kl=torch.cat(column.kl).view(shape),
            same_top1=torch.cat(column.same).view(shape),
            reference_logprob=shared,
            logprob=torch.cat(column.logprob).view(shape[0], -1),
            forward_s=column.seconds,
        )
        for name, column in columns.items()
    }


def _measure(column: _Columns, stream: Iterator[tuple[int, Tensor]], expected: Tensor, row: Tensor) -> None:
    """Run the next piece of one model and add its numbers to `column`."""
    begin = time.monotonic()
    start, logits = next(stream)
    column.seconds += time.monotonic() - begin
    logprobs = logits.double().log_softmax(dim=-1)
    kl, same = token_divergence(expected.to(logprobs.device), logprobs)
    column.kl.append(kl.float().cpu())
    column.same.append(same.cpu())
    column.logprob.append(next_token_logprob(logprobs, row, start))


def compare_models(
    reference: Model,
    other: Model,
    ids: Tensor,
    progress: Sink | None = None,
    *,
    reference_name: str = "reference",
    other_name: str = "other",
    cache: str = "fp32",
    adapter: int = -1,
) -> Comparison:
    """Compare one model with a reference: `compare_many` for two. See there for arguments, errors and cost."""
    names = {"reference_name": reference_name, "cache": cache, "adapters": {other_name: adapter}}
    return compare_many(reference, {other_name: other}, ids, progress, **names)[other_name]

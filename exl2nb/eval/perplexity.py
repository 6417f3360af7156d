"""How well a model predicts a text, by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from exl2nb.core.progress import Meter, Sink
from exl2nb.eval.logits import RowRunner, check_ids
from exl2nb.model.model import Model


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

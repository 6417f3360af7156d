"""How far a conversion is from its source on text it was not calibrated on. Knows nothing of how it was made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from exl2nb.model import reference
from exl2nb.model.config import ModelConfig


@dataclass(frozen=True)
class Quality:
    """Held-out quality.

    rows x length: tokens judged. kl: mean KL(source || made) in nats per token; kl_low, kl_high: 95 % confidence, over rows.
    top1: share of tokens whose most likely successor is the same. ppl, source_ppl: perplexities of the made model and of its source.
    """

    rows: int
    length: int
    kl: float
    kl_low: float
    kl_high: float
    top1: float
    ppl: float
    source_ppl: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, None for NaN."""
        return {name: None if value != value else value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return (
            f"held-out KL {self.kl:.5f} ({self.kl_low:.5f} to {self.kl_high:.5f}), top-1 {100 * self.top1:.2f} %, "
            f"perplexity {self.ppl:.3f} (source {self.source_ppl:.3f}), {self.rows} rows of {self.length} tokens"
        )


# two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the table the last one
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09, 2.04)


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean and its 95 % confidence interval, NaN for one value, which has none."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, math.nan, math.nan
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    t = _T[min(n - 2, len(_T) - 1)]
    return mean, mean - t * deviation, mean + t * deviation


def judge(
    config: ModelConfig, ids: Tensor, dense: tuple[Mapping[str, Tensor], Tensor], made: tuple[Mapping[str, Tensor], Tensor]
) -> Quality:
    """Compare two models on the streams before their heads.

    Args:
        config: of both.
        ids: int `(rows, S)`.
        dense, made: embedding, norm and head of the model, and its stream f32 `(rows, S, H)`.
    """
    kls, same, nlls = [], 0, ([], [])
    for row, x, y in zip(ids.to(dense[1].device), dense[1], made[1]):
        wanted, found = (
            reference.head(config, ends, reference.final_norm(config, ends, part)).log_softmax(-1)
            for ends, part in ((dense[0], x), (made[0], y))
        )
        kls.append(float((wanted.exp() * (wanted - found)).sum(-1).mean(dtype=torch.float64)))
        same += int((wanted.argmax(-1) == found.argmax(-1)).sum())
        for nll, logprobs in zip(nlls, (wanted, found)):
            nll.append(-float(logprobs[:-1].gather(-1, row[1:, None].long().to(logprobs.device)).mean(dtype=torch.float64)))
    kl, low, high = interval(kls)
    source, own = (math.exp(min(700.0, sum(nll) / len(nll))) for nll in nlls)
    return Quality(len(ids), ids.shape[1], kl, low, high, same / ids.numel(), own, source)

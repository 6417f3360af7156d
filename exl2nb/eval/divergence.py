"""How far one model's predictions are from another's, token by token, without keeping logits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from exl2nb.core.errors import OptionError
from exl2nb.core.progress import Meter, Sink
from exl2nb.eval.comparison import Comparison
from exl2nb.eval.logits import RowRunner, check_ids
from exl2nb.eval.perplexity import next_token_logprob
from exl2nb.model.model import Model


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
) -> dict[str, Comparison]:
    """Compare several models with one reference, which is run once.

    Args:
        reference: the model taken as the truth.
        others: name -> model, each of the same vocabulary.
        ids: int `(rows, T)`, T at least 2; each row is read from an empty context.
        progress: sink of progress events.
        reference_name: what the reference is called in the result.
        cache: mode of the others' KV caches; the reference has an FP32 one. A model against itself shows what its cache costs.

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
    runners = {name: RowRunner(model, ids.shape[1], cache) for name, model in others.items()}
    base, base_logprob = RowRunner(reference, ids.shape[1]), []
    columns = {name: _Columns() for name in others}
    with Meter("compare", total=ids.numel(), unit="tokens", sink=progress) as meter:
        for row in ids:
            streams = {name: runner.pieces(row) for name, runner in runners.items()}
            for start, logits in base.pieces(row):
                truth = logits.double().log_softmax(dim=-1)
                base_logprob.append(next_token_logprob(truth, row, start))
                for name, stream in streams.items():
                    _measure(columns[name], stream, truth, row)
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


def _measure(column: _Columns, stream: Iterator[tuple[int, Tensor]], truth: Tensor, row: Tensor) -> None:
    """Run the next piece of one model and add its numbers to `column`."""
    begin = time.monotonic()
    start, logits = next(stream)
    column.seconds += time.monotonic() - begin
    logprobs = logits.double().log_softmax(dim=-1)
    kl, same = token_divergence(truth.to(logprobs.device), logprobs)
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
) -> Comparison:
    """Compare one model with a reference: `compare_many` for two. See there for arguments, errors and cost."""
    return compare_many(reference, {other_name: other}, ids, progress, reference_name=reference_name, cache=cache)[other_name]

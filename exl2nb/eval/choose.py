"""Which of several continuations a model finds most likely."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from exl2nb.cache.pool import KVCache
from exl2nb.core.errors import OptionError
from exl2nb.eval.logits import check_ids
from exl2nb.model.batch import Batch
from exl2nb.model.model import Model

NORMALISE = ("sum", "mean")


class Option(NamedTuple):
    """One continuation.

    logprob: of its tokens given the prompt, nats. prob: among the options, whose probabilities add up to 1. tokens: how many it has.
    """

    text: str
    logprob: float
    prob: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The options in the order in which they were given."""

    prompt: str
    options: tuple[Option, ...]

    @property
    def best(self) -> str:
        """The most probable option; the first one of equals."""
        return max(self.options, key=lambda option: option.prob).text

    @property
    def probs(self) -> dict[str, float]:
        """Probability of each option among them."""
        return {option.text: option.prob for option in self.options}

    def __str__(self) -> str:
        return self.best

    def __repr__(self) -> str:
        ranked = sorted(self.options, key=lambda option: -option.prob)
        return "Choice(" + ", ".join(f"{option.text!r}: {option.prob:.1%}" for option in ranked) + ")"

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td style="text-align:left">{html.escape(option.text)}</td><td>{option.prob:.1%}</td><td>{option.logprob:.2f}</td>'
            f'<td style="text-align:left"><span style="display:inline-block;height:.7em;width:{12 * option.prob:.2f}em;'
            f'background:rgba(214,120,40,.6)"></span></td></tr>'
            for option in sorted(self.options, key=lambda option: -option.prob)
        )
        head = "<tr><th style='text-align:left'>option</th><th>probability</th><th>log probability</th><th></th></tr>"
        return f"<table><caption>{html.escape(self.prompt[-80:])}</caption>{head}{rows}</table>"


def option_logprobs(model: Model, rows: Sequence[Sequence[int]], *, cache: str = "fp32") -> list[tuple[float, int]]:
    """Log probability of each row after the beginning that all of them share.

    Comparing whole rows and not "the tokens after the prompt" is right also where the end of the prompt and the beginning of an option
    become one token.

    Args:
        model: a loaded model that nobody else runs meanwhile.
        rows: prompt and option together, each; different from one another.
        cache: mode of the KV cache.

    Returns:
        For each row its log probability after the shared beginning, and how many tokens that are.

    Cost: one pass over the shared beginning and one over each rest.
    """
    shared = min(map(len, rows)) - 1
    for at in range(shared):
        if len({row[at] for row in rows}) > 1:
            shared = at
            break
    if shared == 0:
        raise OptionError("choose: the prompt is empty; give some text that the options continue")
    longest = max(map(len, rows))
    for row in rows:
        check_ids(model, torch.tensor([list(row)]))
    spec = model.cache_spec(longest, mode=cache)
    pool, pages = KVCache(spec, device=model.device), list(range(spec.num_pages))

    def run(ids: Sequence[int], start: int, rows: str) -> torch.Tensor:
        return model.forward(Batch.single(ids, start=start, pages=pages, logit_rows=rows), pool).float().cpu()

    first = run(rows[0][:shared], 0, "last")
    found = []
    for row in rows:
        rest = torch.tensor(row[shared:])
        logits = first if len(rest) == 1 else torch.cat([first, run(row[shared:-1], shared, "all")])
        picked = logits.gather(1, rest[:, None])[:, 0] - logits.logsumexp(dim=1)
        found.append((float(picked.double().sum()), len(rest)))
    return found


def choice_of(prompt: str, texts: Sequence[str], found: Sequence[tuple[float, int]], *, normalise: str = "sum") -> Choice:
    """Log probabilities to probabilities among the options.

    Args:
        prompt: for display. texts: the options. found: see `option_logprobs`.
        normalise: "sum": of the whole option, so that long ones are less likely; "mean": per token, to compare options of unlike length.
    """
    if normalise not in NORMALISE:
        raise OptionError(f"choose: normalise is {normalise!r}; expected one of {', '.join(NORMALISE)}")
    weights = [logprob / count if normalise == "mean" else logprob for logprob, count in found]
    highest = max(weights)
    total = math.fsum(math.exp(weight - highest) for weight in weights)
    return Choice(
        prompt=prompt,
        options=tuple(
            Option(text, logprob, math.exp(weight - highest) / total, count)
            for text, (logprob, count), weight in zip(texts, found, weights)
        ),
    )

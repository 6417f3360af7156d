"""Log probabilities of a text's tokens, and which of several continuations is the most likely."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from exl2nb.core.errors import OptionError
from exl2nb.eval.rows import RowRunner, check_ids
from exl2nb.model.batch import Batch
from exl2nb.model.model import Model
from exl2nb.tokenizer.detokenize import token_texts
from exl2nb.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import pandas as pd


class ScoredToken(NamedTuple):
    """One token. logprob, prob, rank (1 = the most probable): given all before it; None for the first, which nothing predicts."""

    id: int
    text: str
    logprob: float | None
    prob: float | None
    rank: int | None


@dataclass(frozen=True, kw_only=True)
class Score:
    """A text as the model reads it; `tokens` side by side are the text."""

    tokens: tuple[ScoredToken, ...]

    @property
    def total(self) -> float:
        """Log probability of all tokens after the first, nats."""
        return math.fsum(token.logprob for token in self.tokens if token.logprob is not None)

    @property
    def count(self) -> int:
        """Tokens that were predicted."""
        return len(self.tokens) - 1

    @property
    def perplexity(self) -> float:
        """The exponential of the mean surprise: as uncertain as a uniform choice among that many tokens."""
        return math.exp(min(-self.total / self.count, 700.0))

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log probability of each predicted token."""
        return tuple(token.logprob for token in self.tokens if token.logprob is not None)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each predicted token."""
        return tuple(token.rank for token in self.tokens if token.rank is not None)

    def __str__(self) -> str:
        return f"{self.count} tokens, log probability {self.total:.3f}, perplexity {self.perplexity:.3f}"

    def __repr__(self) -> str:
        return f"Score({self})"

    def to_frame(self) -> pd.DataFrame:
        """One line per token."""
        import pandas as pd

        return pd.DataFrame(list(self.tokens), columns=list(ScoredToken._fields))

    def _repr_html_(self) -> str:
        spans = "".join(map(_token_html, self.tokens))
        return (
            f'<div style="white-space:pre-wrap;line-height:1.6">{spans}</div>'
            f'<div style="opacity:.6;font-size:85%">{html.escape(str(self))}</div>'
        )


def score(model: Model, tokenizer: Tokenizer, ids: Sequence[int], *, cache: str = "fp32", adapter: int = -1) -> Score:
    """Score a text.

    Args:
        model: a loaded model; nothing else may run it during the call.
        tokenizer: of the model; for the texts of the tokens.
        ids: at least two.
        adapter: row of `Model.adapters`, -1 for none.

    Raises:
        OptionError: fewer than two ids, or one outside the vocabulary. ContextOverflow: more than the context.

    Cost: one pass over the ids.
    """
    if len(ids) < 2:
        raise OptionError(f"score: the text has {len(ids)} tokens; expected at least two, since the first is not predicted")
    row = check_ids(model, torch.tensor([list(ids)]))[0]
    logprobs: list[float] = []
    ranks: list[int] = []
    for start, logits in RowRunner(model, len(row), cache, adapter=adapter).pieces(row):
        targets = row[start + 1 : start + 1 + len(logits)].long().to(logits.device)
        found = logits[: len(targets)].float()
        picked = found.gather(1, targets[:, None])
        logprobs += (picked[:, 0] - found.logsumexp(dim=1)).tolist()
        ranks += ((found > picked).sum(dim=1) + 1).tolist()
    texts = token_texts(tokenizer, list(ids))
    first = ScoredToken(int(ids[0]), texts[0], None, None, None)
    rest = [
        ScoredToken(int(i), text, logprob, math.exp(logprob), rank) for i, text, logprob, rank in zip(ids[1:], texts[1:], logprobs, ranks)
    ]
    return Score(tokens=(first, *rest))


def _token_html(token: ScoredToken) -> str:
    if token.prob is None:
        return f'<span style="opacity:.6">{html.escape(token.text)}</span>'
    tint = round(0.45 * (1.0 - token.prob), 2)
    title = f"{token.prob:.1%}, rank {token.rank}"
    return f'<span title="{title}" style="background:rgba(214,120,40,{tint})">{html.escape(token.text)}</span>'


NORMALISATIONS = ("sum", "mean")


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
        model: a loaded model; nothing else may run it during the call.
        rows: prompt and option together, each; different from one another.

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
    found = continuation_logprobs(model, rows[0][:shared], [row[shared:] for row in rows], cache=cache)
    return [(logprob, len(row) - shared) for (logprob, _), row in zip(found, rows)]


def continuation_logprobs(
    model: Model, context: Sequence[int], rests: Sequence[Sequence[int]], *, cache: str = "fp32"
) -> list[tuple[float, bool]]:
    """Log probabilities of several continuations of one context.

    Args:
        model: a loaded model; nothing else may run it meanwhile.
        context, rests: token ids, none of them empty.

    Returns:
        For each rest its log probability, and whether every token of it is the most probable one.

    Cost: one pass over the context and one over each rest.
    """
    for rest in rests:
        check_ids(model, torch.tensor([[*context, *rest[:-1]]]))  # the last token is predicted and not read
        check_ids(model, torch.tensor([rest[-1:]]))
    spec = model.cache_spec(len(context) + max(map(len, rests)), mode=cache)
    pool, pages = model.new_cache(spec), list(range(spec.num_pages))

    def run(ids: Sequence[int], start: int, rows: str) -> torch.Tensor:
        return model.forward(Batch.single(ids, start=start, pages=pages, logit_rows=rows), pool).float().cpu()

    first = run(context, 0, "last")
    found = []
    for rest in rests:
        wanted = torch.tensor(rest)
        logits = first if len(rest) == 1 else torch.cat([first, run(rest[:-1], len(context), "all")])
        picked = logits.gather(1, wanted[:, None])[:, 0]
        greedy = bool((picked == logits.amax(dim=1)).all())
        found.append((float((picked - logits.logsumexp(dim=1)).double().sum()), greedy))
    return found


def choice_of(prompt: str, texts: Sequence[str], found: Sequence[tuple[float, int]], *, normalise: str = "sum") -> Choice:
    """Log probabilities to probabilities among the options.

    Args:
        prompt: for display. texts: the options. found: see `option_logprobs`.
        normalise: "sum": of the whole option, so that long ones are less likely; "mean": per token, to compare options of unlike length.
    """
    if normalise not in NORMALISATIONS:
        raise OptionError(f"choose: normalise is {normalise!r}; expected one of {', '.join(NORMALISATIONS)}")
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

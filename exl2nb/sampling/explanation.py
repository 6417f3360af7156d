"""What each filter did to one row of logits: as data, as frames, as text and as static HTML without scripts. Knows no filter."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from exl2nb.sampling.params import SamplingParams

SHOWN_TOKENS = 12  # best tokens of the first and the last step in the tables; the drawn one besides
BAR_CHARACTERS = 20  # characters
_TABLE_HEAD = ("step", "settings", "left", "removed", "mass", "temp", "bits", "best", "drawn")


@dataclass(frozen=True, eq=False, kw_only=True)
class FilterStep:
    """What one filter of the chain did.

    name: of the filter; the first step is "logits", the last of a greedy request "greedy". settings: by name.
    ids: int64, tokens left after it, ascending. logits: f32, theirs after it. before, after: f64, their probability before and after it;
    `after` sums to 1. removed: int64, tokens it took away. removed_mass: what they weighed before. temperature: all divisions so far
    together; 1 where no step divides.
    """

    name: str
    settings: dict[str, Any]
    ids: np.ndarray
    logits: np.ndarray
    before: np.ndarray
    after: np.ndarray
    removed: np.ndarray
    removed_mass: float
    temperature: float

    @property
    def survivors(self) -> int:
        """How many tokens are left."""
        return len(self.ids)

    @property
    def entropy_bits(self) -> float:
        """Entropy of the distribution after the step."""
        probs = self.after[self.after > 0]
        return float(-(probs * np.log2(probs)).sum()) + 0.0

    def prob_of(self, token_id: int) -> float:
        """Probability of a token after the step; 0 where it was removed."""
        at = int(self.ids.searchsorted(token_id))
        return float(self.after[at]) if at < len(self.ids) and self.ids[at] == token_id else 0.0

    def best(self, count: int) -> np.ndarray:
        """Ids of the most probable tokens after the step, best first; ties in order of id."""
        ids, probs = self.ids, self.after
        if len(ids) > 4 * count > 0:  # sort the few that can be among them, ties included
            few = np.flatnonzero(probs >= np.partition(probs, len(probs) - count)[len(probs) - count])
            ids, probs = ids[few], probs[few]
        return ids[np.lexsort((ids, -probs))[:count]]

    def __repr__(self) -> str:
        return f"Step({self.name}: {self.survivors} left, {self.removed_mass:.1%} removed)"


@dataclass(frozen=True, eq=False, kw_only=True)
class Explanation:
    """How a token was chosen.

    steps: in order. token: the id that is drawn. uniform: the random number in [0, 1) that chose it, None for a greedy request. seed and
    index: the number is number `index` of the stream `seed`. params: what was asked for. names: text of a token, where known.

    The last line of a cell shows it; `print` shows the same as text; `.to_frame()` has one line per step, `.tokens_frame()` one per token.
    """

    steps: tuple[FilterStep, ...]
    token: int
    uniform: float | None
    seed: int
    index: int
    params: SamplingParams
    names: Callable[[int], str] | None = field(default=None, repr=False)

    @property
    def ids(self) -> np.ndarray:
        """int64: the tokens that could be drawn, ascending."""
        return self.steps[-1].ids

    @property
    def probs(self) -> np.ndarray:
        """f64: their probabilities; drawn is the first id, ascending, at which their sum passes `uniform`."""
        return self.steps[-1].after

    @property
    def prob(self) -> float:
        """Probability with which the token was drawn."""
        return self.steps[-1].prob_of(self.token)

    def name_of(self, token_id: int) -> str:
        """A token as people read it; its number where no tokenizer is known."""
        return f"#{token_id}" if self.names is None else repr(self.names(token_id))

    def rows(self) -> list[dict[str, Any]]:
        """The steps as plain values."""
        return [
            {
                "step": step.name,
                "settings": ", ".join(f"{k}={_short(v)}" for k, v in step.settings.items()),
                "survivors": step.survivors,
                "removed": len(step.removed),
                "removed_mass": step.removed_mass,
                "temperature": step.temperature,
                "entropy_bits": step.entropy_bits,
                "best": int(step.best(1)[0]),
                "best_prob": float(step.after.max()),
                "token_prob": step.prob_of(self.token),
            }
            for step in self.steps
        ]

    def to_frame(self) -> pd.DataFrame:
        """One line per step: settings, survivors, what was removed, temperature, entropy, the best token, the drawn token's probability."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def tokens_frame(self, count: int = 20) -> pd.DataFrame:
        """One line per token: its probability after each step. The `count` best of the first and last step, and the drawn one."""
        import pandas as pd

        ids = self.shown(count)
        columns: dict[str, list[Any]] = {"id": ids}
        if self.names is not None:
            columns["text"] = [self.names(i) for i in ids]
        for place, step in enumerate(self.steps):
            columns[step.name if step.name not in columns else f"{step.name} {place}"] = [step.prob_of(i) for i in ids]
        return pd.DataFrame(columns)

    def shown(self, count: int) -> list[int]:
        """The tokens worth looking at: the best of the first and of the last step, and the drawn one; most probable at first on top."""
        first = self.steps[0]
        ids = {self.token, *first.best(count).tolist(), *self.steps[-1].best(count).tolist()}
        return sorted(ids, key=lambda i: (-first.prob_of(i), i))

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"Explanation({len(self.steps)} steps, {len(self.ids)} left, drew {self.name_of(self.token)} at {self.prob:.1%})"

    def _repr_html_(self) -> str:
        return as_html(self)


def _short(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def as_text(found: Explanation) -> str:
    """Both tables, one line per step and one per token."""
    rows = found.rows()
    wide = max(len(row["step"]) for row in rows)
    lines = [f"{'step':{wide}} {'left':>7} {'removed':>8} {'mass':>7} {'temp':>6} {'bits':>6} {'best':>6} {'drawn':>7}  settings"]
    for row in rows:
        lines.append(
            f"{row['step']:{wide}} {row['survivors']:7d} {row['removed']:8d} {row['removed_mass']:7.2%} {row['temperature']:6.3g} "
            f"{row['entropy_bits']:6.2f} {row['best_prob']:6.1%} {row['token_prob']:7.2%}  {row['settings']}".rstrip()
        )
    lines += ["", f"{'':{BAR_CHARACTERS}} {'first':>7} {'last':>7}  token"]
    first, last = found.steps[0], found.steps[-1]
    for token in found.shown(SHOWN_TOKENS):
        here = last.prob_of(token)
        mark = "  <- drawn" if token == found.token else ""
        lines.append(
            f"{'#' * round(BAR_CHARACTERS * here):{BAR_CHARACTERS}} {first.prob_of(token):7.2%} {here:7.2%}  {found.name_of(token)}{mark}"
        )
    return "\n".join([*lines, "", _how(found)])


def as_html(found: Explanation) -> str:
    """Two tables: the steps, and the probability of the best tokens after each of them."""
    return (
        '<div style="font-size:90%">'
        f"{_steps_table(found)}{_tokens_table(found)}"
        f'<div style="opacity:.7;font-size:90%">{html.escape(_how(found))}</div></div>'
    )


def _how(found: Explanation) -> str:
    text = f"drew {found.name_of(found.token)} (id {found.token}) with probability {found.prob:.2%}"
    if found.uniform is None:
        return f"{text}: greedy, the best after the penalties"
    return f"{text}: the sum in order of ids passes {found.uniform:.6f}, number {found.index} of seed {found.seed}"


def _steps_table(found: Explanation) -> str:
    head = "".join(f'<th style="text-align:{"left" if n in ("step", "settings") else "right"}">{n}</th>' for n in _TABLE_HEAD)
    lines = []
    for row in found.rows():
        cells = (
            (row["step"], "left"),
            (row["settings"], "left"),
            (f"{row['survivors']:,}", "right"),
            (f"{row['removed']:,}", "right"),
            (f"{row['removed_mass']:.2%}", "right"),
            (f"{row['temperature']:.3g}", "right"),
            (f"{row['entropy_bits']:.2f}", "right"),
            (f"{row['best_prob']:.1%} {found.name_of(row['best'])}", "right"),
            (f"{row['token_prob']:.2%}", "right"),
        )
        lines.append("<tr>" + "".join(f'<td style="text-align:{side}">{html.escape(str(text))}</td>' for text, side in cells) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _tokens_table(found: Explanation) -> str:
    head = '<th style="text-align:left">token</th>' + "".join(f"<th>{html.escape(step.name)}</th>" for step in found.steps)
    lines = []
    for token in found.shown(SHOWN_TOKENS):
        weight = "font-weight:bold;outline:1px solid currentColor;" if token == found.token else ""
        cells = "".join(_cell(step, token) for step in found.steps)
        lines.append(f'<tr style="{weight}"><td style="text-align:left">{html.escape(found.name_of(token))}</td>{cells}</tr>')
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _cell(step: FilterStep, token: int) -> str:
    prob = step.prob_of(token)
    if prob == 0.0 and token not in step.ids:
        return '<td style="opacity:.3;text-align:right">&times;</td>'
    share = round(100 * prob, 1)
    bar = f"background:linear-gradient(90deg,rgba(90,140,220,.35) {share}%,transparent {share}%)"
    return f'<td style="text-align:right;{bar}">{prob:.2%}</td>'

"""Answers side by side, coloured by KL: what CacheExplorer and Compare have in common. Plain data and HTML; no Jupyter."""

from __future__ import annotations

import html
from collections.abc import Sequence

from exl2nb.widgets import static
from exl2nb.widgets.protocol import KlToken

KL_LIMITS = (0.001, 0.01, 0.1, 1.0)
"""Steps of the colour, nats."""


def kl_step(kl: float | None) -> int:
    """Step 0 (below 0.001 nats) to 4 (1 and more); 0 where the KL is not known."""
    return 0 if kl is None else sum(kl >= limit for limit in KL_LIMITS)


def first_difference(one: Sequence[KlToken], other: Sequence[KlToken]) -> int | None:
    """Index of the token of `other` in which its text first leaves that of `one`; None while it does not.

    Texts are compared, not ids, so models with different vocabularies can be compared too.
    """
    text = "".join(token.text for token in one)
    at = 0
    for index, token in enumerate(other):
        if text[at : at + len(token.text)] != token.text:
            return index
        at += len(token.text)
    return len(other) if at < len(text) and other else None


def mean_kl(tokens: Sequence[KlToken]) -> float | None:
    """Mean over the tokens whose KL is known."""
    known = [token.kl for token in tokens if token.kl is not None]
    return sum(known) / len(known) if known else None


def same_choice(tokens: Sequence[KlToken]) -> float | None:
    """Share of tokens where reference and column find the same token most likely; None where that is not known."""
    known = [token.same for token in tokens if token.same is not None]
    return sum(known) / len(known) if known else None


def column_html(title: str, note: str, tokens: Sequence[KlToken], differs: int | None) -> str:
    """One answer without scripts: tinted tokens whose titles say the numbers, and a mark at the first difference from the first column."""
    parts = []
    for index, token in enumerate(tokens):
        style = f"background:{static.TINTS[kl_step(token.kl)]};border-radius:2px"
        if index == differs:
            style += ";border-left:3px solid"
        title_text = words(token) + ("; first difference" if index == differs else "")
        shown = html.escape(title_text, quote=True)
        parts.append(f'<span style="{style}" title="{shown}">{html.escape(token.text)}</span>')
    head = f'<div><b>{html.escape(title)}</b> <span style="opacity:.75;font-size:12px">{html.escape(note)}</span></div>'
    text = f'<div style="white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate">{"".join(parts)}</div>'
    return f'<div style="flex:1 1 240px;min-width:0">{head}{text}</div>'


def side_by_side(columns: Sequence[str]) -> str:
    """Columns of `column_html` side by side."""
    return f'<div style="display:flex;flex-wrap:wrap;gap:10px 20px;margin-top:6px">{"".join(columns)}</div>'


def words(token: KlToken) -> str:
    """The numbers of one token in words."""
    parts = [] if token.prob is None else [f"{static.percent(token.prob)} likely"]
    parts += [] if token.reference_prob is None else [f"reference {static.percent(token.reference_prob)}"]
    parts += [] if token.kl is None else [f"KL {token.kl:.3g} nats"]
    return ", ".join(parts) or "not measured"

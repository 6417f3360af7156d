"""A completion as static HTML: each token tinted by its probability. No script, so that it also shows where notebooks are only read."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exl2nb.generator.request import Completion, Token


MOST_TOKENS = 2000  # that are tinted; the text of the others follows as it is
MOST_TITLES = 200  # tokens that tell their alternatives: a page is made in milliseconds, whatever the answer


def completion_html(completion: Completion) -> str:
    """The prompt if known, the answer, one line of figures."""
    prompt = f'<span style="opacity:.6">{html.escape(completion.prompt)}</span>' if completion.prompt else ""
    shown, rest = completion.tokens[:MOST_TOKENS], completion.tokens[MOST_TOKENS:]
    tokens = "".join([_token_html(token, place < MOST_TITLES) for place, token in enumerate(shown)])
    tokens += html.escape("".join([token.text for token in rest]) if shown else completion.text)
    return (
        f'<div style="white-space:pre-wrap;line-height:1.6">{prompt}{tokens}</div>'
        f'<div style="opacity:.6;font-size:85%">{completion.finish_reason}; {html.escape(str(completion.timings))}; '
        f"seed {completion.seed}</div>"
    )


def _token_html(token: Token, whole: bool) -> str:
    title = f"{token.prob:.1%}, rank {token.rank}"
    if token.top and whole:
        title += "".join(f"\n{other.prob:6.1%} {other.text!r}" for other in token.top)
    tint = round(0.45 * (1.0 - token.prob), 2)
    return f'<span title="{html.escape(title)}" style="background:rgba(214,120,40,{tint})">{html.escape(token.text)}</span>'

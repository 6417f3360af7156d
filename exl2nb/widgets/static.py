"""What stands in for a live widget: script-free HTML, answers side by side coloured by KL, the offline page. Plain strings; no Jupyter."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exl2nb.widgets.protocol import KlToken


STATIC_FOLDER = Path(__file__).parent.parent / "static"
RGB = tuple[int, int, int]

SURPRISE_LIMITS = (0.9, 0.5, 0.2, 0.05)
"""Steps of the tint: at least 90 %, 50, 20, 5 and below."""
KL_LIMITS = (0.001, 0.01, 0.1, 1.0)
"""Steps of the tint in nats of KL."""
HIGHLIGHT_TINTS = ("transparent", "rgba(255,200,40,.26)", "rgba(255,160,30,.42)", "rgba(250,110,40,.52)", "rgba(226,60,70,.58)")
"""Of the steps of surprise and of KL, from 0; the same are in widgets/src/shared/base.css."""


def surprise(prob: float | None) -> int:
    """Step 0 (likely) to 4 (below 5 %); 0 where the probability is not known."""
    return 0 if prob is None else sum(prob < limit for limit in SURPRISE_LIMITS)


def percent(prob: float) -> str:
    """`prob` 0..1 as a person reads it."""
    return f"{prob:.0%}" if prob >= 0.1 else f"{prob:.1%}" if prob >= 0.01 else f"{prob:.2%}"


def token_html(items: Sequence[Sequence[Any]], prompt: str = "") -> str:
    """Text tinted by probability, one `span` per token whose title says the number, so that colour is never the only carrier."""
    parts = [f'<span style="opacity:.7">{html.escape(prompt)}</span>'] if prompt else []
    for text, _id, prob, rank, top in items:
        style = f"background:{HIGHLIGHT_TINTS[surprise(prob)]};border-radius:2px"
        if rank is not None and rank > 1:
            style += ";text-decoration:underline dotted"
        title = "" if prob is None else f"{percent(prob)}, rank {rank}" if rank is not None else percent(prob)
        others = ", ".join(f"{other!r} {percent(p)}" for other, p in top[:3])
        title += f"; top choices: {others}" if others else ""
        parts.append(f'<span style="{style}" title="{html.escape(title, quote=True)}">{html.escape(text)}</span>')
    return "".join(parts)


def page(body: str, caption: str = "") -> str:
    """The script-free twin: `body` over one muted line. The class lets a live widget's style sheet hide it."""
    frame = "max-width:60rem;border:1px solid rgba(128,128,128,.4);border-radius:8px;padding:8px 14px;font-size:14px"
    line = f'<div style="opacity:.75;font-size:12px;margin-top:6px">{html.escape(caption)}</div>' if caption else ""
    return f'<div class="exl2nb-static" style="{frame}">{body}{line}</div>'


def offline_page(*, esm: str, css: str, state: Mapping[str, Any], title: str, fallback: str) -> str:
    """One HTML file that shows a widget with no kernel and no network: bundle, saved state and a few lines that host them.

    Args:
        esm: text of the widget's bundle.
        css: its style sheet.
        state: synced traits, JSON values.
        title: of the document.
        fallback: script-free twin for readers without JavaScript.
    """
    data = json.dumps({"esm": esm, "state": dict(state)}, ensure_ascii=False).replace("<", "\\u003c")
    host = (STATIC_FOLDER / "host.js").read_text(encoding="utf-8").replace("</", "<\\/")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<style>body{{margin:24px auto;max-width:60rem;padding:0 16px;font-family:system-ui,sans-serif}}
{css.replace("</", "<" + chr(92) + "/")}</style>
</head>
<body>
<div id="exl2nb-root"></div>
<noscript>{fallback.replace('class="exl2nb-static"', "")}</noscript>
<script type="application/json" id="exl2nb-export">{data}</script>
<script type="module">{host}</script>
</body>
</html>
"""


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
        style = f"background:{HIGHLIGHT_TINTS[kl_step(token.kl)]};border-radius:2px"
        if index == differs:
            style += ";border-left:3px solid"
        title_text = _numbers_in_words(token) + ("; first difference" if index == differs else "")
        shown = html.escape(title_text, quote=True)
        parts.append(f'<span style="{style}" title="{shown}">{html.escape(token.text)}</span>')
    head = f'<div><b>{html.escape(title)}</b> <span style="opacity:.75;font-size:12px">{html.escape(note)}</span></div>'
    text = f'<div style="white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate">{"".join(parts)}</div>'
    return f'<div style="flex:1 1 240px;min-width:0">{head}{text}</div>'


def side_by_side(columns: Sequence[str]) -> str:
    """Columns of `column_html` side by side."""
    return f'<div style="display:flex;flex-wrap:wrap;gap:10px 20px;margin-top:6px">{"".join(columns)}</div>'


def _numbers_in_words(token: KlToken) -> str:
    """The numbers of one token in words."""
    parts = [] if token.prob is None else [f"{percent(token.prob)} likely"]
    parts += [] if token.reference_prob is None else [f"reference {percent(token.reference_prob)}"]
    parts += [] if token.kl is None else [f"KL {token.kl:.3g} nats"]
    return ", ".join(parts) or "not measured"

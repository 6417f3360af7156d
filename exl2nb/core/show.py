"""How results look as the last line of a cell: small tables without scripts. Strings only."""

from __future__ import annotations

import html
from collections.abc import Mapping


def facts(caption: str, rows: Mapping[str, str]) -> str:
    """A caption over one line per fact. All text is data, never HTML.

    Example:
        >>> facts("a <b>", {"layers": "12"})
        "<table><caption>a &lt;b&gt;</caption><tr><th style='text-align:left'>layers</th><td style='text-align:left'>12</td></tr></table>"
    """
    lines = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:left'>{html.escape(text)}</td></tr>"
        for name, text in rows.items()
    )
    return f"<table><caption>{html.escape(caption)}</caption>{lines}</table>"

"""An explanation as text and as static HTML. No script, so that it also shows where notebooks are only read."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exl2nb.sampling.explanation import Explanation, Step

TOKENS = 12  # of the first and the last step; the drawn one besides
BAR = 20  # characters


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
    lines += ["", f"{'':{BAR}} {'first':>7} {'last':>7}  token"]
    first, last = found.steps[0], found.steps[-1]
    for token in found.shown(TOKENS):
        here = last.prob_of(token)
        mark = "  <- drawn" if token == found.token else ""
        lines.append(f"{'#' * round(BAR * here):{BAR}} {first.prob_of(token):7.2%} {here:7.2%}  {found.name_of(token)}{mark}")
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
    head = "".join(f'<th style="text-align:{"left" if n in ("step", "settings") else "right"}">{n}</th>' for n in _HEAD)
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


_HEAD = ("step", "settings", "left", "removed", "mass", "temp", "bits", "best", "drawn")


def _tokens_table(found: Explanation) -> str:
    head = '<th style="text-align:left">token</th>' + "".join(f"<th>{html.escape(step.name)}</th>" for step in found.steps)
    lines = []
    for token in found.shown(TOKENS):
        weight = "font-weight:bold;outline:1px solid currentColor;" if token == found.token else ""
        cells = "".join(_cell(step, token) for step in found.steps)
        lines.append(f'<tr style="{weight}"><td style="text-align:left">{html.escape(found.name_of(token))}</td>{cells}</tr>')
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _cell(step: Step, token: int) -> str:
    prob = step.prob_of(token)
    if prob == 0.0 and token not in step.ids:
        return '<td style="opacity:.3;text-align:right">&times;</td>'
    share = round(100 * prob, 1)
    bar = f"background:linear-gradient(90deg,rgba(90,140,220,.35) {share}%,transparent {share}%)"
    return f'<td style="text-align:right;{bar}">{prob:.2%}</td>'

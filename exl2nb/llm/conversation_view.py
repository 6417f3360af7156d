"""A conversation as static HTML: the current branch, and how many versions each turn has."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exl2nb.llm.conversation import Conversation
    from exl2nb.llm.turns import Turn


def conversation_html(conversation: Conversation) -> str:
    """One block per turn; no script."""
    blocks = "".join(_turn_html(conversation, turn) for turn in conversation.turns)
    return (
        f'<div style="max-width:45em;line-height:1.5">{blocks or "<em>nothing was said</em>"}'
        f'<div style="opacity:.6;font-size:85%">{html.escape(repr(conversation))}</div></div>'
    )


def _turn_html(conversation: Conversation, turn: Turn) -> str:
    versions = conversation.siblings(turn)
    which = f"version {versions.index(turn) + 1} of {len(versions)}" if len(versions) > 1 else ""
    ended = f"ended by {turn.finish_reason}" if turn.finish_reason not in (None, "eos", "stop") else ""
    notes = ", ".join(note for note in (which, ended) if note)
    side = "margin-left:2em" if turn.role == "assistant" else "margin-right:2em"
    return (
        f'<div style="{side};border-left:3px solid rgba(128,128,128,.4);padding:.2em .8em;margin-block:.5em">'
        f'<div style="opacity:.6;font-size:85%">{html.escape(turn.role)}{", " + notes if notes else ""}</div>'
        f'<div style="white-space:pre-wrap">{html.escape(turn.content)}</div></div>'
    )

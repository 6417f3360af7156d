"""A rendered conversation to look at: its tokens, which of them are special, and what looks wrong about it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from exl2nb.eval.score import token_texts
from exl2nb.tokenizer.tokenizer import Tokenizer


class Piece(NamedTuple):
    """One token of a prompt; special ones are shown by name."""

    id: int
    text: str
    special: bool


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The prompt that a conversation becomes: text, tokens, and warnings (none: all is well)."""

    text: str
    pieces: tuple[Piece, ...]
    warnings: tuple[str, ...]

    @property
    def ids(self) -> list[int]:
        """What the model reads."""
        return [piece.id for piece in self.pieces]

    def __str__(self) -> str:
        notes = "".join(f"\nwarning: {warning}" for warning in self.warnings)
        return f"{self.text}\n[{len(self.pieces)} tokens, {sum(piece.special for piece in self.pieces)} special]{notes}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        spans = "".join(map(_piece_html, self.pieces))
        notes = "".join(f'<div style="color:#b3261e">{html.escape(warning)}</div>' for warning in self.warnings)
        return (
            f'<div style="white-space:pre-wrap;font-family:monospace;line-height:1.5">{spans}</div>'
            f'<div style="opacity:.6;font-size:85%">{len(self.pieces)} tokens, {sum(p.special for p in self.pieces)} special</div>{notes}'
        )


def rendered(text: str, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]] = ()) -> Rendered:
    """Tokenise a prompt as `chat` does, and look for what goes wrong most often.

    Args:
        text: what the template made. tokenizer: of the model. messages: what it was made of.
    """
    ids = tokenizer.encode(text, add_special=False)
    special = {*tokenizer.skipped_ids, *tokenizer.eos_ids, *(() if tokenizer.bos_id is None else (tokenizer.bos_id,))}
    texts = token_texts(tokenizer, ids)
    pieces = tuple(Piece(i, tokenizer.piece(i) if i in special else shown, i in special) for i, shown in zip(ids, texts))
    return Rendered(text=text, pieces=pieces, warnings=tuple(_warnings(text, ids, tokenizer, messages)))


def _warnings(text: str, ids: list[int], tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    bos = tokenizer.bos_id
    if bos is not None:
        name, count = tokenizer.piece(bos), ids.count(bos)
        if ids[:2] == [bos, bos]:
            found.append(
                f"BOS is doubled: the prompt begins with {name!r} twice; the template writes it, and so does a message or the caller"
            )
        elif count > 1:
            found.append(f"BOS stands {count} times in the prompt; expected once, at its beginning")
        elif count == 1 and ids[0] != bos:
            found.append(f"BOS {name!r} stands inside the prompt and not at its beginning")
        elif not count and tokenizer.encode("a")[:1] == [bos]:
            found.append(f"the template writes no BOS, and this model's texts begin with {name!r}")
    marks = [tokenizer.piece(i) for i in tokenizer.skipped_ids]
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and (inside := [mark for mark in marks if mark and mark in content]):
            role = message.get("role")
            found.append(f"message {number} ({role}) holds special tokens as text: {', '.join(sorted(inside)[:4])}; they act as such")
    return found


def _piece_html(piece: Piece) -> str:
    text = html.escape(piece.text)
    if not piece.special:
        return f'<span title="{piece.id}">{text}</span>'
    line = "\n" if piece.text.endswith("\n") else ""
    return (
        f'<span title="{piece.id}" style="border:1px solid currentColor;border-radius:.3em;padding:0 .2em;opacity:.7">{text}</span>{line}'
    )

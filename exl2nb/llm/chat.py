"""Prompts of conversations: rendered with the chat template, checked, and shown token by token."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from exl2nb.core.errors import OptionError
from exl2nb.core.options import shown
from exl2nb.eval.score import token_texts
from exl2nb.tokenizer import chat as chat_format
from exl2nb.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from exl2nb.llm.conversation import Conversation

_OURS = ("messages", "source", "special_tokens", "add_generation_prompt", "tools")  # given to every template


class ChatMixin:
    """The part of `LLM` that renders prompts and starts conversations."""

    tokenizer: Tokenizer

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt of a conversation as text, with special tokens by name."""
        if not isinstance(template_options, (Mapping, type(None))):
            raise OptionError(f"template_options is {template_options!r}; expected a dict of the template's variables")
        if tools is not None and (not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools)):
            raise OptionError(f"tools is {str(tools)[:80]!r}; expected a list of JSON schemas of functions, as dicts")
        if wrong := [name for name in template_options or {} if not isinstance(name, str) or name in _OURS]:
            raise OptionError(f"template_options holds {shown(wrong[0])}; expected names of the template's own variables")
        talk = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        source = template if template is not None else self.tokenizer.templates.pick(tools=bool(tools))
        return chat_format.render(
            talk,
            source,
            special_tokens=self.tokenizer.special_tokens,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **(template_options or {}),
        )

    def render(self, messages: Sequence[Mapping[str, Any]] | str, **options: Any) -> Rendered:
        """The prompt a conversation becomes, token by token, with special tokens marked and warnings.

        Warnings: BOS doubled or missing, special tokens inside messages.

        Args:
            messages: dicts with "role" and "content", or one text from the user.
            options: template, tools, template_options, add_generation_prompt: as for `render_chat`.

        Raises:
            TokenizerError: the model has no chat template, or the template refuses the messages.

        Example:
            >>> import exl2nb as ex
            >>> with ex.demo(progress=None) as llm:
            ...     shown = llm.render("Hello", template="{{ bos_token }}{{ bos_token }}{{ messages[0].content }}")
            ...     shown.ids[:2], shown.warnings[0][:15]
            ([1, 1], 'BOS is doubled:')
        """
        talk = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return rendered(self.render_chat(talk, **options), self.tokenizer, talk)

    def conversation(self, *, system: str | None = None, **options: Any) -> Conversation:
        """A conversation with this model: a tree of turns with `say`, `edit`, `regenerate`, `goto`, `save`.

        Args:
            system: the system message.
            options: of every answer: those of `chat`.

        Raises:
            OptionError: an option that `chat` does not have, or a value out of range.
        """
        from exl2nb.llm.conversation import Conversation

        return Conversation(self, system=system, **options)  # pyright: ignore[reportArgumentType]

    def load_conversation(self, path: str | os.PathLike[str]) -> Conversation:
        """Resume a conversation that `Conversation.save` wrote.

        Raises:
            ConfigError: the file is no conversation, or is damaged.
        """
        from exl2nb.llm.conversation import Conversation

        return Conversation.load(self, path)  # pyright: ignore[reportArgumentType]


class Piece(NamedTuple):
    """One token of a prompt; special ones are shown by name."""

    id: int
    text: str
    special: bool


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The prompt of a conversation: text, tokens, and warnings."""

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
    """Tokenise a prompt as `chat` does, and check it for the common mistakes.

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
            found.append(f"BOS occurs {count} times in the prompt; expected once, at its start")
        elif count == 1 and ids[0] != bos:
            found.append(f"BOS {name!r} occurs inside the prompt and not at its start")
        elif not count and tokenizer.encode("a")[:1] == [bos]:
            found.append(f"the template writes no BOS, but this model's prompts start with {name!r}")
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

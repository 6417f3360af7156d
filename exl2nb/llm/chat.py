"""Prompts of conversations: rendered with the chat template, checked, and shown token by token."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from exl2nb.core.errors import ContextOverflow, OptionError
from exl2nb.core.options import check_flag, shown, spelled_out
from exl2nb.generator.engine import Engine
from exl2nb.llm.options import CHAT_DEFAULT_OPTIONS, ConversationOptions
from exl2nb.llm.pictures import take_pictures, with_parts
from exl2nb.llm.requests import STRUCTURES, check_length
from exl2nb.llm.sampling_defaults import with_defaults
from exl2nb.model.model import Model
from exl2nb.sampling.defaults import SamplingDefaults
from exl2nb.sampling.params import check_integer
from exl2nb.tokenizer import chat as chat_format
from exl2nb.tokenizer.detokenize import token_texts
from exl2nb.tokenizer.instruct import INSTRUCT
from exl2nb.tokenizer.reply import ReplyFormat, think_tags
from exl2nb.tokenizer.tokenizer import Tokenizer
from exl2nb.tokenizer.tools import Tool, tool_format, tools_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from exl2nb.llm.conversation import Conversation
    from exl2nb.model.vision.encoder import VisionEncoder
    from exl2nb.model.vision.pictures import Picture
    from exl2nb.model.vision.prompt import PromptPictures
    from exl2nb.sampling.replay import Draw

_OURS = ("messages", "source", "special_tokens", "add_generation_prompt", "tools")  # given to every template
FORMAT_OPTIONS = ("template", "tools", "template_options", "continue_final_message")
CHAT_OPTIONS = (*FORMAT_OPTIONS, "tool_choice", "parallel_tool_calls", "reasoning_budget", "generation_config")
_END = "\ue000end of the message\ue000"  # put behind a message that is continued, to find its end in the rendered prompt


class ChatMixin:
    """The part of `LLM` that renders prompts and starts conversations."""

    sampling_defaults: SamplingDefaults
    tokenizer: Tokenizer
    model: Model
    engine: Engine
    vision: VisionEncoder | None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt of a conversation as text, with special tokens by name; arguments as for `chat`.

        A picture is as many tokens as the model reads of it.
        """
        return self._render(
            messages,
            template=template,
            tools=tools,
            template_options=template_options,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )[0]

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> tuple[str, list[Picture]]:
        """`render_chat`, and the pictures in the prompt."""
        if not isinstance(template_options, (Mapping, type(None))):
            raise OptionError(f"template_options is {template_options!r}; expected a dict of the template's variables")
        if wrong := [name for name in template_options or {} if not isinstance(name, str) or name in _OURS]:
            raise OptionError(f"template_options holds {shown(wrong[0])}; expected names of the template's own variables")
        check_flag("continue_final_message", continue_final_message)
        checked = tools_of(tools) if tools is not None else ()
        source = self._source(template, checked)
        form = tool_format(source)
        talk, pictures = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages, []
        if self.vision is not None and isinstance(talk, (list, tuple)):
            talk, pictures = take_pictures(talk)
        talk = chat_format.text_messages(talk, parse_arguments=not form.text_arguments)
        if "tool" not in source:
            talk = chat_format.without_tool_turns(talk, form, checked, system="system" in source or "message.role" in source)
        if continue_final_message:
            if talk[-1]["role"] != "assistant":
                raise OptionError(f"continue_final_message: the last message is the {talk[-1]['role']}'s; expected one of the assistant")
            talk[-1]["content"] += _END
        if self.vision is not None:
            talk = with_parts(talk, pictures, source, self.vision, self.tokenizer)
        text = chat_format.render(
            talk,
            source,
            special_tokens=self.tokenizer.special_tokens,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            tools=[tool.json for tool in checked] or None,
            **(template_options or {}),
        )
        if continue_final_message and _END not in text:
            raise OptionError(
                "continue_final_message: the chat template leaves the assistant's last message out, so it cannot be continued"
            )
        text = text.rpartition(_END)[0] if continue_final_message else text
        if pictures and self.vision is not None:
            text = self.vision.expanded(text, pictures, self.tokenizer.piece)
        return text, pictures

    def chat_request(
        self, messages: Sequence[Mapping[str, Any]] | str, options: Mapping[str, Any], *, where: str
    ) -> tuple[list[int], dict[str, Any]]:
        """The prompt of a chat as token ids, and the options of the request that answers it.

        Args:
            messages: as for `chat`. options: its options. where: the public call, for messages.

        Raises:
            As `chat`.
        """
        options = with_defaults(options, self.sampling_defaults, where=where)
        chat = {name: options.pop(name) for name in CHAT_OPTIONS if name in options}
        choice, parallel = chat.get("tool_choice", "auto"), chat.get("parallel_tool_calls", True)
        if not isinstance(choice, str):
            raise OptionError(f"{where}: tool_choice is {shown(choice)}; expected 'auto', 'none', 'required' or the name of a function")
        check_flag(f"{where}: parallel_tool_calls", parallel)
        if choice == "none" or not chat.get("tools"):
            if choice not in ("none", "auto"):
                raise OptionError(f"{where}: tool_choice is {choice!r} and there are no tools; give tools=, or leave it out")
            chat.pop("tools", None)
        tools = tools_of(chat.get("tools") or ())
        text, pictures = self._render(messages, **{name: chat[name] for name in FORMAT_OPTIONS if name in chat})
        check_length(text, self.tokenizer, self.engine.context, where=where)
        source = self._source(chat.get("template"), tools)
        reply = reply_format(source, text, tools, self.tokenizer)
        if (named := chat.get("template")) in INSTRUCT:
            given = options.get("stop", ())
            options["stop"] = [*([given] if isinstance(given, (str, int)) else given), *INSTRUCT[named].stop]
        self._add_structure(options, reply, choice, parallel, where)
        if (budget := chat.get("reasoning_budget")) is not None:
            hooks = options.get("post_sampling", ())
            hook = ReasoningBudget(budget, reply, self.tokenizer)
            options["post_sampling"] = (*((hooks,) if callable(hooks) else hooks), hook)
        if not reply.plain:
            options["reply"] = reply
        ids = self.tokenizer.encode(text, add_special=False)
        if pictures:
            options["pictures"] = self._placed(ids, pictures)
        return ids, options

    def _placed(self, ids: list[int], pictures: list[Picture]) -> PromptPictures:
        """The pictures of a prompt, through the tower.

        Raises:
            ContextOverflow: the prompt is too long; no picture was encoded.
        """
        assert self.vision is not None, "only a model that sees has pictures in its prompts"
        if len(ids) >= self.engine.context:
            raise ContextOverflow(
                f"the prompt has {len(ids)} tokens, {sum(map(self.vision.tokens, pictures))} of them pictures', and the context is "
                f"{self.engine.context}; give smaller or fewer pictures, or load the model with a larger context"
            )
        config = self.model.config
        return self.vision.placed(ids, pictures, whole=config.sees_whole, axes=config.mrope is not None)

    def _source(self, template: str | None, tools: Sequence[Tool]) -> str:
        """The Jinja source of a template: given, the name of an instruct format, or the model's own."""
        if template is None:
            return self.tokenizer.templates.pick(tools=bool(tools))
        if not isinstance(template, str):
            raise OptionError(
                f"template is {str(template)[:80]!r}; expected a text, the template's Jinja source, or one of {', '.join(INSTRUCT)}"
            )
        return INSTRUCT[template].source if template in INSTRUCT else template

    def _add_structure(self, options: dict[str, Any], reply: ReplyFormat, choice: str, parallel: bool, where: str) -> None:
        """Put what the answer must look like into the options: calls that fit their schemas, or a structure behind the reasoning."""
        vocab_size, kinds = self.model.config.vocab_size, [kind for kind in STRUCTURES if options.get(kind) is not None]
        if reply.calls is not None:
            if kinds:
                raise OptionError(f"{where}: tools and {kinds[0]} exclude each other; leave one out, or give tool_choice='none'")
            from exl2nb.constraint.reply import call_structure

            options["structure"] = call_structure(reply, choice, self.tokenizer, vocab_size, parallel=parallel)
        elif reply.thinking and len(kinds) == 1:
            from exl2nb.constraint.reply import behind_reasoning

            options["structure"] = behind_reasoning(kinds[0], options.pop(kinds[0]), reply, self.tokenizer, vocab_size)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Rendered:
        """The prompt a conversation becomes, token by token, with special tokens marked and warnings.

        Warnings: BOS doubled or missing, special tokens inside messages.

        Args:
            messages: dicts with "role" and "content", or one text from the user.
            template, tools, template_options, add_generation_prompt, continue_final_message: as for `render_chat`.

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
        text = self.render_chat(
            talk, template=template, tools=tools, template_options=template_options, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )  # fmt: skip
        return rendered(text, self.tokenizer, talk)

    @spelled_out(ConversationOptions, CHAT_DEFAULT_OPTIONS)
    def conversation(self, *, system: str | None = None, **options: Unpack[ConversationOptions]) -> Conversation:
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


def reply_format(source: str, prompt: str, tools: Sequence[Tool], tokenizer: Tokenizer) -> ReplyFormat:
    """How the answer to a prompt is read, by the family that its chat template is for.

    Args:
        source: the template. prompt: what it made. tools: that the model may call.
    """
    think, calls = think_tags(source), tool_format(source) if tools else None
    special = {}
    for tag in (*(calls.tags if calls is not None else ()), *(think or ())):
        if (token := tokenizer.token_id(tag)) is not None and token in tokenizer.skipped_ids:
            special[token] = tag
    thinking = think is not None and prompt.rfind(think[0]) > prompt.rfind(think[1])
    return ReplyFormat(calls=calls, tools=tuple(tools), think=think, thinking=thinking, special=special)


class ReasoningBudget:
    """A `post_sampling` function that ends the reasoning of one answer after so many tokens.

    Args:
        budget: tokens; 0 ends it at once.
        reply: how the answer is read.

    Raises:
        OptionError: the chat template knows no reasoning.
    """

    def __init__(self, budget: int, reply: ReplyFormat, tokenizer: Tokenizer) -> None:
        check_integer("reasoning_budget", budget, 0, 2**31 - 1)
        if reply.think is None:
            raise OptionError("reasoning_budget: this model's chat template knows no reasoning; leave it out")
        self._budget, self._reply, self._tokenizer = budget, reply, tokenizer
        self._closing = tokenizer.encode(f"\n{reply.think[1]}\n\n", add_special=False)
        self._ids: list[int] = []  # as drawn; an answer may go back, and is then drawn again from an earlier place
        self._begun = 0 if reply.thinking else -1  # where the reasoning begins
        self._over_at: int | None = None

    def __call__(self, draw: Draw) -> int | None:
        """Another token where the reasoning has to end."""
        del self._ids[draw.index :]
        if self._over_at is not None and draw.index > self._over_at:
            return None
        self._over_at = None
        chosen = self._forced(draw.index)
        self._ids.append(draw.id if chosen is None else chosen)
        self._look(draw.index)
        return chosen

    def _forced(self, index: int) -> int | None:
        at = index - self._begun - self._budget
        return self._closing[at] if self._begun >= 0 and 0 <= at < len(self._closing) else None

    def _look(self, index: int) -> None:
        """Whether the reasoning begins or ends with this token."""
        assert self._reply.think is not None
        opens, closes = self._reply.think
        if self._begun > index:
            self._begun = -1
        if self._begun < 0:
            text = self._tokenizer.decode(self._ids, skip_special=False).lstrip()
            if text.startswith(opens):
                self._begun = index + 1
            elif not opens.startswith(text):
                self._over_at = index  # the model answers at once
        elif index < self._begun + self._budget:
            if closes in self._tokenizer.decode(self._ids[-16:], skip_special=False):
                self._over_at = index
        elif index >= self._begun + self._budget + len(self._closing) - 1:
            self._over_at = index


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

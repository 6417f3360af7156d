"""Prompts of conversations: rendered with the chat template, checked, and shown token by token."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from exl2nb.core.errors import ContextOverflow, OptionError, TokenizerError
from exl2nb.core.files import read_text
from exl2nb.core.log import warn
from exl2nb.core.options import check_flag, shown, spelled_out
from exl2nb.generator.engine import Engine
from exl2nb.llm.request_options import CHAT_DEFAULT_OPTIONS, ConversationOptions
from exl2nb.llm.requests import STRUCTURE_OPTIONS, check_length, take_pictures, with_parts
from exl2nb.llm.sampling_defaults import with_defaults
from exl2nb.model.model import Model
from exl2nb.sampling.defaults import SamplingDefaults
from exl2nb.sampling.params import check_integer
from exl2nb.tokenizer.detokenize import token_texts
from exl2nb.tokenizer.literal import LITERAL_MARK, control_pattern, unescaped, without_marks
from exl2nb.tokenizer.messages import shape_messages, typed_messages
from exl2nb.tokenizer.reply import ReplyFormat, think_tags
from exl2nb.tokenizer.template import INSTRUCT_TEMPLATES, MAX_TEMPLATE, ChatTemplate
from exl2nb.tokenizer.tokenizer import Tokenizer
from exl2nb.tokenizer.tools import Tool, tool_format, tools_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from exl2nb.llm.conversation import Conversation
    from exl2nb.model.vision.encoder import VisionEncoder
    from exl2nb.model.vision.pictures import Picture
    from exl2nb.model.vision.prompt import PromptPictures
    from exl2nb.sampling.replay import Draw

_RESERVED_VARIABLES = ("messages", "source", "template", "special_tokens", "add_generation_prompt", "tools")  # given to every template
FORMAT_OPTIONS = ("template", "tools", "template_options", "continue_final_message")
CHAT_OPTIONS = (*FORMAT_OPTIONS, "tool_choice", "parallel_tool_calls", "reasoning_budget", "generation_config")
_TAG_PATTERN = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")  # an added token of this form is no word and no white space
_END_MARK = "\ue000end of the message\ue000"  # put behind a message that is continued, to find its end in the rendered prompt


class ChatMixin:
    """The part of `LLM` that renders prompts and starts conversations."""

    sampling_defaults: SamplingDefaults
    tokenizer: Tokenizer
    model: Model
    engine: Engine
    vision: VisionEncoder | None
    _warned: set[str]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        template: str | os.PathLike[str] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt of a conversation as text, with special tokens by name; arguments as for `chat`.

        A picture is as many tokens as the model reads of it.
        """
        prompt = self._render(
            messages,
            template=template,
            tools=tools,
            template_options=template_options,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return without_marks(prompt.text)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        template: str | os.PathLike[str] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> _Prompt:
        """The prompt of a conversation; arguments as for `chat`."""
        if not isinstance(template_options, (Mapping, type(None))):
            raise OptionError(f"template_options is {template_options!r}; expected a dict of the template's variables")
        if wrong := [name for name in template_options or {} if not isinstance(name, str) or name in _RESERVED_VARIABLES]:
            raise OptionError(f"template_options holds {shown(wrong[0])}; expected names of the template's own variables")
        check_flag("continue_final_message", continue_final_message)
        checked = tools_of(tools) if tools is not None else ()
        chosen = self._template(template, checked)
        form = chosen.form if checked else tool_format(chosen.source)
        talk, pictures = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages, []
        if self.vision is not None and isinstance(talk, (list, tuple)):
            talk, pictures = take_pictures(talk)
        shaped = shape_messages(talk, chosen, form, checked, control=self._control(chosen), special=self._special)
        made = shaped.messages
        if continue_final_message:
            if made[-1]["role"] != "assistant":
                raise OptionError(f"continue_final_message: the last message is the {made[-1]['role']}'s; expected one of the assistant")
            made[-1]["content"] = (made[-1]["content"] or "") + _END_MARK
        if self.vision is not None:
            made = with_parts(made, pictures, chosen.source, self.vision, self.tokenizer)
        if chosen.typed:
            made = typed_messages(made)
        variables = {**shaped.variables, **(template_options or {})}
        begins = add_generation_prompt and not continue_final_message
        text = chosen.render(made, add_generation_prompt=begins, **variables)
        text = unescaped(text) if LITERAL_MARK in str(made) else text
        opening = ""  # what the template writes of the answer itself
        if continue_final_message:
            if _END_MARK not in text:
                raise OptionError(
                    "continue_final_message: the chat template leaves the assistant's last message out, so it cannot be continued"
                )
            text = text.rpartition(_END_MARK)[0]
            opening = without_marks(_content_text(made[-1]["content"]).replace(_END_MARK, ""))
        elif begins and think_tags(chosen.source) is not None:
            opening = _generation_prompt(text, chosen, made, variables)
        if pictures and self.vision is not None:
            text = self.vision.expanded(text, pictures, self.tokenizer.piece)
        return _Prompt(text, opening, chosen, pictures)

    def chat_request(
        self, messages: Sequence[Mapping[str, Any]] | str, options: Mapping[str, Any], *, where: str
    ) -> tuple[list[int], dict[str, Any]]:
        """The prompt of a chat as token ids, and the options of the request that answers it.

        Args:
            messages: as for `chat`.
            options: those of `chat`.
            where: the public call, for messages.

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
        prompt = self._render(messages, **{name: chat[name] for name in FORMAT_OPTIONS if name in chat})
        check_length(prompt.text, self.tokenizer, self.engine.context, where=where)
        reply = reply_format(prompt.template, prompt.opening, tools, self.tokenizer)
        self._add_stops(options, prompt.template, chat.get("template"))
        self._add_structure(options, reply, choice, parallel, where)
        if (budget := chat.get("reasoning_budget")) is not None:
            hooks = options.get("post_sampling", ())
            hook = ReasoningBudget(budget, reply, self.tokenizer)
            options["post_sampling"] = (*((hooks,) if callable(hooks) else hooks), hook)
        if not reply.plain:
            options["reply"] = reply
        ids = self.tokenizer.encode_chat(prompt.text)
        if prompt.pictures:
            options["pictures"] = self._placed(ids, prompt.pictures)
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

    def _template(self, template: str | os.PathLike[str] | None, tools: Sequence[Tool]) -> ChatTemplate:
        """The template that was asked for: Jinja source, a file of it, the name of an instruct format, or the model's own."""
        special = self.tokenizer.special_tokens
        if template is None:
            return ChatTemplate.of(self.tokenizer.templates.pick(tools=bool(tools)), special)
        if isinstance(template, str) and template in INSTRUCT_TEMPLATES:
            bos_id = self.tokenizer.bos_id if self.tokenizer.begins_with_bos else None
            bos_text = "" if bos_id is None else self.tokenizer.piece(bos_id)
            return ChatTemplate.of(INSTRUCT_TEMPLATES[template].source, {**special, "bos_token": bos_text})
        expected = f"expected Jinja source, a file of it, or one of {', '.join(INSTRUCT_TEMPLATES)}"
        if not isinstance(template, (str, os.PathLike)):
            raise OptionError(f"template is {str(template)[:80]!r}; {expected}")
        if isinstance(template, str) and ("{" in template or not template.strip()):
            return ChatTemplate.of(template, special)
        path = Path(template)
        if not _is_file(path):  # a text without any brace would be the whole prompt, whatever the messages say
            raise OptionError(f"template is {str(template)[:80]!r}, which is no file and no Jinja source; {expected}")
        return ChatTemplate.of(read_text(path, 4 * MAX_TEMPLATE), special)

    def _control(self, template: ChatTemplate) -> re.Pattern[str] | None:
        """A pattern for the texts of control tokens, which stay text in the messages of users and tools.

        These are the special tokens, and of the other added tokens those that the template or the format of calls uses. An added token
        that is neither, such as an HTML tag, is part of ordinary text.
        """
        tokenizer = self.tokenizer
        key = id(tokenizer), template.source
        if key not in _control_patterns:
            form, think = tool_format(template.source), think_tags(template.source)
            tags = {*form.tags, *(think or ())}
            special = tokenizer.special_texts.values()
            used = [text for text in tokenizer.added_texts if text in tags or (len(text) > 2 and text in template.source)]
            if len(_control_patterns) > 64:
                _control_patterns.clear()
            _control_patterns[key] = tokenizer, control_pattern([*special, *used])
        return _control_patterns[key][1]

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        """A pattern for the texts of special tokens."""
        return control_pattern(self.tokenizer.special_texts.values())

    def _add_stops(self, options: dict[str, Any], template: ChatTemplate, named: Any) -> None:
        """Add what ends an answer beside the model's end tokens: the stops of an instruct format, or the template's own end of turn."""
        named_format = INSTRUCT_TEMPLATES.get(named) if isinstance(named, str) else None
        stops: list[str | int] = list(named_format.stop) if named_format is not None else []
        ends, asked = turn_ends(template, self.tokenizer, self.model.config.vocab_size)
        if options.get("ignore_eos") is not True:
            stops += ends
        if asked and named_format is None and asked not in self._warned:
            self._warned.add(asked)
            warn(asked)
        if stops:
            given = options.get("stop", ())
            options["stop"] = [*([given] if isinstance(given, (str, int)) else given or ()), *stops]

    def _add_structure(self, options: dict[str, Any], reply: ReplyFormat, choice: str, parallel: bool, where: str) -> None:
        """Put what the answer must look like into the options: calls that fit their schemas, or a structure behind the reasoning."""
        vocab_size, kinds = self.model.config.vocab_size, [kind for kind in STRUCTURE_OPTIONS if options.get(kind) is not None]
        if reply.calls is not None:
            if kinds:
                raise OptionError(f"{where}: tools and {kinds[0]} exclude each other; leave one out, or give tool_choice='none'")
            from exl2nb.constraint.reply_grammar import call_structure

            options["structure"], notes = call_structure(reply, choice, self.tokenizer, vocab_size, parallel=parallel)
            for note in notes:
                warn(f"{where}: {note}")
        elif len(kinds) == 1 and (reply.channels or (reply.think is not None and (reply.thinking or kinds[0] != "grammar"))):
            from exl2nb.constraint.reply_grammar import behind_reasoning

            options["structure"] = behind_reasoning(kinds[0], options.pop(kinds[0]), reply, self.tokenizer, vocab_size)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        template: str | os.PathLike[str] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Rendered:
        """The prompt a conversation becomes, token by token, with special tokens marked and warnings.

        Warnings: BOS doubled or missing, special tokens inside messages, an end of turn that is no end token of the model.

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
        prompt = self._render(
            talk, template=template, tools=tools, template_options=template_options, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )  # fmt: skip
        _, note = turn_ends(prompt.template, self.tokenizer, self.model.config.vocab_size)
        made = rendered(prompt.text, self.tokenizer, talk)
        return replace(made, warnings=(*made.warnings, note)) if note else made

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


class _Prompt(NamedTuple):
    """A rendered conversation.

    text: The prompt, with the marks of `literal`. opening: What of it belongs to the answer already. template: What rendered it.
    pictures: Those in the prompt.
    """

    text: str
    opening: str
    template: ChatTemplate
    pictures: list[Picture]


_control_patterns: dict[tuple[int, str], tuple[Tokenizer, re.Pattern[str] | None]] = {}  # the tokenizer is kept, so its id stays its own


def _generation_prompt(text: str, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The end of a prompt that the template adds to make the model answer: no word of a message is in it.

    Args:
        text: The prompt.
        template: What rendered it.
        messages: The messages as the template got them.
        variables: What it got beside them.
    """
    try:
        without = unescaped(template.render(messages, add_generation_prompt=False, **variables))
    except TokenizerError:  # some templates refuse to render without it
        without = text
    if without != text:
        return text[_common_length(text, without) :]
    content = messages[-1].get("content")  # the template adds it always, so look behind the last message
    if isinstance(content, str):
        try:
            marked = template.render([*messages[:-1], {**messages[-1], "content": content + _END_MARK}], **variables)
        except TokenizerError:
            return ""
        return marked.rpartition(_END_MARK)[2]
    return ""


def _common_length(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _content_text(content: Any) -> str:
    """The words of a content, given as text or as parts."""
    if isinstance(content, str):
        return content
    return "".join([part.get("text", "") for part in content or () if isinstance(part, Mapping)])


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or has a zero byte
        return False


def turn_ends(template: ChatTemplate, tokenizer: Tokenizer, vocab_size: int) -> tuple[list[int], str]:
    """The tokens that end an answer in this template although no file of the model names them as end tokens, and a warning about it.

    Args:
        template: The chat template.
        tokenizer: Of the model.
        vocab_size: Tokens that the model can draw.

    Returns:
        Ids, and the warning; "" where nothing is amiss.
    """
    form = tool_format(template.source)
    known = {tokenizer.piece(i) for i in tokenizer.eos_ids}
    ids = [tokenizer.token_id(text) for text in form.ends if text not in known]
    ends, note = [i for i in ids if i is not None and i < vocab_size], ""
    end = template.turn_end
    if not any(text and text in end for text in known):
        marks = {*tokenizer.special_texts.values(), *(text for text in tokenizer.added_texts if _TAG_PATTERN.fullmatch(text))}
        places = [(end.find(text), -len(text), text) for text in marks if text in end]
        text = min(places)[2] if places else ""
        found = tokenizer.token_id(text) if text else None
        if found is not None and found < vocab_size and found != tokenizer.bos_id:
            ends.append(found)
            note = (
                f"the chat template ends a turn with {text!r}, which no file of the model names as an end token "
                f"({', '.join(sorted(map(repr, known))) or 'it names none'}); answers stop there. To be rid of this warning, add {found} "
                "to eos_token_id in generation_config.json"
            )
    return ends, note


def reply_format(template: ChatTemplate, opening: str, tools: Sequence[Tool], tokenizer: Tokenizer) -> ReplyFormat:
    """How the answer to a prompt is read, by the family that its chat template is for.

    Args:
        template: The chat template.
        opening: What of the prompt belongs to the answer already.
        tools: Functions that the model may call.
        tokenizer: Of the model.
    """
    think = think_tags(template.source)
    channels = tool_format(template.source).layout == "harmony"
    opens, closes = (-1, -1) if think is None else map(opening.rfind, think)
    made = ReplyFormat(
        calls=template.form if tools else None, tools=tuple(tools), think=think, thinking=opens > closes, thought=closes > opens,
        channels=channels,
    )  # fmt: skip
    return replace(made, special=tokenizer.special_in(made.tags))


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
        self._closing = tokenizer.encode(reply.closing, add_special=False)
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


class PromptToken(NamedTuple):
    """One token of a prompt; special ones are shown by name."""

    id: int
    text: str
    special: bool


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The prompt of a conversation: text, tokens, and warnings."""

    text: str
    pieces: tuple[PromptToken, ...]
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
    ids = tokenizer.encode_chat(text)
    special = {*tokenizer.skipped_ids, *tokenizer.eos_ids, *(() if tokenizer.bos_id is None else (tokenizer.bos_id,))}
    texts = token_texts(tokenizer, ids)
    pieces = tuple(PromptToken(i, tokenizer.piece(i) if i in special else shown, i in special) for i, shown in zip(ids, texts))
    return Rendered(text=without_marks(text), pieces=pieces, warnings=tuple(_warnings(ids, tokenizer, messages)))


def _warnings(ids: list[int], tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    bos = tokenizer.bos_id
    if bos is not None:
        name = tokenizer.piece(bos)
        if ids[:2] == [bos, bos]:
            found.append(f"BOS is doubled: the prompt begins with {name!r} twice; the template writes it twice, or the caller added one")
        elif bos in ids and ids[0] != bos:
            found.append(f"BOS {name!r} occurs inside the prompt and not at its start")
        elif bos not in ids and tokenizer.begins_with_bos:
            found.append(f"the template writes no BOS, but this model's prompts start with {name!r}")
    for number, message in enumerate(messages):
        role, content = message.get("role"), _content_text(message.get("content")) if message.get("content") else ""
        if inside := [mark for mark in tokenizer.special_texts.values() if mark and mark in content]:
            effect = "the model reads them as text" if role in ("user", "tool", "function") else "they act as such"
            found.append(f"message {number} ({role}) holds special tokens as text: {', '.join(sorted(inside)[:4])}; {effect}")
    return found


def _piece_html(piece: PromptToken) -> str:
    text = html.escape(piece.text)
    if not piece.special:
        return f'<span title="{piece.id}">{text}</span>'
    line = "\n" if piece.text.endswith("\n") else ""
    return (
        f'<span title="{piece.id}" style="border:1px solid currentColor;border-radius:.3em;padding:0 .2em;opacity:.7">{text}</span>{line}'
    )

"""A conversation as a tree of turns: say, edit, branch, answer again, save; branches share cached pages of their common prefix."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl2nb.core.errors import ConfigError, OptionError
from exl2nb.core.files import read_regular
from exl2nb.core.options import check_flag, check_path, spelled_out
from exl2nb.generator.handle import Handle
from exl2nb.generator.request import Chunk, Completion, Request
from exl2nb.io.atomic import atomic_write
from exl2nb.llm.request_options import CHAT_DEFAULT_OPTIONS, ConversationOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from exl2nb.llm.chat_prompt import Rendered
    from exl2nb.llm.llm import LLM

MESSAGE_ROLES = ("system", "user", "assistant", "tool")
FILE_FORMAT = "exl2nb-conversation"
FILE_VERSION = 1
MAX_TURNS = 100_000
PNG_URL_PREFIX = "data:image/png;base64,"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One message.

    id: number within the conversation, in order of making. parent: the turn it answers, None for the first. content: what was said.
    Of a generated turn: seed, finish_reason, reasoning (what the model thought before it spoke) and tool_calls (what it wants to be called,
    as OpenAI's messages have it); None = nothing. images: data URLs of the pictures that were shown with it.
    """

    id: int
    parent: int | None
    role: str
    content: str
    finish_reason: str | None = None
    seed: int | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    images: list[str] | None = None

    @property
    def message(self) -> dict[str, Any]:
        """As chat templates read it."""
        more = {"reasoning_content": self.reasoning, "tool_calls": self.tool_calls}
        content: Any = self.content
        if self.images:
            content = [*({"type": "image", "image": url} for url in self.images), {"type": "text", "text": self.content}]
        return {"role": self.role, "content": content, **{name: value for name, value in more.items() if value}}

    @property
    def calls(self) -> list[str]:
        """The calls as text, such as 'add({"a": 1})'."""
        return [f"{call['function']['name']}({call['function']['arguments']})" for call in self.tool_calls or ()]

    def __str__(self) -> str:
        return self.content


class Tree:
    """Turns by id. A turn never changes; an edit adds a sibling.

    Example:
        >>> tree = Tree()
        >>> hello = tree.add(None, "user", "Hello"); answer = tree.add(hello.id, "assistant", "Good day")
        >>> other = tree.add(None, "user", "Good morning")
        >>> [turn.content for turn in tree.path(answer.id)], len(tree.children(None))
        (['Hello', 'Good day'], 2)
    """

    def __init__(self) -> None:
        self._turns: dict[int, Turn] = {}
        self._children: dict[int | None, list[int]] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._turns.values())

    def __getitem__(self, number: int) -> Turn:
        if number not in self._turns:
            raise OptionError(f"conversation: no turn {number!r}; expected one of 0 to {len(self) - 1}")
        return self._turns[number]

    def add(self, parent: int | None, role: str, content: str, **details: Any) -> Turn:
        """Add a turn after another one."""
        return self._put(Turn(id=len(self._turns), parent=parent, role=role, content=content, **details))

    def children(self, parent: int | None) -> list[Turn]:
        """What answers a turn; None: the first turns."""
        return [self._turns[i] for i in self._children.get(parent, [])]

    def path(self, last: int | None) -> list[Turn]:
        """From the first turn to this one."""
        found: list[Turn] = []
        while last is not None:
            found.append(self[last])
            last = found[-1].parent
        return found[::-1]

    def _put(self, turn: Turn) -> Turn:
        self._turns[turn.id] = turn
        self._children.setdefault(turn.parent, []).append(turn.id)
        return turn

    # ---- JSON

    def to_json(self) -> list[dict[str, Any]]:
        """The turns as plain data, in order of making."""
        return [{name: value for name, value in asdict(turn).items() if value is not None or name not in _OPTIONAL_FIELDS} for turn in self]

    @classmethod
    def from_json(cls, value: Any, *, where: str) -> Tree:
        """Read turns back.

        Raises:
            ConfigError: names the turn, the field, what was found and what was expected.
        """
        if not isinstance(value, list) or len(value) > MAX_TURNS:
            raise ConfigError(f"{where}: turns is {str(value)[:60]!r}; expected a list of at most {MAX_TURNS} turns")
        tree = cls()
        for number, raw in enumerate(value):
            tree._put(_turn(raw, number, f"{where}: turn {number}"))
        return tree


_OPTIONAL_FIELDS = ("reasoning", "tool_calls", "images")  # written only where there are any: earlier versions of the library read the rest


def _turn(raw: Any, number: int, where: str) -> Turn:
    names = [f.name for f in fields(Turn)]
    if not isinstance(raw, dict) or not set(raw) <= set(names):
        raise ConfigError(f"{where} is {str(raw)[:80]!r}; expected an object with {', '.join(names)}")
    parent = raw.get("parent")
    checks = (
        ("id", raw.get("id") == number and not isinstance(raw.get("id"), bool), f"{number}: turns are numbered in order"),
        ("parent", "parent" in raw and (parent is None or (_integer(parent) and 0 <= parent < number)), "null or an earlier turn"),
        ("role", raw.get("role") in MESSAGE_ROLES, f"one of {', '.join(MESSAGE_ROLES)}"),
        ("content", isinstance(raw.get("content"), str), "a text"),
        ("finish_reason", isinstance(raw.get("finish_reason"), (str, type(None))), "a text or null"),
        ("seed", raw.get("seed") is None or _integer(raw["seed"]), "a number or null"),
        ("reasoning", isinstance(raw.get("reasoning"), (str, type(None))), "a text or null"),
        ("images", _are_images(raw.get("images")), "null, or a list of data URLs of PNG files"),
        ("tool_calls", _are_calls(raw.get("tool_calls")), "null, or a list of objects with id, type and function: {name, arguments}"),
    )
    for name, fine, expected in checks:
        if not fine:
            raise ConfigError(f"{where}: {name} is {str(raw.get(name))[:60]!r}; expected {expected}")
    return Turn(**raw)


def _are_images(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(url, str) and url.startswith(PNG_URL_PREFIX) for url in value))


def _are_calls(value: Any) -> bool:
    return value is None or (
        isinstance(value, list)
        and all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in value)
        and all(isinstance(call["function"].get(name), str) for call in value for name in ("name", "arguments"))
    )


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


MAX_BYTES = 256 << 20
FORMAT_OPTIONS = ("template", "tools", "template_options")
_CHAT_OPTIONS = (*FORMAT_OPTIONS, "tool_choice", "parallel_tool_calls", "reasoning_budget", "generation_config")


class Conversation:
    r"""Turns with one model. Made by `llm.conversation()`.

    `say` continues after the current turn (`head`). `edit` adds a sibling of an old turn, `regenerate` a sibling of an answer, `goto` makes
    any turn the current one; no turn is deleted. Branches reuse the KV cache pages of their common prefix until these are evicted.

    Args:
        llm: the model.
        system: the system message.
        options: of every answer: those of `llm.chat`.

    Example:
        >>> import exl2nb as ex
        >>> with ex.demo(progress=None) as llm:
        ...     talk = llm.conversation(template="{% for m in messages %}{{ m.content }}\n{% endfor %}", max_tokens=4, temperature=0)
        ...     first = talk.say("It was a dark night.")
        ...     other = talk.edit(talk.turns[0], "The old man went home.")
        ...     len(talk.tree), len(talk.turns), talk.siblings(talk.turns[0])[0].content
        (4, 2, 'It was a dark night.')
    """

    @spelled_out(ConversationOptions, CHAT_DEFAULT_OPTIONS)
    def __init__(self, llm: LLM, *, system: str | None = None, **options: Unpack[ConversationOptions]) -> None:
        self._llm = llm
        self.options = _checked(options)
        self.tree = Tree()
        self.head: Turn | None = None
        if system is not None:
            self.head = self.tree.add(None, "system", _text(system, "system"))

    # ---- turns

    @property
    def turns(self) -> list[Turn]:
        """From the first turn to the current one."""
        return self.tree.path(None if self.head is None else self.head.id)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The same as chat templates read it."""
        return [turn.message for turn in self.turns]

    def siblings(self, turn: Turn) -> list[Turn]:
        """The versions of a turn, itself included, in order of making."""
        return self.tree.children(self._own(turn).parent)

    def render(self) -> Rendered:
        """The prompt that the next answer would continue."""
        return self._llm.render(self.messages, **{name: value for name, value in self.options.items() if name in FORMAT_OPTIONS})

    # ---- actions

    def say(self, text: str, *, images: Sequence[Any] = (), stream: bool = False, role: str = "user", **options: Any) -> Any:
        """Send a message and get the answer.

        Args:
            text: what is said.
            images: pictures that are shown with it, as the parts of `llm.chat`; only a model that sees takes them.
            stream: give an `Answer` to iterate instead of the finished turn.
            role: "user", or "tool" for what a function returned.
            options: of this answer, added to those of the conversation.

        Returns:
            The assistant's `Turn`, or an `Answer`.

        Raises:
            As `llm.chat`. What was said stays: `reply` generates the answer again, `say` adds another turn in its place.
        """
        shown = images_of(images)
        head, parent = self.head, None if self.head is None else self.head.id
        if head is not None and head.role == role == "user" and not self.tree.children(head.id):  # refused: too long, say
            parent = head.parent
        self.head = self.tree.add(parent, role, _text(text, "text"), images=shown)
        return self.reply(stream=stream, **options)

    def reply(self, *, stream: bool = False, **options: Any) -> Any:
        """Answer the current turn."""
        if self.head is None or self.head.role not in ("user", "tool"):
            said = "nothing was said" if self.head is None else f"the current turn is the {self.head.role}'s"
            raise OptionError(f"reply: {said}; say() something first, or regenerate() an answer")
        parent = self.head
        made = self._llm.chat(self.messages, stream=True, **{**self.options, **_checked(options)})
        answer = Answer(self, parent, made)
        return answer if stream else answer.turn()

    def regenerate(self, turn: Turn | None = None, *, stream: bool = False, **options: Any) -> Any:
        """Another answer, a sibling of the current turn or of the one given."""
        turn = self.head if turn is None else self._own(turn)
        if turn is None or turn.role != "assistant" or turn.parent is None:
            raise OptionError("regenerate: expected an assistant's turn; reply() answers what was said last")
        self.head = self.tree[turn.parent]
        return self.reply(stream=stream, **options)

    def edit(self, turn: Turn, text: str, *, stream: bool = False, answer: bool = True, **options: Any) -> Any:
        """Another version of a turn, as its sibling.

        Args:
            turn: any turn of this conversation.
            text: what it says instead.
            stream: as in `say`.
            answer: False: do not answer it. An assistant's turn is never answered.
            options: as in `say`.

        Returns:
            The answer, as `say`; or the new turn where it is not answered.
        """
        turn = self._own(turn)
        self.head = self.tree.add(turn.parent, turn.role, _text(text, "text"), images=turn.images)
        if not answer or turn.role not in ("user", "tool"):
            return self.head
        return self.reply(stream=stream, **options)

    def goto(self, turn: Turn | None) -> Turn | None:
        """Make a turn the current one; the next message branches off there. None: the start."""
        self.head = None if turn is None else self._own(turn)
        return self.head

    branch = goto

    def answered(self, parent: Turn, completion: Completion) -> Turn:
        """Add an answer; it becomes the current turn."""
        reply = completion.reply
        self.head = self.tree.add(
            parent.id,
            "assistant",
            reply.content,
            finish_reason=completion.finish_reason,
            seed=completion.seed,
            reasoning=reply.reasoning or None,
            tool_calls=[call.json for call in reply.tool_calls] or None,
        )
        return self.head

    # ---- JSON

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all branches as JSON.

        Raises:
            OptionError: an option that is no plain data; `path` is no path. ConversionError: the file cannot be written.
        """
        check_path("Conversation.save: path", path)
        value = {
            "format": FILE_FORMAT,
            "version": FILE_VERSION,
            "head": None if self.head is None else self.head.id,
            "options": self.options,
            "turns": self.tree.to_json(),
        }
        try:
            text = json.dumps(value, ensure_ascii=False, indent=1)
        except TypeError as error:
            raise OptionError(f"save: an option of the conversation is not plain data ({error}); give it to say() instead") from error
        with atomic_write(path) as file:
            file.write(text.encode())

    @classmethod
    def load(cls, llm: LLM, path: str | os.PathLike[str]) -> Conversation:
        """Read a conversation that was saved, to go on with this model.

        Raises:
            ConfigError: not a conversation, or damaged: names what was found and what was expected. OptionError: `path` is no path.
        """
        check_path("Conversation.load: path", path)
        value = _read(Path(path))
        made = cls(llm)
        try:
            made.options = _checked(value["options"])
        except OptionError as error:
            raise ConfigError(f"{path}: options: {error}") from error
        made.tree = Tree.from_json(value["turns"], where=str(path))
        head = value["head"]
        if head is not None and (isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < len(made.tree)):
            raise ConfigError(f"{path}: head is {str(head)[:60]!r}; expected null or a turn from 0 to {len(made.tree) - 1}")
        made.head = None if head is None else made.tree[head]
        return made

    # ---- text and HTML

    def __str__(self) -> str:
        lines = [f"{turn.role}{self._mark(turn)}: {' '.join([turn.content, *turn.calls]).strip()}" for turn in self.turns]
        return "\n".join(lines) or "(nothing was said)"

    def __repr__(self) -> str:
        branches = sum(not self.tree.children(turn.id) for turn in self.tree)
        return f"Conversation({len(self.turns)} turns, {len(self.tree)} in {branches} branches)"

    def _repr_html_(self) -> str:
        return conversation_html(self)

    def _mark(self, turn: Turn) -> str:
        versions = self.siblings(turn)
        return f" ({versions.index(turn) + 1}/{len(versions)})" if len(versions) > 1 else ""

    def _own(self, turn: Turn) -> Turn:
        if not isinstance(turn, Turn) or turn.id >= len(self.tree) or self.tree[turn.id] != turn:
            raise OptionError(f"conversation: {str(turn)[:60]!r} is no turn of it; take one of `turns` or of `tree`")
        return turn


class Answer(Iterator[Chunk]):
    """An answer in progress: iterate it for chunks. When complete or cancelled, it becomes the conversation's current turn."""

    def __init__(self, conversation: Conversation, parent: Turn, handle: Handle) -> None:
        self.handle = handle
        self._conversation, self._parent = conversation, parent
        self._turn: Turn | None = None

    def __iter__(self) -> Answer:
        return self

    def __next__(self) -> Chunk:
        try:
            return next(self.handle)
        except StopIteration:
            self.turn()
            raise

    def turn(self) -> Turn:
        """Wait for the answer and add it to the conversation."""
        if self._turn is None:
            self._turn = self._conversation.answered(self._parent, self.handle.result())
        return self._turn

    def cancel(self) -> Turn:
        """End it; what was said stays, with finish_reason "cancelled"."""
        self.handle.cancel()
        return self.turn()

    def __repr__(self) -> str:
        return f"Answer({self.handle!r})"


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise OptionError(f"conversation: {name} is {str(value)[:60]!r}; expected a text")
    return value


def _checked(options: Any) -> dict[str, Any]:
    """The options, refused here rather than at the first answer."""
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise OptionError(f"conversation: options is {str(options)[:60]!r}; expected options of llm.chat")
    from exl2nb.llm.requests import STRUCTURE_OPTIONS

    asked = {
        name: value for name, value in options.items() if name not in (*_CHAT_OPTIONS, *STRUCTURE_OPTIONS, "negative_prompt", "cfg_scale")
    }
    Request.of((0,), where="conversation", **asked)
    if not isinstance(options.get("template"), (str, type(None))):
        raise OptionError(f"conversation: template is {str(options['template'])[:60]!r}; expected Jinja source")
    check_flag("conversation: generation_config", options.get("generation_config", True))
    return dict(options)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = read_regular(path, MAX_BYTES)
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"{path}: more than {MAX_BYTES} bytes; expected at most as many: this is no conversation")
        value = json.loads(raw.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, numbers of thousands of digits
        raise ConfigError(f"{path}: cannot be read as a conversation ({error}); expected what Conversation.save wrote") from error
    names: Sequence[str] = ("format", "version", "head", "options", "turns")
    if not isinstance(value, dict) or set(value) != set(names) or value["format"] != FILE_FORMAT:
        raise ConfigError(f"{path}: is no conversation; expected an object with {', '.join(names)}, and format {FILE_FORMAT!r}")
    if value["version"] != FILE_VERSION:
        raise ConfigError(f"{path}: version {str(value['version'])[:20]} of the format; this library reads {FILE_VERSION}")
    return value


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
        f"{reasoning_html(turn.reasoning or '')}{images_html(turn.images)}"
        f'<div style="white-space:pre-wrap">{html.escape(turn.content)}</div>'
        f"{calls_html(turn.calls)}</div>"
    )


def reasoning_html(reasoning: str) -> str:
    """What a model thought, folded; no script. Nothing where there is none."""
    if not reasoning:
        return ""
    text = f'<div style="white-space:pre-wrap">{html.escape(reasoning)}</div>'
    return f'<details style="opacity:.7"><summary>Reasoning</summary>{text}</details>'


def images_of(images: Sequence[Any]) -> list[str] | None:
    """Pictures as the data URLs that a turn keeps; None: there are none.

    Raises:
        OptionError: no list. PictureError: a picture that cannot be used.
    """
    from exl2nb.model.vision.pictures import Picture

    if not isinstance(images, (list, tuple)):
        raise OptionError(f"images is {str(images)[:60]!r}; expected a list of pictures")
    return [Picture.of(image, where=f"images[{i}]").data_url for i, image in enumerate(images)] or None


def images_html(images: Sequence[str] | None) -> str:
    """The pictures of a turn, small, side by side."""
    style = "max-height:8rem;max-width:100%;margin:.2em"
    return "".join([f'<img alt="picture" src="{html.escape(url)}" style="{style}">' for url in images or ()])


def calls_html(calls: Sequence[str]) -> str:
    """Calls of functions, one under the other."""
    return "".join([f"<div>Tool calls <code>{html.escape(call)}</code></div>" for call in calls])

"""Chat mode of the Playground: a conversation whose turns may be edited, answered again and switched between."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import traitlets as t

from exl2nb.core.errors import GenerationError, OptionError
from exl2nb.tokenizer.reply import Reply
from exl2nb.widgets.protocol import ChatTurn, ShownPicture, Stats, Status, TokenItem
from exl2nb.widgets.tokens import items_of

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels

    from exl2nb.llm.conversation import Conversation, Turn
    from exl2nb.widgets.background import Background
    from exl2nb.widgets.feed import Feed

ROLE_LABELS = {"user": "You", "assistant": "Model", "system": "System", "tool": "Tool"}
"""Names of the roles in the script-free twin; chat.ts has the same."""
_STATIC_CHARACTERS = 2000
THUMBNAIL_PX = 160
"""Pixels of the longer side of a picture in a turn."""
PATCH_PX = 6
"""Patches smaller than this in a thumbnail are shown without their edges."""


class Chat:
    """The conversation, and the tokens of its answers. Moves its head; runs and draws nothing.

    Args:
        llm: the loaded model. template: Jinja source instead of the model's own; None: its own.
    """

    def __init__(self, llm: Any, template: str | None) -> None:
        from exl2nb.llm.conversation import Conversation  # here: it brings the generator along

        self._llm = llm
        self.conversation: Conversation = Conversation(llm, **({} if template is None else {"template": template}))
        self._answers: dict[int, tuple[list[TokenItem], Stats, str]] = {}
        self._back: Turn | None = None
        self._pictures: dict[str, ShownPicture] = {}

    @property
    def turns(self) -> list[ChatTurn]:
        """From the first turn to the current one."""
        found = []
        for turn in self.conversation.turns:
            versions = self.conversation.siblings(turn)
            shown = [self._shown(url) for url in turn.images or ()]
            place = versions.index(turn), len(versions)
            found.append(ChatTurn(turn.id, turn.role, turn.content, *place, turn.reasoning or "", turn.calls, shown))
        return found

    def _shown(self, url: str) -> ShownPicture:
        """A picture, small, and what the model reads of it."""
        if url not in self._pictures:
            from exl2nb.model.vision.pictures import Picture

            picture, vision = Picture.of(url), getattr(self._llm, "vision", None)
            note = f"{picture.size[0]} x {picture.size[1]} pixels"
            if vision is None:
                small = picture.frames[0].copy()
                small.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
            else:
                seen, tokens = vision.seen(picture), vision.tokens(picture)
                rows, columns = (size // vision.vision.merge for size in vision.grid(picture)[1:])
                size = "" if seen.size == picture.size else f", seen as {seen.width} x {seen.height}"
                note += f"{size} in {rows} x {columns} patches, {tokens} tokens"
                small = _with_patches(seen, rows, columns)
            self._pictures[url] = ShownPicture(Picture.of(small).data_url, note)
        return self._pictures[url]

    def say(self, text: str, images: Sequence[Any] = ()) -> None:
        """Add a message after the current turn; as its sibling if that one is a message without an answer."""
        from exl2nb.llm.conversation import images_of

        shown = images_of(images)
        talk, head = self.conversation, self.conversation.head
        parent = None if head is None else head.parent if head.role == "user" else head.id
        self._back, talk.head = None, talk.tree.add(parent, "user", _text(text), images=shown)

    def edit(self, number: int, text: str) -> None:
        """Add another version of a message as its sibling."""
        turn = self._turn(number, "user")
        self._back = None
        self.conversation.edit(turn, _text(text), answer=False)

    def again(self, number: int | None) -> None:
        """Go back to the message that an answer belongs to; None: the last answer, or the message that got none."""
        talk = self.conversation
        if number is None and talk.head is None:
            raise OptionError("again: there is no message yet; say() something first")
        turn = cast("Turn", talk.head) if number is None else self._turn(number)
        if turn.role == "assistant" and turn.parent is not None:
            self._back = talk.head
            talk.goto(talk.tree[turn.parent])
        elif turn.role == "user" and not talk.tree.children(turn.id):
            self._back = None
            talk.goto(turn)
        else:
            raise OptionError(f"again: turn {turn.id} is the {turn.role}'s; expected an answer, or a message without one")

    def go(self, number: int, index: int) -> None:
        """Show another version of a turn, with the latest turns that followed it."""
        versions = self.conversation.siblings(self._turn(number))
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(versions):
            raise OptionError(f"go: index is {str(index)[:40]!r}; turn {number} has versions 0 to {len(versions) - 1}")
        turn = versions[index]
        while after := self.conversation.tree.children(turn.id):
            turn = after[-1]
        self.conversation.goto(turn)

    def finish(self, reply: Reply, items: list[TokenItem], stats: Stats, reason: str, *, failed: bool) -> bool:
        """Add an answer, taken apart. One that failed before its first token is dropped: returns False, and the previous answer is back."""
        if failed and not items:
            self.conversation.goto(self._back or self.conversation.head)
            return False
        head = cast("Turn", self.conversation.head)
        completion = SimpleNamespace(reply=reply, finish_reason=reason or None, seed=None)
        made = self.conversation.answered(head, cast("Any", completion))
        self._answers[made.id] = (items, stats, reason)
        return True

    def answer(self) -> tuple[list[TokenItem], Stats, str]:
        """Tokens, speed and end of the answer that is the current turn; nothing where that is a message."""
        head = self.conversation.head
        if head is None or head.role != "assistant":
            return [], Stats(n=0, tps=0.0, ttft_s=None), ""
        items = items_of(head.content)
        return self._answers.get(head.id) or (items, Stats(n=len(items), tps=0.0, ttft_s=None), head.finish_reason or "")

    def _turn(self, number: Any, role: str = "") -> Turn:
        tree = self.conversation.tree
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(tree):
            raise OptionError(f"chat: no turn {str(number)[:40]!r}; expected the id of one of `turns`")
        if role and tree[number].role != role:
            raise OptionError(f"chat: turn {number} is the {tree[number].role}'s; expected one of the {role}")
        return tree[number]


def _with_patches(seen: Pixels, rows: int, columns: int) -> Pixels:
    """A picture as the model saw it, as large as a thumbnail, with the edges of its patches where there is room for them."""
    from PIL import Image, ImageDraw

    scale = THUMBNAIL_PX / max(seen.size)
    size = max(1, round(seen.width * scale)), max(1, round(seen.height * scale))
    shown = seen.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BICUBIC)
    if min(size[0] / columns, size[1] / rows) < PATCH_PX:
        return shown
    lines = Image.new("RGBA", size, (0, 0, 0, 0))
    draw = ImageDraw.Draw(lines)
    for at in range(1, columns):
        draw.line(((x := round(at * size[0] / columns)), 0, x, size[1]), fill=(128, 128, 128, 110))
    for at in range(1, rows):
        draw.line((0, (y := round(at * size[1] / rows)), size[0], y), fill=(128, 128, 128, 110))
    return Image.alpha_composite(shown.convert("RGBA"), lines).convert("RGB")


class ChatMode(t.HasTraits):
    """What `Playground(llm, chat=True)` adds: turns, and the actions say, edit, again, go."""

    chat = t.Bool(False).tag(sync=True, option=True)
    template = t.Unicode(None, allow_none=True).tag(option=True)
    _turns = t.List().tag(sync=True)

    if TYPE_CHECKING:
        llm: Any
        status: Any
        error: Any
        finish_reason: Any
        _background: Background
        _feed: Feed
        _stream: Any
        _launch: Callable[..., Any]
        _record: Callable[[list[TokenItem], Stats], None]
        _take_settings: Callable[[Mapping[str, Any]], bool]
        _refresh_static: Callable[[], None]
        hold_sync: Callable[[], Any]

    _chat: Chat | None = None

    @property
    def conversation(self) -> Conversation:
        """The conversation of the chat: `save`, `render`, `messages`."""
        return self._talk().conversation

    @property
    def turns(self) -> list[ChatTurn]:
        """The turns in view, first to last: id, role, text, version (from 0), and versions: how many there are."""
        return self._chat.turns if self._chat is not None else []

    def say(self, text: str, images: Sequence[Any] = ()) -> Any:
        """Say something; returns at once, the answer streams into the page. `wait` gives its text.

        Args:
            images: pictures that are shown with it, to a model that sees.

        Raises:
            OptionError: not in chat mode, no model, or no text. GenerationError: an answer is on its way.
        """
        return self._ask(lambda chat: chat.say(text, images))

    def again(self, turn: int | None = None) -> Any:
        """Generate another answer, as a sibling of the old one.

        Args:
            turn: id of an answer; None: the last one.
        """
        return self._ask(lambda chat: chat.again(turn))

    def edit(self, turn: int, text: str) -> Any:
        """Replace message `turn` by a sibling and get an answer to it."""
        return self._ask(lambda chat: chat.edit(turn, text))

    def go(self, turn: int, index: int) -> Any:
        """Show version `index` (from 0) of a turn, and what followed it.

        Raises:
            OptionError: no such turn or version. GenerationError: an answer is on its way.
        """
        chat = self._talk()
        if self._background.alive:
            raise GenerationError("Playground: a run is in progress; call .stop() or .wait() first")
        chat.go(turn, index)
        with self.hold_sync():
            self._show_turns()
            self.status, self.error = "done" if chat.answer()[0] else "idle", ""
        self._refresh_static()
        return self

    def _check_chat(self) -> None:
        """Raise where a conversation could never begin."""
        if self.chat and self.llm is not None and self.template is None and hasattr(self.llm, "tokenizer"):
            self.llm.tokenizer.templates.pick()

    def _talk(self) -> Chat:
        if not self.chat:
            raise OptionError("Playground: not in chat mode; make it with Playground(llm, chat=True)")
        if self.llm is None:
            raise OptionError("Playground: no model is attached; make it with Playground(llm)")
        if not callable(getattr(self.llm, "chat", None)):
            raise OptionError(
                f"Playground: {type(self.llm).__name__!r} has no chat(); expected a loaded model, for example exl2nb.load(DIR)"
            )
        if self._chat is None:
            self._chat = Chat(self.llm, self.template)
        return self._chat

    def _ask(self, move: Callable[[Chat], None]) -> Any:
        chat = self._talk()

        def before() -> str:
            move(chat)
            self._turns = [turn._asdict() for turn in chat.turns]
            return ""

        def ask(**settings: Any) -> Any:
            talk = chat.conversation
            return self.llm.chat(talk.messages, stream=True, **talk.options, **settings)

        return self._launch(before, ask)

    def _answered(self, status: Status, reason: str, text: str, items: list[TokenItem], stats: Stats) -> None:
        """The answer is over: it becomes a turn. Called on the worker thread, before the status says so."""
        chat, completion = self._talk(), getattr(self._stream, "completion", None)
        reply = getattr(completion, "reply", None) or Reply(text)
        if chat.finish(reply, items, stats, "cancelled" if status == "stopped" else reason, failed=status == "error"):
            self._turns = [turn._asdict() for turn in chat.turns]
        else:
            self._show_turns()

    def _show_turns(self) -> None:
        chat = self._talk()
        items, stats, self.finish_reason = chat.answer()
        self._turns = [turn._asdict() for turn in chat.turns]
        self._feed.load("", items, stats)
        self._record(items, stats)

    # ---- messages

    def _receive_chat_send(self, message: Mapping[str, Any]) -> None:
        images = message.get("images", [])
        if not isinstance(images, list) or not all(isinstance(url, str) and url.startswith("data:") for url in images):
            raise OptionError("chat: images from the page are data URLs")  # nothing of the kernel's own files
        self._receive_chat(message, lambda: self.say(message.get("text", ""), images))

    def _receive_chat_edit(self, message: Mapping[str, Any]) -> None:
        self._receive_chat(message, lambda: self.edit(message.get("turn", -1), message.get("text", "")))

    def _receive_chat_again(self, message: Mapping[str, Any]) -> None:
        self._receive_chat(message, lambda: self.again(message.get("turn", -1)))

    def _receive_chat_go(self, message: Mapping[str, Any]) -> None:
        if not self._background.alive:
            self.go(message.get("turn", -1), message.get("index", -1))

    def _receive_chat(self, message: Mapping[str, Any], act: Callable[[], Any]) -> None:
        if self._take_settings(message):
            act()


def turns_html(turns: list[ChatTurn], answer: str) -> str:
    """The turns without scripts; `answer`, which is HTML, stands for the text of the last one where that is the model's."""
    from exl2nb.llm.conversation import calls_html, images_html, reasoning_html

    parts = []
    for turn in turns:
        words = html.escape(turn.text[:_STATIC_CHARACTERS] + ("…" if len(turn.text) > _STATIC_CHARACTERS else ""))
        body = answer if turn is turns[-1] and turn.role == "assistant" else words
        mark = f" ({turn.version + 1}/{turn.versions})" if turn.versions > 1 else ""
        if body is words:
            body = f"{reasoning_html(turn.reasoning)}{words}"
        body = f"{images_html([picture.url for picture in turn.images])}{body}"
        parts.append(f"<b>{ROLE_LABELS.get(turn.role, 'Other')}{mark}</b>\n{body}{calls_html(turn.calls)}\n\n")
    return "".join(parts) + ("" if turns and turns[-1].role == "assistant" else answer)


def turns_text(turns: list[ChatTurn]) -> str:
    """One line per turn, as plain text."""
    lines = []
    for turn in turns:
        mark = f" ({turn.version + 1}/{turn.versions})" if turn.versions > 1 else ""
        calls = "".join([f", calls {call[:200]}" for call in turn.calls])
        lines.append(f"{ROLE_LABELS.get(turn.role, 'Other')}{mark}: {turn.text[:200]!r}{'...' if len(turn.text) > 200 else ''}{calls}")
    return "\n".join(lines)


def _text(text: Any) -> str:
    if not isinstance(text, str) or not text.strip():
        raise OptionError(f"chat: text is {str(text)[:40]!r}; expected some words")
    return text

"""ExlWidget: what every widget shares: messages in, snapshots out, errors where the reader looks, a twin for places without a kernel."""

from __future__ import annotations

import html
import inspect
import uuid
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import anywidget
import traitlets as t

from exl2nb.core.errors import Exl2Error, OptionError
from exl2nb.core.log import logger
from exl2nb.core.options import check_keywords, signature_with
from exl2nb.io.atomic import atomic_write
from exl2nb.widgets import static
from exl2nb.widgets.protocol import PROTOCOL_VERSION

VIEW_MIME = "application/vnd.jupyter.widget-view+json"


class _Bundle:
    """The text of a file, read when a widget first needs it.

    anywidget would watch a `Path` for changes, and connects each widget that is made to it: the class then keeps all of them for ever.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        return self._path.read_text(encoding="utf-8")


class ExlWidget(anywidget.AnyWidget):
    """Base of all exl2nb widgets. Works from plain data: no engine, no GPU.

    A subclass names its bundle and the type of its synced traits, and declares these; those tagged `option` are keywords of the
    constructor. It overrides `_receive_<type>` for the messages it takes, `_send_snapshot`, `_static_body` and `_summary`.

    Traits:
        status: "idle", "loading", "running", "stopped", "done" or "error". Default "idle".
        error: text of the last error, shown inside the widget. Default "".
        height: greatest height of the main area, a CSS length; an int means pixels. Default "" (the style sheet's).
    """

    status = t.Enum(("idle", "loading", "running", "stopped", "done", "error"), "idle").tag(sync=True)
    error = t.Unicode("").tag(sync=True)
    height = t.Union((t.Unicode(), t.Int()), default_value="").tag(sync=True, option=True)
    _protocol = t.Int(PROTOCOL_VERSION).tag(sync=True)
    _static = t.Bool(False).tag(sync=True)

    _bundle: ClassVar[str] = ""
    """The folder in widgets/src; its bundle is exl2nb/static/<folder>.js and .css."""

    _state_type: ClassVar[type] = dict
    """TypedDict of the synced traits; see `protocol.py`."""

    _state_keys: ClassVar[tuple[str, ...]] = ()
    """Synced traits that an export carries. Default: those of `_state_type`."""

    _more_keywords: ClassVar[tuple[Mapping[str, Any], Mapping[str, Any]]] = ({}, {})
    """Keywords of the constructor that are no traits: their types, and the defaults of those that have one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Spell out the traits that are keywords in the signature, for completion and `help`."""
        if name := vars(cls).get("_bundle"):
            cls._esm, cls._css = (_Bundle(static.STATIC_FOLDER / f"{name}.{kind}") for kind in ("js", "css"))
        if "_state_type" in vars(cls) and "_state_keys" not in vars(cls):
            cls._state_keys = tuple(cls._state_type.__annotations__)
        super().__init_subclass__(**kwargs)
        found: dict[str, t.TraitType[Any, Any]] = {}
        for base in reversed(cls.__mro__):
            found |= {name: trait for name, trait in vars(base).items() if isinstance(trait, t.TraitType) and trait.metadata.get("option")}
        types, defaults = cls._more_keywords
        types = {**{name: _TRAIT_TYPES.get(type(trait), Any) for name, trait in found.items()}, **types}
        defaults = {**{name: _default(trait) for name, trait in found.items()}, **defaults}
        signature = inspect.signature(cls.__init__)
        own = signature.replace(parameters=list(signature.parameters.values())[1:], return_annotation=inspect.Signature.empty)
        cls.__signature__ = signature_with(own, types, defaults)

    def __dir__(self) -> list[str]:
        """What this package and `observe` offer; the names that ipywidgets and traitlets add still work."""
        ours = {name for base in type(self).__mro__ if base.__module__.startswith("exl2nb.") for name in vars(base)}
        public = {name for name in (*ours, *vars(self), "close", "layout", "observe", "unobserve") if not name.startswith("_")}
        return sorted(public | {name for name in object.__dir__(self) if name.startswith("__")})

    def __init__(self, **kwargs: Any) -> None:
        name = type(self).__name__
        check_keywords(kwargs, self._keywords(), where=name)
        self._callbacks: dict[str, list[Callable[..., Any]]] = {}
        self._display_id: str | None = None
        self._own_layout = "layout" not in kwargs
        try:
            super().__init__(**kwargs)
        except t.TraitError as cause:
            raise OptionError(f"{name}: {cause}") from cause
        self._unpin_replies()
        self.on_msg(self._dispatch)

    def close(self) -> None:
        """Remove the widget from the page, and the layout that it made: ipywidgets would keep that for ever."""
        super().close()
        if getattr(self, "_own_layout", False):
            self.layout.close()

    @classmethod
    def _keywords(cls) -> list[str]:
        return sorted([*cls.class_trait_names(option=True), "layout"])

    @t.validate("height")
    def _css_height(self, proposal: Mapping[str, Any]) -> str:
        value = proposal["value"]
        return f"{value}px" if isinstance(value, int) else value

    def _unpin_replies(self) -> None:
        """Let Stop through while a cell runs.

        Since 7.4, ipykernel sends a comm's next message to the shell that used the comm last, so Stop would queue behind a busy cell.
        """
        comm = self.comm
        if hasattr(comm, "_reply_subshell_for"):  # private there: the guard and tests/ui hold it in place
            comm._reply_subshell_for = lambda data, default: default  # type: ignore[union-attr]

    # ---- messages ----

    def _dispatch(self, _widget: Any, message: Any, _buffers: Any) -> None:
        """Runs on the main thread or on a subshell's: handlers only set flags and start threads, they never call the engine."""
        kind = message.get("type") if isinstance(message, dict) else None
        if kind in ("ready", "resync"):
            self._send_snapshot()
            return
        if kind == "ping":
            self.send({"type": "pong"})
            return
        handler = getattr(self, f"_receive_{kind}", None) if isinstance(kind, str) and kind.isidentifier() else None
        if handler is None:
            logger.warning("%s: message of unknown type %r ignored", type(self).__name__, kind)
            return
        try:
            handler(message)
        except Exception as problem:
            self._show_error(problem)

    def _send_snapshot(self) -> None:
        """Send all that a browser half needs besides the traits; nothing by default."""

    def _show_error(self, problem: BaseException) -> None:
        name = type(problem).__name__
        with self.hold_sync():
            self.error, self.status = f"{name}: {problem}" if str(problem) else name, "error"

    # ---- events ----

    def _listen(self, event: str, callback: Callable[..., Any], remove: bool) -> None:
        listeners = self._callbacks.setdefault(event, [])
        if not remove:
            listeners.append(callback)
        elif callback in listeners:
            listeners.remove(callback)

    def _fire(self, event: str, *args: Any) -> None:
        for callback in list(self._callbacks.get(event, ())):
            callback(*args)

    # ---- display ----

    def _summary(self) -> str:
        """One short line of plain text."""
        return f"{type(self).__name__}(status={self.status!r})"

    def _caption(self) -> str:
        """The line under the static twin; "" for none."""
        return self._summary()

    def _static_body(self) -> str:
        """Script-free HTML of what the widget shows now."""
        return f"<div>{html.escape(self._summary())}</div>"

    def __repr__(self) -> str:
        return self._summary()

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {**data, **self._static_bundle()}, dict(metadata)

    def _static_bundle(self) -> dict[str, Any]:
        return {"text/html": static.page(self._static_body(), self._caption()), "text/plain": self._summary()}

    def _ipython_display_(self) -> None:
        """Show the widget, and beside it a twin without scripts that later states replace (hidden by the style sheet of the live widget).

        One bundle with both would be simpler, but replacing it when a run ends would tear down the view under the reader's hands.
        """
        from IPython.display import publish_display_data  # type: ignore[attr-defined]

        bundle = self._repr_mimebundle_()
        if bundle is None:
            return
        data, metadata = bundle
        self._display_id = self._display_id or uuid.uuid4().hex
        publish_display_data({VIEW_MIME: data.pop(VIEW_MIME)}, metadata)
        publish_display_data(data, {}, transient={"display_id": self._display_id})

    def _refresh_static(self) -> None:
        """Replace the stored twin, if the widget was displayed in a notebook.

        Works from a worker thread; a headless run only takes it from the thread of the cell that is running, so `wait` calls it as well.
        """
        from IPython import get_ipython  # type: ignore[attr-defined]

        shell = get_ipython()
        if shell is not None and self._display_id is not None and hasattr(shell, "kernel"):
            shell.display_pub.publish(self._static_bundle(), {}, transient={"display_id": self._display_id}, update=True)

    def show(self) -> None:
        """Display the widget here, in the middle of a cell."""
        from IPython.display import display

        display(self)

    # ---- export ----

    def _export_state(self) -> dict[str, Any]:
        state = self.get_state(list(self._state_keys))
        return {**state, "_static": True}

    def to_html(self, filename: str | Path | None = None, *, title: str | None = None) -> str | None:
        """Write the widget as one HTML file that works offline and without a kernel.

        Args:
            filename: where to write; None returns the text instead.
            title: of the document; the widget's name by default.

        Raises:
            OptionError: filename lies in a folder that does not exist.
        """
        text = static.offline_page(
            esm=str(getattr(self, "_esm", "")),
            css=str(getattr(self, "_css", "")),
            state=self._export_state(),
            title=title or f"exl2nb {type(self).__name__}",
            fallback=static.page(self._static_body(), self._caption()),
        )
        if filename is None:
            return text
        path = Path(filename)
        if not path.parent.is_dir():
            raise OptionError(f"to_html: folder {path.parent} does not exist; make it first, or give another filename")
        with atomic_write(path) as file:
            file.write(text.encode("utf-8"))
        return None

    def as_html(self) -> Any:
        """The same page as an `IPython.display.HTML` object, in a frame of its own."""
        from IPython.display import HTML

        source = html.escape(self.to_html() or "", quote=True)
        return HTML(f'<div><iframe srcdoc="{source}" style="width:100%;height:480px;border:0"></iframe></div>')


_TRAIT_TYPES: dict[type, Any] = {t.Int: int, t.Float: float, t.Unicode: str, t.Bool: bool, t.List: list}


def _default(trait: t.TraitType[Any, Any]) -> Any:
    value = trait.default() if isinstance(trait, t.List) else trait.default_value
    return None if value is t.Undefined else value


def as_text(problem: BaseException) -> str:
    """An error as one readable line for the page: our own errors name what to do, others get their type."""
    return str(problem) if isinstance(problem, Exl2Error) else f"{type(problem).__name__}: {problem}"

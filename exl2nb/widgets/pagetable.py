"""PageTable: the pages of the KV cache and the requests that reference them, live or replayed."""

from __future__ import annotations

import html
import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import traitlets as t

from exl2nb.core.errors import EngineClosed, OptionError
from exl2nb.widgets import static
from exl2nb.widgets.background import Background
from exl2nb.widgets.base import ExlWidget, as_text
from exl2nb.widgets.protocol import OWNER_COLOURS, PageCell, PageFrame, PageOwner, PageTableState, Status

if TYPE_CHECKING:
    import pandas as pd

KEY_DIGITS = 12  # of a page's name: enough to tell pages apart
MOST_SQUARES = 512  # pages of the script-free twin
CACHED_COLOUR: static.RGB = (176, 186, 198)
FREE_COLOUR: static.RGB = (244, 244, 244)


def frame_of(source: Any, before: PageFrame | None = None, label: str = "") -> PageFrame:
    """A `CacheSnapshot`, or a mapping as this function gives it, as one frame.

    Args:
        source: the snapshot.
        before: the frame before it; tells what happened to each page.
        label: shown with it.

    Raises:
        OptionError: neither of them.
    """
    if isinstance(source, Mapping):
        return _plain(source, label)
    if not hasattr(source, "pages") or not hasattr(source, "requests"):
        raise OptionError(
            f"PageTable: got {type(source).__name__!r}; expected an LLM, snapshots of its cache (llm.cache.snapshot()), or both"
        )
    places = {page.key: page.page for page in source.pages if page.key}
    ahead = {page: one.pages[i - 1] for one in source.requests for i, page in enumerate(one.pages) if i}
    old = before["pages"] if before is not None and len(before["pages"]) == len(source.pages) else None
    cells = []
    for page in source.pages:
        cell = PageCell(
            page.state, page.tokens, list(page.owners), (page.key or "")[:KEY_DIGITS], places.get(page.parent, ahead.get(page.page, -1)), ""
        )
        cells.append(cell if old is None else cell._replace(event=event_of(PageCell(*old[page.page]), cell)))
    owners = [
        PageOwner(one.number, one.state != "running", one.tokens, one.computed, one.reused, list(one.pages)) for one in source.requests
    ]
    return PageFrame(
        label=label, page_size=source.page_size, pages=cells, requests=owners, evictions=source.evictions, preemptions=source.preemptions
    )


def event_of(before: PageCell, now: PageCell) -> Literal["", "new", "found", "joined", "evicted", "freed", "cleared"]:
    """What happened to one page between two frames."""
    if now.state == "used":
        if before.state == "free":
            return "new"
        if before.state == "cached":
            same = before.key == now.key if before.key else now.tokens >= before.tokens  # a page that is not full has no key
            return "found" if same else "evicted"
        return "joined" if len(now.owners) > len(before.owners) and set(now.owners) >= set(before.owners) else ""
    if before.state == "used":
        return "freed"
    if before.state == "cached" and (now.state == "free" or now.key != before.key):
        return "cleared" if now.state == "free" else "evicted"
    return ""


def _plain(source: Mapping[str, Any], label: str) -> PageFrame:
    try:
        cells = [PageCell(*cell) for cell in source["pages"]]
        owners = [PageOwner(*owner) for owner in source["requests"]]
        frame = PageFrame(
            label=label or str(source.get("label", "")), page_size=int(source["page_size"]), pages=cells, requests=owners,
            evictions=int(source["evictions"]), preemptions=int(source["preemptions"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise OptionError(f"PageTable: a frame of plain data is not one ({error}); expected what `PageTable.frames` holds") from error
    if any(cell.state not in ("free", "cached", "used") for cell in cells):
        raise OptionError("PageTable: a page has an unknown state; expected 'free', 'cached' or 'used'")
    return frame


def counts(frame: PageFrame) -> dict[str, int]:
    """Pages used, of them shared, cached and free."""
    found = {"used": 0, "shared": 0, "cached": 0, "free": 0}
    for cell in frame["pages"]:
        found[cell[0]] += 1
        found["shared"] += len(cell[2]) > 1
    return found


def frame_summary(frame: PageFrame) -> str:
    """One line."""
    n = counts(frame)
    return (
        f"{len(frame['pages'])} pages of {frame['page_size']} tokens: {n['used']} used ({n['shared']} shared), {n['cached']} cached, "
        f"{n['free']} free, {frame['evictions']} evicted so far"
    )


def colour(cell: Sequence[Any]) -> static.RGB:
    """Of the first request that holds the page."""
    if cell[0] == "used":
        return OWNER_COLOURS[cell[2][0] % len(OWNER_COLOURS)] if cell[2] else OWNER_COLOURS[0]
    return CACHED_COLOUR if cell[0] == "cached" else FREE_COLOUR


def frame_table(frame: PageFrame, title: str) -> str:
    """Script-free HTML: a square per page, a line per request."""
    squares = "".join(map(_square, range(MOST_SQUARES), frame["pages"]))
    if len(frame["pages"]) > MOST_SQUARES:
        squares += f"and {len(frame['pages']) - MOST_SQUARES} more"
    lines = "".join(
        f"<div>request {number}{' (queued)' if waiting else ''}: {tokens} tokens, {computed} in the cache, {reused} reused; "
        f"pages {', '.join(map(str, pages)) or 'none'}</div>"
        for number, waiting, tokens, computed, reused, pages in frame["requests"]
    )
    head = f"<b>{html.escape(title)}</b> {html.escape(frame['label'])}"
    return (
        f"<div>{head}<div>{frame_summary(frame)}</div>"
        f'<div style="display:flex;flex-wrap:wrap;gap:2px;max-width:52em;margin:4px 0">{squares}</div>{lines}</div>'
    )


def _square(page: int, cell: Sequence[Any]) -> str:
    state, tokens, owners, _key, _parent, event = cell
    who = f", requests {', '.join(map(str, owners))}" if owners else ""
    title = f"page {page}: {state}, {tokens} tokens{who}{f'; {event}' if event else ''}"
    back = f"rgb{colour(cell)}".replace(" ", "")
    style = f"width:22px;height:22px;background:{back};color:#fff;text-align:center;font-size:11px;outline:1px solid #999"
    return f'<span title="{html.escape(title)}" style="{style}">{"+".join(map(str, owners[:2]))}</span>'


MOST_FRAMES = 1000
EXPORT_BYTES = 120_000  # of frames in an export; beyond it frames are left out evenly
SLOW_PAGES = 2000  # pages a second that are sent while it is live


class PageTable(ExlWidget):
    """The cache as squares: which request references which page, which prefixes are shared, which pages are cached and which were evicted.

    A number in a square is the request that holds it, two mean it is shared; the fill says how much of the page is used. A corner mark says
    what happened since the frame before. Pointing at a page shows the pages before it in its text.

    Args:
        source: an `LLM` (takes a snapshot now; `start`, `take` and the button Live take more), one `llm.cache.snapshot()`, or several.
        labels: of the snapshots, in order.
        period_s: seconds between two snapshots while it is live, at least 0.02. Default 0.2. Pages that did not change make no new frame.

    Traits, also keywords (synced with the page both ways):
        frame: which one is shown; -1 the last. Default -1. title.
    Traits to read:
        live: whether it watches.

    Example:
        >>> import exl2nb as ex
        >>> llm = ex.demo(progress=None)
        >>> pages = PageTable(llm)
        >>> with pages:                      # watches while this runs
        ...     _ = llm.generate("It was a dark night, and", max_tokens=4)
        >>> pages.take("afterwards")
        PageTable(16 pages of 256 tokens: 0 used (0 shared), 1 cached, 15 free, 0 evicted so far)
        >>> llm.close()
    """

    _bundle, _state_type = "pagetable", PageTableState

    _background = Background("PageTable")  # never begun: what `close` finds where the arguments did not fit the constructor
    title = t.Unicode("").tag(sync=True, option=True)
    frame = t.Int(-1).tag(sync=True, option=True)
    live = t.Bool(False).tag(sync=True)
    _count = t.Int(0).tag(sync=True)
    _shown = t.Int(0).tag(sync=True)
    _frames = t.List().tag(sync=True)
    _can_live = t.Bool(False).tag(sync=True)

    def __init__(self, source: Any, *, labels: Iterable[str] = (), period_s: float = 0.2, **kwargs: Any) -> None:
        self._background = Background("PageTable")
        if isinstance(period_s, bool) or not isinstance(period_s, (int, float)) or not 0.02 <= period_s <= 60:
            raise OptionError(f"PageTable: period_s is {period_s!r}; expected 0.02 to 60 seconds")
        self._llm = source if hasattr(getattr(source, "cache", None), "snapshot") else None
        self._period_s, self._lock = float(period_s), threading.RLock()
        self.frames: list[PageFrame] = []
        names = list(labels)
        if self._llm is None:
            several = source if isinstance(source, (list, tuple)) else [source]
            if not several:
                raise OptionError("PageTable: got no snapshot; expected at least one (llm.cache.snapshot())")
            for i, one in enumerate(several):
                self.frames.append(frame_of(one, self.frames[-1] if self.frames else None, names[i] if i < len(names) else ""))
        else:
            self.frames.append(frame_of(self._llm.cache.snapshot(), None, names[0] if names else ""))
        super().__init__(**kwargs)
        if not -1 <= self.frame < len(self.frames):
            raise OptionError(f"PageTable: frame is {self.frame}; expected -1 to {len(self.frames) - 1}")
        with self.hold_sync():
            self.title = self.title or str(getattr(self._llm, "name", ""))
            self._can_live = self._llm is not None
            self._put()

    # ---- frames ----

    def take(self, label: str = "") -> PageTable:
        """Add a snapshot of now.

        Raises:
            OptionError: there is no model to ask. EngineClosed: it was closed.
        """
        if self._llm is None:
            raise OptionError("PageTable: made of snapshots, it has no model to ask; give the LLM instead")
        self._add(self._llm.cache.snapshot(), label)
        return self

    def _add(self, snapshot: Any, label: str, *, always: bool = True) -> None:
        with self._lock:
            new = frame_of(snapshot, self.frames[-1], label)
            if not always and not _changed(self.frames[-1], new):
                return
            self.frames.append(new)
            if len(self.frames) > MOST_FRAMES:
                del self.frames[0]
            self._put()

    def _put(self) -> None:
        """Send the frame that is to be seen."""
        with self._lock, self.hold_sync():
            self._count = len(self.frames)
            self._shown = len(self.frames) - 1 if self.frame < 0 else min(self.frame, len(self.frames) - 1)
            self._frames = [_wire(self.frames[self._shown])]

    @property
    def shown(self) -> PageFrame:
        """The frame that is seen."""
        return self.frames[self._shown]

    @t.observe("frame")
    def _follow(self, change: Mapping[str, Any]) -> None:
        if not getattr(self, "_count", 0):
            return
        if not -1 <= change["new"] < len(self.frames):
            self.frame = change["old"]
            raise OptionError(f"PageTable: frame is {change['new']}; expected -1 (the last) to {len(self.frames) - 1}")
        self._put()

    # ---- live ----

    def start(self) -> PageTable:
        """Watch: a frame whenever pages have changed, until `stop`. Returns at once; does nothing while it watches already.

        Raises:
            OptionError: there is no model to watch.
        """
        if self._llm is None:
            raise OptionError("PageTable: made of snapshots, it has no model to watch; give the LLM instead")
        if not self._background.alive:
            self._background.begin(self._watch, self._ended, before=self._begun)
        return self

    def stop(self) -> None:
        """Stop watching."""
        self._background.stop()

    def wait(self, timeout: float | None = None) -> PageTable:
        """Wait until it stops watching. An interrupt ends it."""
        self._background.wait(timeout)
        self._refresh_static()
        return self

    def __enter__(self) -> PageTable:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._background.wait(5)
        if self._llm is not None and not self._llm.engine.closed:
            self._add(self._llm.cache.snapshot(), "", always=False)
        self._refresh_static()

    def _begun(self) -> None:
        with self.hold_sync():
            self.live, self.status, self.error, self.frame = True, "running", "", -1

    def _watch(self, stop: threading.Event) -> None:
        pause = max(self._period_s, len(self.frames[-1]["pages"]) / SLOW_PAGES)
        while not stop.is_set():
            begun = time.monotonic()
            try:
                self._add(self._llm.cache.snapshot(), "", always=False)  # type: ignore[union-attr]
            except EngineClosed:
                return
            stop.wait(max(0.01, pause - (time.monotonic() - begun)))

    def _ended(self, status: Status, problem: BaseException | None) -> None:
        with self.hold_sync():
            self.live, self.status = False, "error" if problem is not None else "stopped"
            self.error = "" if problem is None else as_text(problem)

    def _receive_frame(self, message: Mapping[str, Any]) -> None:
        frame, live = message.get("frame"), message.get("live")
        if not isinstance(frame, int) or not isinstance(live, bool):
            raise OptionError("PageTable: the page sent an invalid frame; reload it")
        if live and not self.live:
            self.start()
        elif not live and self.live:
            self.stop()
        if not live:
            self.frame = min(max(-1, frame), len(self.frames) - 1)

    def close(self) -> None:
        """Stop watching and remove the widget from the page."""
        self.stop()
        super().close()

    # ---- without the page ----

    def to_frame(self) -> pd.DataFrame:
        """One line per page and frame: frame, label, page, state, tokens, owners, parent, event."""
        import pandas as pd

        rows = []
        for number, frame in enumerate(self.frames):
            for page, cell in enumerate(frame["pages"]):
                rows.append({"frame": number, "label": frame["label"], "page": page, **cell._asdict()})
        return pd.DataFrame(rows)

    def _export_state(self) -> dict[str, Any]:
        frames = [_wire(frame) for frame in self.frames]
        biggest = max(len(json.dumps(frame)) for frame in frames)
        room = max(1, EXPORT_BYTES // biggest)
        kept = frames if len(frames) <= room else [frames[round(i * (len(frames) - 1) / max(1, room - 1))] for i in range(room)]
        shown = len(kept) - 1 if self.frame < 0 else round(self._shown * (len(kept) - 1) / max(1, len(frames) - 1))
        return {**super()._export_state(), "_frames": kept, "_count": len(kept), "_shown": shown, "live": False, "status": "idle"}

    def _summary(self) -> str:
        many = f"frame {self._shown + 1} of {self._count}; " if self._count > 1 and self.frame >= 0 else ""
        return f"PageTable({many}{frame_summary(self.shown)})"

    def _static_body(self) -> str:
        return frame_table(self.shown, self.title)


def _wire(frame: PageFrame) -> dict[str, Any]:
    return {**frame, "pages": [list(cell) for cell in frame["pages"]], "requests": [list(one) for one in frame["requests"]]}


def _changed(before: PageFrame, now: PageFrame) -> bool:
    """Whether a new frame says more than the one before; what happened since then does not count by itself."""
    same = [cell[:5] for cell in before["pages"]] == [cell[:5] for cell in now["pages"]]
    return not same or before["requests"] != now["requests"]

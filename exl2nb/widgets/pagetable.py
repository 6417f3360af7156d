"""PageTable: what the pages of the cache hold and for whom, live or replayed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import traitlets as t

from exl2nb.core.errors import EngineClosed, OptionError
from exl2nb.widgets import pageframes, static
from exl2nb.widgets.background import Background
from exl2nb.widgets.base import ExlWidget, as_text
from exl2nb.widgets.protocol import PageFrame, PageTableState, Status

if TYPE_CHECKING:
    import pandas as pd

MOST_FRAMES = 1000
EXPORT_BYTES = 120_000  # of frames in an export; beyond it frames are left out evenly
SLOW_PAGES = 2000  # pages a second that are sent while it is live


class PageTable(ExlWidget):
    """The cache as squares: which request holds which page, which beginnings are shared, what is kept for later and what is evicted.

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

    _esm = static.STATIC / "pagetable.js"
    _css = static.STATIC / "pagetable.css"
    _state_keys: ClassVar[tuple[str, ...]] = tuple(PageTableState.__annotations__)

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
                self.frames.append(pageframes.frame_of(one, self.frames[-1] if self.frames else None, names[i] if i < len(names) else ""))
        else:
            self.frames.append(pageframes.frame_of(self._llm.cache.snapshot(), None, names[0] if names else ""))
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
            new = pageframes.frame_of(snapshot, self.frames[-1], label)
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
        """End watching."""
        self._background.stop()

    def wait(self, timeout: float | None = None) -> PageTable:
        """Wait until it watches no more. An interrupt ends it."""
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
            raise OptionError("PageTable: the page sent a frame that is none; reload it")
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

    # ---- looking at it without the page ----

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
        return f"PageTable({many}{pageframes.summary(self.shown)})"

    def _static_body(self) -> str:
        return pageframes.table(self.shown, self.title)

    def _picture(self) -> bytes | None:
        return pageframes.picture(self.shown)


def _wire(frame: PageFrame) -> dict[str, Any]:
    return {**frame, "pages": [list(cell) for cell in frame["pages"]], "requests": [list(one) for one in frame["requests"]]}


def _changed(before: PageFrame, now: PageFrame) -> bool:
    """Whether a new frame says more than the one before; what happened since then does not count by itself."""
    same = [cell[:5] for cell in before["pages"]] == [cell[:5] for cell in now["pages"]]
    return not same or before["requests"] != now["requests"]

"""The page table at one moment as a widget shows it, and what changed since the moment before. Plain data; no engine, no Jupyter."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from exl2nb.core.errors import OptionError
from exl2nb.widgets import static
from exl2nb.widgets.protocol import PageCell, PageFrame, PageOwner

OWNER_COLOURS: tuple[static.RGB, ...] = (
    (46, 112, 190), (214, 120, 40), (62, 150, 92), (168, 84, 170), (196, 62, 78), (20, 140, 150), (140, 110, 40), (222, 110, 150),
)  # fmt: skip
"""Of requests, by number; the same stand in widgets/src/pagetable/colours.ts."""
KEY_DIGITS = 12  # of a page's name: enough to tell pages apart
MOST_SQUARES = 512  # pages of the script-free twin
CACHED: static.RGB = (176, 186, 198)
FREE: static.RGB = (244, 244, 244)


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
            same = before.key == now.key if before.key else now.tokens >= before.tokens  # what is not full has no name
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
        raise OptionError("PageTable: a page has a state that is none; expected 'free', 'cached' or 'used'")
    return frame


def counts(frame: PageFrame) -> dict[str, int]:
    """Pages used, of them shared, cached and free."""
    found = {"used": 0, "shared": 0, "cached": 0, "free": 0}
    for cell in frame["pages"]:
        found[cell[0]] += 1
        found["shared"] += len(cell[2]) > 1
    return found


def summary(frame: PageFrame) -> str:
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
    return CACHED if cell[0] == "cached" else FREE


def table(frame: PageFrame, title: str) -> str:
    """Script-free HTML: a square per page, a line per request."""
    squares = "".join(map(_square, range(MOST_SQUARES), frame["pages"]))
    if len(frame["pages"]) > MOST_SQUARES:
        squares += f"and {len(frame['pages']) - MOST_SQUARES} more"
    lines = "".join(
        f"<div>request {number}{' (waiting)' if waiting else ''}: {tokens} tokens, {computed} in the cache, {reused} found there; "
        f"pages {', '.join(map(str, pages)) or 'none'}</div>"
        for number, waiting, tokens, computed, reused, pages in frame["requests"]
    )
    head = f"<b>{html.escape(title)}</b> {html.escape(frame['label'])}"
    return (
        f"<div>{head}<div>{summary(frame)}</div>"
        f'<div style="display:flex;flex-wrap:wrap;gap:2px;max-width:52em;margin:4px 0">{squares}</div>{lines}</div>'
    )


def _square(page: int, cell: Sequence[Any]) -> str:
    state, tokens, owners, _key, _parent, event = cell
    who = f", requests {', '.join(map(str, owners))}" if owners else ""
    title = f"page {page}: {state}, {tokens} tokens{who}{f'; {event}' if event else ''}"
    back = f"rgb{colour(cell)}".replace(" ", "")
    style = f"width:22px;height:22px;background:{back};color:#fff;text-align:center;font-size:11px;outline:1px solid #999"
    return f'<span title="{html.escape(title)}" style="{style}">{"+".join(map(str, owners[:2]))}</span>'


def picture(frame: PageFrame, *, columns: int = 32) -> bytes:
    """PNG: a square per page, filled as far as the page is."""
    side = 12
    cells = frame["pages"]
    rows: list[list[static.RGB]] = []
    for first in range(0, min(len(cells), 40 * columns), columns):
        line = cells[first : first + columns]
        for y in range(side - 1):
            dots: list[static.RGB] = []
            for cell in line:
                full = cell[1] >= frame["page_size"] * (side - 1 - y) / (side - 1)
                dots += [colour(cell) if full else FREE] * (side - 1) + [(255, 255, 255)]
            rows.append(dots + [(255, 255, 255)] * (side * (columns - len(line))))
        rows.append([(255, 255, 255)] * (side * columns))
    return static.png(rows)

"""What the pages of the cache hold at one moment, as plain data. Knows no tensors and no threads."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from exl2nb.generator.pager import Pager
from exl2nb.generator.sequence import Sequence

_PER_LINE = 64
_MARKS = {"free": "·", "cached": "o"}
_TINTS = {"free": "transparent", "cached": "rgba(120,140,160,.35)", "used": "rgba(214,120,40,.55)", "shared": "rgba(60,130,200,.6)"}


@dataclass(frozen=True, kw_only=True)
class PageView:
    """One page.

    state: "used" (requests hold it), "cached" (nobody does, its content may be used again) or "free". owners: numbers of the requests that
    hold it, in order. count: holders. tokens: of its slots that hold something. full: all do. key: hash of its tokens and all before them,
    as hex; None while it is not full or not published. parent: the key before it. last_use: the table's clock when it was last taken or
    given up.
    """

    page: int
    state: str
    owners: tuple[int, ...]
    count: int
    tokens: int
    full: bool
    key: str | None
    parent: str | None
    last_use: int


@dataclass(frozen=True, kw_only=True)
class RequestView:
    """One request that runs or waits.

    tokens: of prompt and answer so far. computed: of them in the cache. reused: of the prompt, found in the cache.
    """

    number: int
    state: str
    priority: int
    tokens: int
    computed: int
    reused: int
    pages: tuple[int, ...]
    preemptions: int


@dataclass(frozen=True, kw_only=True)
class CacheSnapshot:
    """The whole page table.

    clock: what `last_use` counts. evictions: cached pages that were given away so far. preemptions: requests that had to give way so far.
    """

    page_size: int
    pages: tuple[PageView, ...]
    requests: tuple[RequestView, ...]
    clock: int
    evictions: int
    preemptions: int

    def num(self, state: str) -> int:
        """Pages in a state: "used", "cached", "free"; or "shared", used by more than one."""
        if state == "shared":
            return sum(page.count > 1 for page in self.pages)
        return sum(page.state == state for page in self.pages)

    def chains(self) -> list[tuple[int, ...]]:
        """Full pages in the order of their text: one tuple of page ids for every text that ends there; shared beginnings repeat."""
        by_key = {page.key: page for page in self.pages if page.key}
        parents = {page.parent for page in by_key.values()}
        found = []
        for page in by_key.values():
            if page.key in parents:
                continue
            chain = [page]
            while chain[-1].parent in by_key:
                chain.append(by_key[chain[-1].parent])
            found.append(tuple(one.page for one in reversed(chain)))
        return found

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row per page."""
        import pandas

        names = [f.name for f in fields(PageView)]
        return pandas.DataFrame([[getattr(page, name) for name in names] for page in self.pages], columns=names)

    def __str__(self) -> str:
        marks = "".join(_MARKS.get(page.state) or ("#" if page.count > 1 else "x") for page in self.pages)
        lines = [marks[at : at + _PER_LINE] for at in range(0, len(marks), _PER_LINE)]
        for one in self.requests:
            where = f"{one.computed} in {len(one.pages)} pages, {one.reused} found in the cache"
            lines.append(f"request {one.number}: {one.state}, {one.tokens} tokens, {where}")
        return "\n".join([self._title(), *lines, "x used  # shared  o cached  · free"])

    def __repr__(self) -> str:
        return f"CacheSnapshot({self._title()})"

    def _repr_html_(self) -> str:
        cells = "".join(map(_cell, self.pages))
        rows = "".join(
            f"<tr><td>{one.number}</td><td>{one.state}</td><td>{one.priority}</td><td>{one.tokens}</td><td>{one.computed}</td>"
            f"<td>{one.reused}</td><td>{len(one.pages)}</td></tr>"
            for one in self.requests
        )
        heads = "".join(f"<th>{name}</th>" for name in ("request", "state", "priority", "tokens", "in cache", "reused", "pages"))
        table = f"<table><tr>{heads}</tr>{rows}</table>" if rows else ""
        return (
            f'<div>{html.escape(self._title())}</div><div style="display:flex;flex-wrap:wrap;gap:2px;max-width:52em">{cells}</div>{table}'
        )

    def _title(self) -> str:
        return (
            f"{len(self.pages)} pages of {self.page_size} tokens: {self.num('used')} used ({self.num('shared')} shared), "
            f"{self.num('cached')} cached, {self.num('free')} free; {self.evictions} evicted, {self.preemptions} preempted"
        )


def _cell(page: PageView) -> str:
    owners = f", requests {', '.join(map(str, page.owners))}" if page.owners else ""
    title = f"page {page.page}: {page.state}, {page.tokens} tokens{owners}" + (f", {page.key[:8]}" if page.key else "")
    tint = _TINTS["shared" if page.count > 1 else page.state]
    return (
        f'<span title="{html.escape(title)}" style="width:14px;height:14px;border:1px solid rgba(128,128,128,.6);background:{tint}"></span>'
    )


def take(pager: Pager, running: Iterable[Sequence], waiting: Iterable[Sequence], *, preemptions: int) -> CacheSnapshot:
    """Look at every page and request. Nothing may change meanwhile."""
    table, size = pager.table, pager.page_size
    owners: dict[int, list[int]] = {}
    filled: dict[int, int] = {}
    running = list(running)
    for sequence in running:
        for i, page in enumerate(sequence.pages):
            owners.setdefault(page, []).append(sequence.number)
            filled[page] = max(filled.get(page, 0), min(size, max(0, sequence.computed - i * size)))
    pages = []
    for page in range(table.num_pages):
        entry = pager.index.entry(page)
        tokens = max(filled.get(page, 0), pager.index.filled(page))
        pages.append(
            PageView(
                page=page,
                state=table.state(page),
                owners=tuple(owners.get(page, ())),
                count=table.count(page),
                tokens=tokens,
                full=tokens == size,
                key=entry.key.hex() if entry and entry.key else None,
                parent=entry.parent.hex() if entry else None,
                last_use=table.last_use(page),
            )
        )
    views = [_request(s, "running") for s in running] + [_request(s, "waiting") for s in waiting]
    return CacheSnapshot(
        page_size=size,
        pages=tuple(pages),
        requests=tuple(views),
        clock=table.clock,
        evictions=table.evictions,
        preemptions=preemptions,
    )


def _request(sequence: Sequence, state: str) -> RequestView:
    return RequestView(
        number=sequence.number,
        state=state,
        priority=sequence.request.priority,
        tokens=len(sequence.ids),
        computed=sequence.computed,
        reused=sequence.reused_tokens,
        pages=tuple(sequence.pages),
        preemptions=sequence.preemptions,
    )

"""The pages of sequences: taken on demand, shared by equal beginnings, copied before a shared one is written. Knows no priorities."""

from __future__ import annotations

from collections.abc import Callable

from exl2nb.cache.pages import PageAllocator, PrefixIndex, PrefixMatch, chain_key, root_key
from exl2nb.generator.sequence import RunningRequest

MIN_COMMON = 8  # tokens of a partial page that are worth a copy
MIN_CLAIM = 32  # tokens of a partial page that are worth waiting for


class Pager:
    """Gives sequences their pages.

    What a page holds depends on its tokens, all tokens before them and the salt, and on nothing else; so a page that was computed for one
    sequence serves every other with the same beginning, with the same bits.

    Attributes:
        reuse: find cached prefixes, and keep the pages of ended sequences. changes: counts changes of any sequence's list of pages.

    Args:
        num_pages: of the cache.
        page_size: tokens per page.
        copy: copies one page of the cache to another.
        salt: what besides tokens changes what a page holds.
    """

    def __init__(self, num_pages: int, *, page_size: int, copy: Callable[[int, int], None], salt: str = "") -> None:
        self.table, self.page_size = PageAllocator(num_pages), page_size
        self.index = PrefixIndex(self.table, page_size)
        self.reuse, self.changes = True, 0
        self._copy, self._salt = copy, salt
        self.roots: dict[str, bytes] = {}  # salt -> key of the empty text

    def root(self, salt: str = "") -> bytes:
        """Key of the empty text under a sequence's own salt."""
        if salt not in self.roots:
            self.roots[salt] = root_key(f"{self._salt}|{salt}")
        return self.roots[salt]

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens need."""
        return -(-tokens // self.page_size)

    def find(self, sequence: RunningRequest) -> PrefixMatch:
        """What the cache knows of the sequence's tokens; the last one is always left to run, as its logits are wanted."""
        if not self.reuse:
            return PrefixMatch([], None, 0)
        limit = len(sequence.ids) - sequence.rows
        self._extend_keys(sequence, limit // self.page_size)
        return self.index.match(sequence.page_ids, sequence.keys, self.root(sequence.salt), limit=limit)

    def admit(self, sequence: RunningRequest) -> int:
        """Give a sequence without pages what is known of its beginning; returns the number of tokens."""
        assert not sequence.pages, "admission of a sequence that has pages"
        match = self.find(sequence)
        self.table.share(match.pages)
        sequence.pages = list(match.pages)
        sequence.published = len(match.pages)
        sequence.computed = len(match.pages) * self.page_size
        self._take_partial(sequence, match.partial, match.common)
        self.changes += 1
        return sequence.computed

    def extend(self, sequence: RunningRequest) -> int:
        """Between two chunks of a prompt: take over what others have computed meanwhile; returns the number of tokens."""
        size, before = self.page_size, sequence.computed
        at = before // size
        if not self.reuse or before % size or len(sequence.pages) > at or sequence.published < at:
            return 0  # within a page, or a step that is in flight has not been read
        limit = len(sequence.ids) - sequence.rows
        self._extend_keys(sequence, limit // size)
        while (at + 1) * size <= limit and (page := self.index.find(sequence.keys[at])) is not None:
            self.table.share([page])
            sequence.pages.append(page)
            at += 1
        sequence.computed, sequence.published = at * size, at
        parent = sequence.keys[at - 1] if at else self.root(sequence.salt)
        self._take_partial(sequence, *self.index.match_partial(sequence.page_ids[at * size : min(limit, (at + 1) * size)], parent))
        if sequence.computed > before:
            self.changes += 1
        return sequence.computed - before

    def claims(self, sequence: RunningRequest) -> list[bytes]:
        """Names of the pages that the sequence still has to compute for its prompt; equal names mean equal pages."""
        at, limit = sequence.computed // self.page_size, len(sequence.ids) - sequence.rows
        full = limit // self.page_size
        self._extend_keys(sequence, full)
        names = sequence.keys[at:full]
        tail = sequence.page_ids[full * self.page_size : limit]
        if len(tail) >= MIN_CLAIM:
            names.append(chain_key(sequence.keys[full - 1] if full else self.root(sequence.salt), tail[:MIN_CLAIM]))
        return names

    def reserve(self, sequence: RunningRequest, end: int) -> bool:
        """Make the slots from `sequence.computed` to `end` writable. False: too few pages are free; nothing was changed.

        `sequence.room` is then from where to where it may write; it holds as long as `changes` is `sequence.writable_changes`.
        """
        first, size, pages = sequence.computed // self.page_size, self.page_size, sequence.pages
        last = (end - 1) // size
        sequence.room = sequence.computed, (last + 1) * size
        if last == first < len(pages):  # one token more in its page: the usual case
            page = pages[first]
            if self.table.count(page) == 1 and self.index.filled(page) <= sequence.computed % size:
                sequence.writable_changes = self.changes
                return True
        sequence.writable_changes = -1
        shared = [i for i in range(first, min(last + 1, len(pages))) if self.table.count(pages[i]) > 1]
        more = max(0, last + 1 - len(pages))
        if len(shared) + more > self.table.num_free:
            return False
        fresh = self.table.allocate(len(shared) + more)
        for i, page in zip(shared, fresh):
            if i == first and sequence.computed % size:
                self._copy(pages[i], page)
            self.table.free([pages[i]])
            pages[i] = page
        for i in range(first, min(last + 1, len(pages))):
            self.index.cut(pages[i], sequence.computed % size if i == first else 0)
        pages += fresh[len(shared) :]
        self.changes += 1
        sequence.writable_changes = self.changes
        return True

    def publish(self, sequence: RunningRequest) -> None:
        """Make known what the sequence has computed in full pages; a page that is known already is given up for the known one."""
        full = min(sequence.computed, len(sequence.ids)) // self.page_size
        if len(sequence.keys) * self.page_size > len(sequence.ids):  # it went back: these are keys of a text that is no more
            del sequence.keys[len(sequence.ids) // self.page_size :]
        if not self.reuse or full <= sequence.published:
            sequence.published = min(full, sequence.published)
            return
        self._extend_keys(sequence, full)
        for i in range(sequence.published, full):
            page = sequence.pages[i]
            parent = sequence.keys[i - 1] if i else self.root(sequence.salt)
            known = self.index.publish(page, parent, self._tokens(sequence, i), sequence.keys[i])
            if known != page:
                self.table.share([known])
                self.table.free([page])
                sequence.pages[i] = known
                self.changes += 1
        sequence.published = full

    def publish_tail(self, sequence: RunningRequest) -> None:
        """Make known the last page too, which is not full."""
        self.publish(sequence)
        known = min(sequence.computed, len(sequence.ids))
        full, rest = divmod(known, self.page_size)
        if not self.reuse or not rest or self.table.count(sequence.pages[full]) > 1:
            return
        parent = sequence.keys[full - 1] if full else self.root(sequence.salt)
        self.index.publish(sequence.pages[full], parent, sequence.page_ids[full * self.page_size : known])

    def release(self, sequence: RunningRequest, *, keep: bool = True) -> None:
        """Take all pages from a sequence. keep: what it computed stays known until the pages are needed; False: it is not to be trusted."""
        if sequence.pages:
            if keep:
                self.publish_tail(sequence)
            else:
                for page in sequence.pages:
                    if self.table.count(page) == 1:
                        self.index.forget(page)
            pages, sequence.pages = sequence.pages, []
            self.table.free(pages)
            self.changes += 1
        sequence.computed = sequence.published = 0

    def clear(self) -> int:
        """Forget what is cached for reuse; returns the number of pages. Pages of running requests stay with them."""
        pages = [page for page in range(self.table.num_pages) if self.table.state(page) == "cached"]
        for page in pages:
            self.index.forget(page)
        return len(pages)

    def fork(self, source: RunningRequest, target: RunningRequest) -> None:
        """Give `target` the cache of `source`: every page is shared, and copied when one of them writes to it."""
        self.release(target)
        self.table.share(source.pages)
        target.pages, target.computed = list(source.pages), source.computed
        target.keys, target.published = list(source.keys[: source.published]), source.published
        self.changes += 1

    def _take_partial(self, sequence: RunningRequest, page: int | None, common: int) -> None:
        """Continue a known page that is not full, or differs further on: in place if it has no references, else in a copy."""
        if page is None:
            return
        table = self.table
        if table.count(page) == 0 and common == self.index.filled(page):
            table.share([page])
            sequence.pages.append(page)
        elif common >= MIN_COMMON and table.num_free > (table.count(page) == 0):
            table.share([page])  # so that it is not the one that is evicted for its copy
            (mine,) = table.allocate(1)
            self._copy(page, mine)
            table.free([page])
            sequence.pages.append(mine)
        else:
            return
        sequence.computed += common

    def _extend_keys(self, sequence: RunningRequest, full: int) -> None:
        keys = sequence.keys
        for i in range(len(keys), full):
            keys.append(chain_key(keys[-1] if keys else self.root(sequence.salt), self._tokens(sequence, i)))

    def _tokens(self, sequence: RunningRequest, i: int) -> list[int]:
        return sequence.page_ids[i * self.page_size : (i + 1) * self.page_size]

"""Pages of the cache: reference counts, pages kept for reuse, and the prefix index that finds them. Knows no tensors and no requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from exl2nb.core.errors import OutOfPages

KEY_BYTES = 16
MAX_COMPARED_PAGES = 16  # partial pages compared per match, the latest first


class PageAllocator:
    """Page ids with reference counts, and the unreferenced pages in the order of their last use.

    A page is used (referenced), cached (unreferenced, its content marked with `keep`) or free. Cached pages count as free: when no other
    page is left, `allocate` evicts the least recently used of them.

    Invariant: an unreferenced page is exactly once on the free list or among the cached pages. Freeing an unreferenced page or sharing a
    free one is a bug of the caller and an assertion.

    Args:
        num_pages: ids run from 0 to num_pages - 1.

    Example:
        >>> pages = PageAllocator(4)
        >>> ids = pages.allocate(2); pages.share(ids); pages.free(ids); pages.num_free
        2
        >>> pages.keep(ids[0]); pages.free(ids); pages.num_free, pages.state(ids[0]), pages.state(ids[1])
        (4, 'cached', 'free')
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, num_pages
        self.num_pages = num_pages
        self.evictions = 0  # cached pages evicted since the table was made
        self.clock = 0  # logical time: +1 per allocate, share and free
        self.on_evict: Callable[[int], None] | None = None  # called before a cached page is evicted
        self._counts = [0] * num_pages
        self._kept = bytearray(num_pages)
        self._last_use = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: lowest id first, the page freed last is taken next
        self._cached: dict[int, None] = {}  # least recently used first

    @property
    def num_free(self) -> int:
        """Unreferenced pages, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unreferenced pages whose content is kept."""
        return len(self._cached)

    def count(self, page: int) -> int:
        """References to `page`."""
        assert 0 <= page < self.num_pages, page
        return self._counts[page]

    def state(self, page: int) -> str:
        """One of "used", "cached" and "free"."""
        return "used" if self.count(page) else "cached" if page in self._cached else "free"

    def kept(self, page: int) -> bool:
        """Whether the content of `page` is kept, or will be once its last reference is gone."""
        return bool(self._kept[page])

    def last_use(self, page: int) -> int:
        """The clock when the page was last allocated, shared or freed; 0 = never."""
        return self._last_use[page]

    def allocate(self, n: int) -> list[int]:
        """Take `n` unreferenced pages, one reference each; all or none.

        Raises:
            OutOfPages: fewer are free; nothing was taken.
        """
        assert n >= 0, n
        if n > self.num_free:
            raise OutOfPages(f"request needs {n} pages, {self.num_free} free of {self.num_pages}; lower max_tokens or raise cache_tokens")
        plain = min(n, len(self._free))
        taken = self._free[len(self._free) - plain :][::-1]
        del self._free[len(self._free) - plain :]
        while len(taken) < n:
            taken.append(self._evict())
        self.clock += 1
        for page in taken:
            self._counts[page] = 1
            self._last_use[page] = self.clock
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Add a reference to each of `pages`; every one must be used or cached."""
        assert all(self.count(page) > 0 or page in self._cached for page in pages), f"share of a free page: {list(pages)}"
        self.clock += 1
        for page in pages:
            if self._counts[page] == 0:
                del self._cached[page]
            self._counts[page] += 1
            self._last_use[page] = self.clock

    def free(self, pages: Sequence[int]) -> None:
        """Remove one reference from each of `pages`, the last page first, so that the end of a text is evicted before its beginning.

        An unreferenced page becomes free, or cached after `keep`. Freeing an unreferenced page is an assertion.
        """
        self.clock += 1
        for page in reversed(pages):
            assert self.count(page) > 0, f"double free of page {page}"
            self._counts[page] -= 1
            self._last_use[page] = self.clock
            if self._counts[page] == 0:
                if self._kept[page]:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """Keep the content of a referenced page for reuse once its last reference is gone."""
        assert self.count(page) > 0, f"keep of page {page}, which has no references"
        self._kept[page] = 1

    def drop(self, page: int) -> None:
        """Forget the content of `page`; a cached page becomes free at once."""
        self._kept[page] = 0
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def _evict(self) -> int:
        page = next(iter(self._cached))
        if self.on_evict is not None:
            self.on_evict(page)
        self.evictions += 1
        self._cached.pop(page, None)
        self._kept[page] = 0
        if self._free and self._free[-1] == page:  # on_evict called drop
            self._free.pop()
        return page


# ---- Prefix cache index: a page's key is a hash of its tokens and of all tokens before them.


class PageContent(NamedTuple):
    """Content of a page. parent: key of the text before it. key: of the text with it, None while the page is not full. tokens: int32."""

    parent: bytes
    key: bytes | None
    tokens: np.ndarray


class PrefixMatch(NamedTuple):
    """The cached beginning of a text: full pages in order, then `common` tokens of page `partial` (0 and None: no partial page)."""

    pages: list[int]
    partial: int | None
    common: int


def root_key(salt: str) -> bytes:
    """Key of the empty text. salt: everything besides tokens that changes a page's content (cache mode, adapter)."""
    return blake2b(salt.encode(), digest_size=KEY_BYTES, person=b"exl2nb pages").digest()


def chain_key(parent: bytes, tokens: Sequence[int] | np.ndarray) -> bytes:
    """Key of a text one full page longer than that of `parent`."""
    return blake2b(parent + np.asarray(tokens, np.int32).tobytes(), digest_size=KEY_BYTES).digest()


class PrefixIndex:
    """The published pages of a table.

    Args:
        table: the pages; published pages are kept when unreferenced, evicted pages leave the index.
        page_size: tokens per page.
    """

    def __init__(self, table: PageAllocator, page_size: int) -> None:
        self._table, self._size = table, page_size
        self._entries: list[PageContent | None] = [None] * table.num_pages
        self._filled = [0] * table.num_pages
        self._full: dict[bytes, int] = {}
        self._children: dict[bytes, dict[int, None]] = {}
        table.on_evict = self.forget

    def __len__(self) -> int:
        return sum(entry is not None for entry in self._entries)

    def entry(self, page: int) -> PageContent | None:
        """The published content of `page`."""
        return self._entries[page]

    def filled(self, page: int) -> int:
        """Number of published tokens of `page`; 0 = none."""
        return self._filled[page]

    def find(self, key: bytes) -> int | None:
        """The full page with this key."""
        return self._full.get(key)

    def match(self, ids: Sequence[int], keys: Sequence[bytes], root: bytes, *, limit: int) -> PrefixMatch:
        """Find the longest cached beginning of a text.

        Args:
            ids: the text. keys: of its full pages in order. root: key of the empty text. limit: tokens to match at most.
        """
        pages: list[int] = []
        for key in keys[: limit // self._size]:
            page = self._full.get(key)
            if page is None:
                break
            pages.append(page)
        at = len(pages) * self._size
        partial, common = self.match_partial(ids[at : min(limit, at + self._size)], keys[len(pages) - 1] if pages else root)
        return PrefixMatch(pages, partial, common)

    def match_partial(self, ids: Sequence[int], parent: bytes) -> tuple[int | None, int]:
        """The page below `parent` that shares most tokens with the beginning of `ids`, and how many."""
        best, common = None, 0
        children = self._children.get(parent)
        if not children or not ids:
            return best, common
        wanted = np.asarray(ids, np.int32)
        for page in list(children)[: -MAX_COMPARED_PAGES - 1 : -1]:
            entry = self._entries[page]
            assert entry is not None
            length = min(len(entry.tokens), len(wanted))
            differs = entry.tokens[:length] != wanted[:length]
            same = int(differs.argmax()) if differs.any() else length
            if same > common:
                best, common = page, same
        return best, common

    def publish(self, page: int, parent: bytes, tokens: Sequence[int] | np.ndarray, key: bytes | None = None) -> int:
        """Enter the content of a page.

        Args:
            page: referenced. parent: key of the text before it. tokens: 1 to page_size of them. key: of a full page.

        Returns:
            The page to use for this content: another one where a full page with this content is known already; then nothing is published.
        """
        if key is not None and (known := self._full.get(key)) is not None:
            return known
        self.forget(page)
        self._entries[page] = PageContent(parent, key, np.asarray(tokens, np.int32))
        self._filled[page] = len(tokens)
        if key is not None:
            self._full[key] = page
        self._children.setdefault(parent, {})[page] = None
        self._table.keep(page)
        return page

    def cut(self, page: int, length: int) -> None:
        """The page's tokens from `length` on are about to be overwritten."""
        entry = self._entries[page]
        if entry is None or len(entry.tokens) <= length:
            return
        self.forget(page)
        if length:
            self.publish(page, entry.parent, entry.tokens[:length])

    def forget(self, page: int) -> None:
        """Remove a page from the index. Harmless when nothing was published."""
        entry = self._entries[page]
        if entry is None:
            return
        self._entries[page], self._filled[page] = None, 0
        if entry.key is not None:
            del self._full[entry.key]
        siblings = self._children[entry.parent]
        del siblings[page]
        if not siblings:
            del self._children[entry.parent]
        self._table.drop(page)

"""Which pages of the cache are taken, by how many, and which free ones still hold something. Knows neither tensors nor sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from exl2nb.core.errors import OutOfPages


class PageTable:
    """Page ids with reference counts, and the pages nobody holds in the order of their last use.

    A page is used (it has holders), cached (nobody holds it, its content was marked with `keep`) or free. Cached pages count as free: when
    `allocate` has no other left it evicts them, the one used longest ago first.

    Invariant: a page without holders stands exactly once, on the free list or among the cached ones. Breaking it (freeing or sharing a page
    that holds nothing) is a bug of the caller and an assertion.

    Args:
        num_pages: ids run from 0 to num_pages - 1.

    Example:
        >>> pages = PageTable(4)
        >>> ids = pages.allocate(2); pages.share(ids); pages.free(ids); pages.num_free
        2
        >>> pages.keep(ids[0]); pages.free(ids); pages.num_free, pages.state(ids[0]), pages.state(ids[1])
        (4, 'cached', 'free')
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, num_pages
        self.num_pages = num_pages
        self.evictions = 0  # cached pages that were given away, since the table was made
        self.clock = 0  # counts what happens to pages; the last use of a page is a value of it
        self.on_evict: Callable[[int], None] | None = None  # told before a cached page is given away
        self._counts = [0] * num_pages
        self._kept = bytearray(num_pages)
        self._last_use = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the lowest id comes first, a page freed last is taken next
        self._cached: dict[int, None] = {}  # the one used longest ago stands first

    @property
    def num_free(self) -> int:
        """Pages nobody holds, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages nobody holds whose content is kept."""
        return len(self._cached)

    def count(self, page: int) -> int:
        """Holders of `page`."""
        assert 0 <= page < self.num_pages, page
        return self._counts[page]

    def state(self, page: int) -> str:
        """One of "used", "cached" and "free"."""
        return "used" if self.count(page) else "cached" if page in self._cached else "free"

    def last_use(self, page: int) -> int:
        """The clock when somebody last took or gave up the page; 0 = never."""
        return self._last_use[page]

    def allocate(self, n: int) -> list[int]:
        """Take `n` pages nobody holds, each with one holder; all or none.

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
        """Add a holder to each of `pages`; every one must be used or cached."""
        assert all(self.count(page) > 0 or page in self._cached for page in pages), f"share of a free page: {list(pages)}"
        self.clock += 1
        for page in pages:
            if self._counts[page] == 0:
                del self._cached[page]
            self._counts[page] += 1
            self._last_use[page] = self.clock

    def free(self, pages: Sequence[int]) -> None:
        """Remove one holder from each of `pages`, the last first, so that the end of a text is evicted before its beginning.

        A page without holders is free again, or cached where `keep` was said. Freeing a page without holders is an assertion.
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
        """The content of a page that is held is worth keeping when nobody holds it any more."""
        assert self.count(page) > 0, f"keep of page {page}, which nobody holds"
        self._kept[page] = 1

    def drop(self, page: int) -> None:
        """The content of `page` is worth nothing any more; a cached page is free at once."""
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
        if self._free and self._free[-1] == page:  # on_evict said drop
            self._free.pop()
        return page

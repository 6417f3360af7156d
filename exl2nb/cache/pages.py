"""Reference counts of the cache's pages, and which free pages keep content for prefix reuse. Knows neither tensors nor sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from exl2nb.core.errors import OutOfPages


class PageTable:
    """Page ids with reference counts, and the unreferenced pages in the order of their last use.

    A page is used (referenced), cached (unreferenced, its content marked with `keep`) or free. Cached pages count as free: when no other
    page is left, `allocate` evicts the least recently used of them.

    Invariant: an unreferenced page is exactly once on the free list or among the cached pages. Freeing an unreferenced page or sharing a
    free one is a bug of the caller and an assertion.

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

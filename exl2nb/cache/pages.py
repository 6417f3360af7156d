"""Which pages of the cache are taken, and by how many. Knows neither tensors nor sequences."""

from __future__ import annotations

from collections.abc import Sequence

from exl2nb.core.errors import OutOfPages


class PageTable:
    """Page ids with reference counts.

    Invariant: a page is free exactly when its count is 0, and every free page stands once on the free list. Breaking it (freeing or sharing
    a page that is not taken) is a bug of the caller and an assertion.

    Args:
        num_pages: ids run from 0 to num_pages - 1.

    Example:
        >>> pages = PageTable(4)
        >>> ids = pages.allocate(2); pages.share(ids); pages.free(ids); pages.num_free
        2
        >>> pages.free(ids); pages.num_free
        4
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, num_pages
        self.num_pages = num_pages
        self._counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the lowest id comes first, a page freed last is taken next

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def count(self, page: int) -> int:
        """Holders of `page`."""
        assert 0 <= page < self.num_pages, page
        return self._counts[page]

    def allocate(self, n: int) -> list[int]:
        """Take `n` free pages, each with one holder; all or none.

        Raises:
            OutOfPages: fewer are free; nothing was taken.
        """
        assert n >= 0, n
        if n > len(self._free):
            raise OutOfPages(f"request needs {n} pages, {len(self._free)} free of {self.num_pages}; lower max_tokens or raise cache_tokens")
        taken = self._free[len(self._free) - n :][::-1]
        del self._free[len(self._free) - n :]
        for page in taken:
            self._counts[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Add a holder to each of `pages`; every one must be taken."""
        assert all(self.count(page) > 0 for page in pages), f"share of a free page: {list(pages)}"
        for page in pages:
            self._counts[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Remove one holder from each of `pages`; a page without holders is free again. Freeing a free page is an assertion."""
        for page in pages:
            assert self.count(page) > 0, f"double free of page {page}"
            self._counts[page] -= 1
            if self._counts[page] == 0:
                self._free.append(page)

"""Prefix cache index: a page's key is a hash of its tokens and of all tokens before them. Knows no tensors and no requests."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from exl2nb.cache.pages import PageTable

KEY_BYTES = 16
CANDIDATES = 16  # partial pages compared per match, the latest first


class Entry(NamedTuple):
    """Content of a page. parent: key of the text before it. key: of the text with it, None while the page is not full. tokens: int32."""

    parent: bytes
    key: bytes | None
    tokens: np.ndarray


class Match(NamedTuple):
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

    def __init__(self, table: PageTable, page_size: int) -> None:
        self._table, self._size = table, page_size
        self._entries: list[Entry | None] = [None] * table.num_pages
        self._filled = [0] * table.num_pages
        self._full: dict[bytes, int] = {}
        self._children: dict[bytes, dict[int, None]] = {}
        table.on_evict = self.forget

    def __len__(self) -> int:
        return sum(entry is not None for entry in self._entries)

    def entry(self, page: int) -> Entry | None:
        """The published content of `page`."""
        return self._entries[page]

    def filled(self, page: int) -> int:
        """Number of published tokens of `page`; 0 = none."""
        return self._filled[page]

    def find(self, key: bytes) -> int | None:
        """The full page with this key."""
        return self._full.get(key)

    def match(self, ids: Sequence[int], keys: Sequence[bytes], root: bytes, *, limit: int) -> Match:
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
        return Match(pages, partial, common)

    def match_partial(self, ids: Sequence[int], parent: bytes) -> tuple[int | None, int]:
        """The page below `parent` that shares most tokens with the beginning of `ids`, and how many."""
        best, common = None, 0
        children = self._children.get(parent)
        if not children or not ids:
            return best, common
        wanted = np.asarray(ids, np.int32)
        for page in list(children)[: -CANDIDATES - 1 : -1]:
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
        self._entries[page] = Entry(parent, key, np.asarray(tokens, np.int32))
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

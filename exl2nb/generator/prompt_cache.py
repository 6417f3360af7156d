"""`llm.cache`: what the pages hold, kept across requests and across sessions. The caller's side, any thread."""

from __future__ import annotations

import os
from collections.abc import Callable

from exl2nb.core.options import check_flag
from exl2nb.core.show import facts
from exl2nb.generator import cache_file, snapshot
from exl2nb.generator.cache_file import CacheFile
from exl2nb.generator.engine import Engine
from exl2nb.generator.snapshot import CacheSnapshot


class PromptCache:
    """The pages of one model.

    What a request has computed stays in the cache until the room is needed. A request whose prompt begins like an earlier one does not
    compute that beginning again (`completion.timings.reused_tokens` says how much), with the same bits as if it had.

    Args:
        engine: whose pages.
        fingerprint: names what the pages depend on; called when a file is saved or loaded.

    Example: a prompt is computed once, in this session and in the next.
        >>> import exl2nb as ex
        >>> with ex.demo(progress=None) as llm:
        ...     prompt = "The rain fell on the old town and its harbour. " * 30
        ...     first, again = (llm.generate(prompt, max_tokens=1, temperature=0).timings for _ in range(2))
        ...     kept, forgotten = llm.cache.save("town.cache"), llm.cache.clear()
        ...     restored = llm.cache.load("town.cache")
        >>> first.reused_tokens, again.reused_tokens == again.prompt_tokens - 1, restored.tokens >= again.prompt_tokens - 1
        (0, True, True)
    """

    def __init__(self, engine: Engine, fingerprint: Callable[[], str]) -> None:
        self._engine, self._fingerprint = engine, fingerprint

    @property
    def reuse(self) -> bool:
        """Whether beginnings are reused; set it to False to compute every prompt in full. What is cached stays."""
        return self._engine.pager.reuse

    @reuse.setter
    def reuse(self, on: bool) -> None:
        check_flag("cache.reuse", on)
        with self._engine.exclusive():
            self._engine.pager.reuse = on

    def snapshot(self) -> CacheSnapshot:
        """Every page and every request at this moment; waits for the engine's current step.

        Raises:
            EngineClosed: the model was closed.
        """
        loop = self._engine.loop
        with self._engine.exclusive():
            scheduler = loop.scheduler
            return snapshot.take(self._engine.pager, scheduler.running, scheduler.waiting, preemptions=scheduler.preemptions)

    def save(self, path: str | os.PathLike[str]) -> CacheFile:
        """Write the cached pages to a safetensors file, so that another session can go on from them.

        Raises:
            OptionError: nothing is cached. ConversionError: the disk is full or the directory cannot be written.
        """
        engine, name = self._engine, self._fingerprint()
        with engine.exclusive():
            return cache_file.save(path, engine.pager, engine.cache, model=name)

    def load(self, path: str | os.PathLike[str]) -> CacheFile:
        """Add the pages of a file to the cache, as far as pages are free.

        Raises:
            FormatError: the file is damaged. OptionError: it belongs to another model or another kind of cache. ModelNotFound: no file.
        """
        engine, name = self._engine, self._fingerprint()
        with engine.exclusive():
            return cache_file.load(path, engine.pager, engine.cache, model=name, vocab_size=engine.vocab_size)

    def clear(self) -> int:
        """Forget what is cached; returns the number of pages. Pages of running requests stay with them."""
        with self._engine.exclusive():
            pager = self._engine.pager
            pages = [page for page in range(pager.table.num_pages) if pager.table.state(page) == "cached"]
            for page in pages:
                pager.index.forget(page)
            return len(pages)

    def _repr_html_(self) -> str:
        spec, pages = self._engine.spec, self._engine.pages
        rows = {
            "room": f"{spec.num_tokens} tokens in {pages.num_pages} pages, {spec.mode}, {spec.total_bytes / 2**20:.1f} MiB",
            "used": f"{pages.num_pages - pages.num_free} pages",
            "kept for later": f"{pages.num_cached} pages",
            "free": f"{pages.num_free - pages.num_cached} pages",
            "evicted so far": f"{pages.evictions} pages",
        }
        return facts(f"prompt cache{'' if self.reuse else ', reuse off'}{' (closed)' if self._engine.closed else ''}", rows)

    def __repr__(self) -> str:
        spec, pages = self._engine.spec, self._engine.pages
        return (
            f"PromptCache({spec.num_tokens} tokens, {pages.num_pages - pages.num_free} pages used, {pages.num_cached} cached, "
            f"{pages.num_free - pages.num_cached} free, {pages.evictions} evicted{'' if self.reuse else ', reuse off'})"
        )

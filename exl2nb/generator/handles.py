"""Several requests as one thing: their chunks as they come, each with the number of its request. Knows no engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import overload

from exl2nb.core.flag import Flag
from exl2nb.generator.handle import TICK_S, Handle
from exl2nb.generator.request import Chunk, Completion


class Handles(Sequence[Handle]):
    """The handles of requests that were made together, in order; `handles[i]` is one of them.

    Iterate `chunks()` for (number of the request, `Chunk`) in the order in which they come, or call `results()`. `cancel()`, an exception
    inside the loop and garbage collection end all requests.

    Example:
        >>> import exl2nb as ex
        >>> with ex.demo(progress=None) as llm:
        ...     both = llm.stream(["It was", "The old man"], max_tokens=4, temperature=0)
        ...     texts = ["", ""]
        ...     for number, chunk in both.chunks():
        ...         texts[number] += chunk.text
        ...     texts == [completion.text for completion in both.results()]
        True
    """

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = list(handles)
        self._bell = Flag()
        for handle in self._handles:
            handle.on_news(self._bell.set)

    @overload
    def __getitem__(self, index: int) -> Handle: ...
    @overload
    def __getitem__(self, index: slice) -> list[Handle]: ...
    def __getitem__(self, index: int | slice) -> Handle | list[Handle]:
        return self._handles[index]

    def __len__(self) -> int:
        return len(self._handles)

    def chunks(self) -> Iterator[tuple[int, Chunk]]:
        """What comes, and from which request; ends when all have ended.

        Raises:
            GenerationError: the engine failed on one of them; all are cancelled.
        """
        open_ = dict(enumerate(self._handles))
        try:
            while open_:
                self._bell.clear()
                yield from self._poll(open_)
                if open_:
                    self._bell.wait(TICK_S)  # short, so that KeyboardInterrupt arrives
        finally:
            if open_:
                self.cancel()

    async def achunks(self) -> AsyncIterator[tuple[int, Chunk]]:
        """`chunks` for event loops."""
        open_ = dict(enumerate(self._handles))
        try:
            while open_:
                self._bell.clear()
                for item in self._poll(open_):
                    yield item
                while open_ and not self._bell.is_set():
                    await asyncio.sleep(TICK_S / 10)
        finally:
            if open_:
                self.cancel()

    def results(self, timeout_s: float | None = None) -> list[Completion]:
        """Wait for all answers; errors as in `Handle.result`. If waiting is interrupted, all are cancelled."""
        try:
            return [handle.result(timeout_s) for handle in self._handles]
        except TimeoutError:
            raise
        except BaseException:
            self.cancel()
            raise

    async def aresults(self) -> list[Completion]:
        """`results` for event loops."""
        try:
            return [await handle.aresult() for handle in self._handles]
        except BaseException:
            self.cancel()
            raise

    @property
    def done(self) -> bool:
        """True once the engine is through with all of them."""
        return all(handle.done for handle in self._handles)

    def cancel(self) -> None:
        """End all requests."""
        for handle in self._handles:
            handle.cancel()

    close = cancel

    def __enter__(self) -> Handles:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __repr__(self) -> str:
        return f"Handles({len(self)} requests, {sum(handle.done for handle in self._handles)} done)"

    @staticmethod
    def _poll(open_: dict[int, Handle]) -> Iterator[tuple[int, Chunk]]:
        for number, handle in list(open_.items()):
            chunk = handle.poll()
            if chunk is not None:
                yield number, chunk
            if handle.over:
                del open_[number]
                handle.result()  # raises what the engine failed on

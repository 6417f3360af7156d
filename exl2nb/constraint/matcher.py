"""One answer's position in its grammar. The next mask is computed on another thread during the model's step, unless it is cheap."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from exl2nb.constraint.engine import explained
from exl2nb.core.errors import StructureError
from exl2nb.sampling.constraint import Allowed

CHEAP_S = 40e-6  # of a mask; handing it to another thread and taking it back costs the engine's thread 25 us (2 cores, 2026-11)
FORGET = 0.8
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


class MatcherConstraint:
    """A `Constraint` around a matcher of the mask engine.

    Args:
        matcher: this object's own, at the place to start from.
        vocab_size: columns of the logits.
        what: the kind of structure, for messages.
    """

    def __init__(self, matcher: Any, vocab_size: int, what: str) -> None:
        self._matcher, self._vocab_size, self._what = matcher, vocab_size, what
        self._bits = np.zeros((vocab_size + 31) // 32, np.int32)
        self._future: Future[Allowed] | None = None
        self._ready: Allowed | None = None
        self._cost_s = 1.0  # decaying maximum of the cost of a mask; 1.0 until the first one
        self._finished = bool(matcher.is_stopped())
        self._prepare()

    @property
    def finished(self) -> bool:
        """True where the text is complete and nothing may follow, or its end was chosen."""
        return self._finished

    @property
    def accepting(self) -> bool:
        """True where the text could end here."""
        self._settle()
        return bool(self._matcher.is_accepting())

    def allowed(self) -> Allowed:
        """The tokens that may come next; see `Constraint.allowed`.

        Raises:
            StructureError: the engine gave up, or no token of the vocabulary can follow.
        """
        if self._ready is None:
            future, self._future = self._future, None
            # not started yet: nothing is gained by waiting for a thread
            self._ready = self._compute() if future is None or future.cancel() else future.result()
        return self._ready

    def accept(self, token_id: int, /) -> None:
        """Advance by this token.

        Raises:
            StructureError: it is not allowed here; the position does not change.
        """
        self._settle()
        if self._matcher.validate_tokens([token_id]) != 1 or not self._matcher.consume_token(token_id):
            raise self._refused(token_id)
        self._moved()

    def rewind(self, count: int, /) -> None:
        """Remove the last `count` tokens."""
        self._settle()
        if count and not self._matcher.rollback(count):
            raise StructureError(f"{count} tokens cannot be taken back: {str(self._matcher.get_error())[:200]}")
        self._moved()

    def copy(self) -> MatcherConstraint:
        """An independent copy at the same position."""
        self._settle()
        return MatcherConstraint(self._matcher.deep_copy(), self._vocab_size, self._what)

    def forced(self) -> list[int]:
        """Tokens that must follow whatever the logits say; often none."""
        self._settle()
        return list(self._matcher.compute_ff_tokens())

    # ---- private

    def _refused(self, token_id: int) -> StructureError:
        """Why a token was refused, from a copy of the matcher."""
        other = self._matcher.deep_copy()
        other.consume_token(token_id)
        message = other.get_error()
        if any("max is" in line or "too many" in line.lower() for line in message.split("<state>")[0].splitlines()):
            return StructureError(explained(self._what, message))
        return StructureError(f"token {token_id} does not fit the {self._what} at this place; it was not drawn from the allowed tokens")

    def _moved(self) -> None:
        self._ready, self._future = None, None
        self._finished = bool(self._matcher.is_stopped())
        if not self._finished:
            self._prepare()

    def _prepare(self) -> None:
        """Start computing the mask that `allowed` will return."""
        if self._cost_s < CHEAP_S:
            return
        try:
            self._future = _workers().submit(self._compute)
        except RuntimeError:  # the interpreter is ending: `allowed` computes it
            self._future = None

    def _settle(self) -> None:
        """Wait until no other thread uses the matcher."""
        if self._future is not None and not self._future.cancel():
            self._ready = self._future.result()
        self._future = None

    def _compute(self) -> Allowed:
        """The mask at the current position."""
        started = time.perf_counter()
        try:
            return self._mask()
        finally:
            self._cost_s = max(time.perf_counter() - started, FORGET * self._cost_s if self._cost_s < 1.0 else 0.0)

    def _mask(self) -> Allowed:
        matcher, bits = self._matcher, self._bits
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if matcher.is_error():
            raise StructureError(explained(self._what, matcher.get_error()))
        if not bits.view(np.uint32).max():
            raise StructureError(f"the {self._what} cannot be satisfied from here: no token of the vocabulary may follow")
        return Allowed(bits)


def _workers() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(1, thread_name_prefix="exl2nb-mask")
        return _pool

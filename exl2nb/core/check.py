"""Exercises of the notebooks: whether an answer is right, and a hint where it is not."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from typing import Any

from exl2nb.core.errors import OptionError
from exl2nb.core.options import check_range, shown


class Check:
    """What `check` found: true where the answer is right. right: the same. words: what is shown."""

    def __init__(self, right: bool, words: str) -> None:
        self.right, self.words = right, words

    def __bool__(self) -> bool:
        return self.right

    def __repr__(self) -> str:
        return self.words

    def _repr_html_(self) -> str:
        mark, colour = ("✓", "46,125,50") if self.right else ("✗", "211,47,47")
        style = f"border-left:3px solid rgb({colour});padding:4px 10px"
        return f'<div style="{style}"><b>{mark}</b> {html.escape(self.words)}</div>'


def check(answer: Any, right: Any, *, hint: str, why: str = "", tolerance: float = 0.01) -> Check:
    """Say whether the answer to an exercise is right; where it is not, give a hint and not the answer.

    Args:
        answer: what the reader found; None or ... = nothing yet.
        right: the right answer, or a function of the answer that says whether it is right.
        hint: shown while it is not. why: shown when it is.
        tolerance: relative difference at which two numbers still agree.

    Raises:
        OptionError: no hint, or a tolerance out of range.

    Example:
        >>> check(6, 7, hint="count again")
        Not yet: 6 is too small; count again.
        >>> check(4.001, 4.0, hint="divide by the weights")
        Right.
        >>> check([1, 2], lambda found: sorted(found) == [1, 2], hint="two of them", why="Both are even.").right
        True
    """
    if not isinstance(hint, str) or not hint:
        raise OptionError(f"check: hint is {shown(hint)}; expected a text")
    check_range("tolerance", tolerance, 0, 1, where="check")
    hint = hint.rstrip(".")
    if answer is None or answer is ...:
        return Check(False, f"Not yet: {hint}.")
    if callable(right):
        good, said = _holds(right, answer), f"{shown(answer)} is not it"
    else:
        good, said = _equal(answer, right, tolerance)
    return Check(True, f"Right. {why}".strip()) if good else Check(False, f"Not yet: {said}; {hint}.")


def _holds(right: Callable[[Any], Any], answer: Any) -> bool:
    try:
        return bool(right(answer))
    except (TypeError, ValueError, LookupError, AttributeError):  # an answer of another kind
        return False


def _equal(answer: Any, right: Any, tolerance: float) -> tuple[bool, str]:
    try:
        one, other = float(answer), float(right)
    except (TypeError, ValueError, RuntimeError):
        return bool(answer == right), f"{shown(answer)} is not it"
    if math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-12):
        return True, ""
    return False, f"{shown(answer)} is too {'small' if one < other else 'large'}" if one == one else "that is no number"

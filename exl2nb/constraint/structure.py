"""What an answer must look like, compiled for one model: starts a constraint per request and reads the answer back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from exl2nb.constraint.engine import compile_grammar
from exl2nb.constraint.matcher import MatcherConstraint
from exl2nb.constraint.schema import json_schema
from exl2nb.core.errors import OptionError, StructureError
from exl2nb.tokenizer.tokenizer import Tokenizer

KINDS = ("schema", "regex", "choice", "grammar")


class Structure:
    """One schema, regex, choice or grammar. Never changes; any number of requests may share it.

    Args:
        kind: one of `KINDS`.
        source: see `structure_of`.
        tokenizer: of the model.
        vocab_size: columns of its logits.

    Raises:
        StructureError: it cannot be used, or nothing satisfies it; says why. MissingDependency: the mask engine is not installed.
    """

    def __init__(self, kind: str, source: Any, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.kind, self._given, self._vocab_size = kind, source, vocab_size
        self.source, self._read = _readers(kind, source)
        self._matcher = compile_grammar(kind, self.source, tokenizer, vocab_size)

    def start(self) -> MatcherConstraint:
        """The constraint of one request, at the beginning of the answer."""
        if self._matcher is None:
            raise StructureError(
                f"this {self.kind} was read from a file or another process and belongs to no model; give it to generate again"
            )
        return MatcherConstraint(self._matcher.deep_copy(), self._vocab_size, self.kind)

    def parse(self, text: str, *, complete: bool = True) -> Any:
        """The value of an answer: plain data for a schema, an object for a type, the text itself otherwise.

        Args:
            text: the answer.
            complete: False where generation ended before the structure was complete.

        Raises:
            StructureError: the answer is incomplete, or its type refuses it (what a schema cannot say, such as a validator of its own).
        """
        if not complete:
            raise StructureError(f"the answer ended before the {self.kind} was complete: ...{text[-60:]!r}; raise max_tokens")
        try:
            return self._read(text)
        except ValueError as error:  # pydantic's and json's errors both are
            raise StructureError(f"the answer cannot be read: {str(error)[:300]}; it was {text[:200]!r}") from error

    def __deepcopy__(self, memo: object) -> Structure:
        return self  # never changes

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled completion keeps what reads its text; the matcher stays with its model."""
        return _restored, (self.kind, self._given)

    def __repr__(self) -> str:
        shown = str(self.source)
        return f"Structure({self.kind}: {shown if len(shown) <= 60 else shown[:57] + '...'})"


def structure_of(options: dict[str, Any], tokenizer: Tokenizer, vocab_size: int, *, where: str) -> Structure | None:
    """Take the structure out of a request's options: schema (see `json_schema`), regex, choice (texts) or grammar (Lark or EBNF).

    Args:
        options: of one request; what is found is removed.
        tokenizer: of the model.
        vocab_size: of its logits.
        where: the public call, for messages.

    Returns:
        None where nothing was asked for.

    Raises:
        OptionError: more than one was given. StructureError, MissingDependency: see `Structure`.
    """
    given = {kind: value for kind in KINDS if (value := options.pop(kind, None)) is not None}
    if not given:
        return None
    if len(given) > 1:
        raise OptionError(f"{where}: got {' and '.join(given)}; an answer can follow one of them")
    ((kind, source),) = given.items()
    try:
        return Structure(kind, source, tokenizer, vocab_size)
    except StructureError as error:
        raise StructureError(f"{where}: {error}") from error


def _readers(kind: str, source: Any) -> tuple[Any, Callable[[str], Any]]:
    """The source as the mask engine takes it, and what makes a value of an answer."""
    if kind == "schema":
        return json_schema(source)
    if kind == "choice":
        return _texts(source), str
    if not isinstance(source, str) or not source:
        raise StructureError(f"{kind} is {str(source)[:80]!r}; expected a text that is not empty")
    return source, str


def _restored(kind: str, source: Any) -> Structure:
    made = Structure.__new__(Structure)
    made.kind, made._given, made._vocab_size, made._matcher = kind, source, 0, None
    made.source, made._read = _readers(kind, source)
    return made


def _texts(source: Any) -> list[str]:
    texts = list(source) if isinstance(source, Iterable) and not isinstance(source, str) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise StructureError(f"choice is {str(source)[:80]!r}; expected a list of texts, none of them empty")
    return list(dict.fromkeys(texts))

"""What an answer must look like, compiled for one model: starts a matcher for each request, and reads the answer back."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np

from exl2nb.constraint.dead_ends import without_dead_ends
from exl2nb.constraint.mask_engine import byte_matcher, compile_grammar, explained
from exl2nb.core.errors import MissingDependency, OptionError, StructureError
from exl2nb.core.options import shown
from exl2nb.sampling.constraint import Allowed
from exl2nb.tokenizer.tokenizer import Tokenizer

STRUCTURE_KINDS = ("schema", "regex", "choice", "grammar")


class Structure:
    """One schema, regex, choice or grammar. Never changes; any number of requests may share it.

    Args:
        kind: one of `STRUCTURE_KINDS`.
        source: see `structure_of`.
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

    Returns:
        None where nothing was asked for.

    Raises:
        OptionError: more than one was given. StructureError, MissingDependency: see `Structure`.
    """
    given = {kind: value for kind in STRUCTURE_KINDS if (value := options.pop(kind, None)) is not None}
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
    if kind == "regex" and (len(source) - len(source.rstrip("\\"))) % 2:  # the mask engine leaves it out
        raise StructureError(f"regex ends with a backslash that escapes nothing: ...{source[-40:]!r}; write two for the character itself")
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


MAX_DEPTH = 100
MAX_REMAINDERS = 100_000  # of multipleOf: the mask engine has a state for each, and ten million take 5 s and 600 MB


def json_schema(source: Any) -> tuple[dict[str, Any], Callable[[str], Any]]:
    """The schema that `source` stands for, and a function from JSON text to a value.

    Args:
        source: a JSON schema as dict or JSON text (the value is then plain data); or a pydantic model, a dataclass, a TypedDict, an Enum or
            any type that pydantic can check, such as `list[int]` (the value is then an object of it).

    Raises:
        StructureError: it is none of these, or pydantic cannot make a schema of it. MissingDependency: pydantic is needed for it.
    """
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise StructureError(f"schema is a text, but no JSON ({error}); give a JSON schema, a dict or a type") from error
    if isinstance(source, Mapping):
        return _checked(_rewritten(dict(source), 0, close=False)), json.loads
    if not isinstance(source, type) and not hasattr(source, "__origin__") and not hasattr(source, "__args__"):
        raise StructureError(
            f"schema is {str(source)[:80]!r}; expected a JSON schema (a dict), a pydantic model, a dataclass or another type"
        )
    try:
        import pydantic
    except ImportError as error:
        raise MissingDependency(
            "a schema given as a type needs the package pydantic, which is not installed; pip install 'exl2nb[structured]', "
            "or give a JSON schema"
        ) from error
    try:
        adapter: Any = pydantic.TypeAdapter(source)
        schema = adapter.json_schema()
    except Exception as error:
        raise StructureError(f"schema: pydantic cannot make a JSON schema of {source!r}: {str(error)[:300]}") from error
    return _checked(_rewritten(schema, 0, close=True)), adapter.validate_json


def _checked(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without what would fail in the middle of an answer."""
    return without_dead_ends(_with_few_remainders(without_annotations(schema)), byte_matcher)


STRING_FORMATS = frozenset(("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""Values of `format` that the mask engine holds texts to. All others are annotations, as JSON Schema says, and bind nobody."""
UNSUPPORTED_KEYWORDS = ("not", "if", "then", "else", "contains", "dependentRequired", "dependencies", "unevaluatedProperties")
"""Keywords that the mask engine refuses whatever their value."""
_VALUE_KEYWORDS = ("const", "enum", "default", "example", "examples")  # keywords with values in them, not schemas


def without_annotations(schema: Any) -> Any:
    """The schema without keywords that allow everything but that the mask engine refuses: unknown formats, names that are texts."""
    if isinstance(schema, list):
        return [without_annotations(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in STRING_FORMATS:
            continue
        if key == "propertyNames" and (value is True or value in ({}, {"type": "string"})):
            continue
        if key == "uniqueItems" and value is False:
            continue
        made[key] = value if key in _VALUE_KEYWORDS else without_annotations(value)
    return made


def _with_few_remainders(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema itself, unless its `multipleOf`s have too many remainders; those that `allOf` or `$ref` may join count together."""
    steps: dict[Fraction, Any] = {}
    joined, waiting = False, [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            joined = joined or "allOf" in value or "$ref" in value
            step = value.get("multipleOf")
            if isinstance(step, (int, float)) and not isinstance(step, bool) and step:
                if abs(step) > 1e15:
                    raise _too_many_remainders(step)
                steps[abs(Fraction(str(step)))] = step
    whole = {step: step.numerator if step.denominator == 1 else int(step * 10 ** _decimals(step)) for step in steps}
    for step, count in whole.items():
        if count > MAX_REMAINDERS:
            raise _too_many_remainders(steps[step])
    if joined:
        scale = 10 ** max(map(_decimals, steps), default=0)
        if math.lcm(*(int(step * scale) for step in steps)) > MAX_REMAINDERS:
            raise _too_many_remainders([*steps.values()])
    return schema


def _decimals(step: Fraction) -> int:
    """Digits behind the point; of a number that was written in decimals."""
    twos = fives = 0
    rest = step.denominator
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    return max(twos, fives)


def _too_many_remainders(step: Any) -> StructureError:
    return StructureError(
        f"schema holds multipleOf {shown(step)}, with more than {MAX_REMAINDERS} remainders; leave it out, and check the value"
    )


def _rewritten(value: Any, depth: int, *, close: bool) -> Any:
    """The schema in a form that mask engines support and with which answers end.

    `oneOf` whose branches a discriminator keeps apart becomes `anyOf`, then the same. With `close`, objects that do not say whether
    they may have more properties may not: a class has the fields that it has, and a small model would go on inventing some.
    """
    if depth > MAX_DEPTH:
        raise StructureError(f"schema is nested more than {MAX_DEPTH} levels deep; use $defs and $ref")
    if isinstance(value, float) and not math.isfinite(value):
        raise StructureError(f"schema holds the number {value}, which JSON does not have; leave it out")
    if isinstance(value, Mapping):
        if "oneOf" in value and "discriminator" in value and "anyOf" not in value:
            value = {"anyOf" if k == "oneOf" else k: v for k, v in value.items() if k != "discriminator"}
        if close and value.get("uniqueItems") is True:  # a set: it keeps once what the answer has twice
            value = {key: one for key, one in value.items() if key != "uniqueItems"}
        if close and value.get("type") == "object" and isinstance(value.get("properties"), Mapping):
            value = {"additionalProperties": False, **value}
        if not all(isinstance(key, str) for key in value):
            raise StructureError("schema holds a key that is no text; expected a JSON schema")
        return {key: _rewritten(one, depth + 1, close=close) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rewritten(one, depth + 1, close=close) for one in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise StructureError(f"schema holds {str(value)[:80]!r}, which JSON cannot express; expected a JSON schema, or a type for the whole")


CHEAP_S = 40e-6  # of a mask; handing it to another thread and taking it back costs the engine's thread 25 us (2 cores, 2026-11)
MEAN_DECAY = 0.8
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


class MatcherConstraint:
    """A `Constraint` around a matcher of the mask engine: one answer's position in its grammar.

    The next mask is computed on another thread during the model's step, unless it is cheap.

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
            self._cost_s = max(time.perf_counter() - started, MEAN_DECAY * self._cost_s if self._cost_s < 1.0 else 0.0)

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

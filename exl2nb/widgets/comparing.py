"""What Compare runs: prompts through several models or settings in turn, and the KL of every answer. Knows nothing of pages."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from exl2nb.core.errors import Exl2Error, OptionError
from exl2nb.llm.model import LLM
from exl2nb.widgets.protocol import CellMeasure, CellSpeed, CompareColumn, KlToken
from exl2nb.widgets.tokens import items_of

MOST_COLUMNS = 8


@dataclass(frozen=True)
class Entrant:
    """One column: a loaded model, or the directory or hub id of one, and settings of its own."""

    label: str
    model: Any
    settings: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> CompareColumn:
        """What is known without loading it."""
        nbytes = bpw = None
        with suppress(Exception):  # read from the files' headers, which may be gone by now
            nbytes, bpw = _int(getattr(self.model, "weight_bytes", None)), _float(getattr(self.model, "bpw", None))
        note = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        return CompareColumn(self.label, note, nbytes, bpw)


def entrants_of(source: Any) -> list[Entrant]:
    """The columns of what `Compare` takes.

    Raises:
        OptionError: fewer than one, more than eight, or something that is no model.
    """
    if isinstance(source, Mapping):
        pairs = [(str(label), entry) for label, entry in source.items()]
    elif isinstance(source, Sequence) and not isinstance(source, str):
        pairs = _labelled(source)
    else:
        pairs = _labelled([source])
    if not 1 <= len(pairs) <= MOST_COLUMNS:
        raise OptionError(f"Compare: there are {len(pairs)} columns; expected 1 to {MOST_COLUMNS}")
    return [_entrant(label, entry) for label, entry in pairs]


def _labelled(entries: Sequence[Any]) -> list[tuple[str, Any]]:
    pairs, seen = [], dict[str, int]()
    for entry in entries:
        model = entry[0] if isinstance(entry, tuple) and entry else entry
        name = os.path.basename(os.path.normpath(model)) if isinstance(model, (str, os.PathLike)) else str(getattr(model, "name", "model"))
        seen[name] = seen.get(name, 0) + 1
        pairs.append((name if seen[name] == 1 else f"{name} ({seen[name]})", entry))
    return pairs


def _entrant(label: str, entry: Any) -> Entrant:
    model, settings = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, {})
    if not (isinstance(model, (str, os.PathLike)) or callable(getattr(model, "stream", None))) or not isinstance(settings, Mapping):
        raise OptionError(
            f"Compare: column {label!r} is {type(entry).__name__!r}; expected a loaded model, its directory, or a pair (model, settings)"
        )
    return Entrant(label, model, dict(settings))


@dataclass(frozen=True)
class Listener:
    """Where the results go. All are called on the worker thread."""

    stage: Callable[[str], None]
    column: Callable[[int, CompareColumn], None]
    tokens: Callable[[list[KlToken]], None]
    speed: Callable[[CellSpeed], None]
    measure: Callable[[CellMeasure], None]
    note: Callable[[str], None]


class Run:
    """One run over all columns and prompts: column by column, so that a model given as a directory is loaded once and freed after it.

    The first column is the reference. Its model stays loaded to the end, because the others' answers are read by it.
    """

    def __init__(self, entrants: Sequence[Entrant], prompts: Sequence[str], settings: Mapping[str, Any], listener: Listener) -> None:
        self._entrants, self._prompts, self._settings, self._listener = entrants, prompts, settings, listener
        self._loaded: list[LLM] = []

    def carry_out(self, stop: threading.Event) -> None:
        """Run until the end or until `stop`; what was loaded here is freed.

        Raises:
            Exl2Error: a model cannot be loaded or a request cannot run.
        """
        reference: Any = None
        try:
            for column, entrant in enumerate(self._entrants):
                if stop.is_set():
                    return
                llm = self._open(column, entrant)
                reference = llm if reference is None else reference
                for place, prompt in enumerate(self._prompts):
                    if stop.is_set():
                        return
                    self._answer(place * len(self._entrants) + column, entrant, llm, reference, prompt, stop)
                if llm is not reference:
                    self._free(llm)
        finally:
            for llm in list(self._loaded):
                self._free(llm)

    def _open(self, column: int, entrant: Entrant) -> Any:
        if not isinstance(entrant.model, (str, os.PathLike)):
            return entrant.model
        import exl2nb

        self._listener.stage(f"loading {entrant.label}")
        llm = exl2nb.load(entrant.model, progress=None)
        self._loaded.append(llm)
        self._listener.column(column, Entrant(entrant.label, llm, entrant.settings).describe())
        return llm

    def _free(self, llm: Any) -> None:
        if any(llm is one for one in self._loaded):
            self._loaded.remove(llm)
            llm.close()

    def _answer(self, cell: int, entrant: Entrant, llm: Any, reference: Any, prompt: str, stop: threading.Event) -> None:
        self._listener.stage(f"{entrant.label}: writing")
        ids: list[int] = []
        stream = llm.stream(prompt, **{**self._settings, **entrant.settings})
        watch = _Watch()
        try:
            for chunk in stream:
                items = items_of(chunk)
                watch.count(len(items))
                ids += [item.id for item in items]
                self._listener.tokens([KlToken(cell, i.text, i.id, i.prob, None, None, None, None) for i in items])
                if stop.is_set():
                    break
        finally:
            getattr(stream, "close", lambda: None)()
        completion = None if stop.is_set() else getattr(stream, "completion", None)
        timings = getattr(completion, "timings", None)
        # the engine's own times: what came here at once was not made at once
        speed, first_s = (watch.per_second, watch.first_s) if timings is None else (round(timings.decode_tok_s, 2), timings.first_token_s)
        self._listener.speed(CellSpeed(cell, speed, first_s, str(getattr(completion, "finish_reason", ""))))
        if not stop.is_set() and ids:
            self._measure(cell, entrant, llm, reference, prompt, ids)

    def _measure(self, cell: int, entrant: Entrant, llm: Any, reference: Any, prompt: str, ids: list[int]) -> None:
        """KL(reference || column) at each token of the answer: both read the answer as it was written."""
        if not isinstance(llm, LLM) or not isinstance(reference, LLM):
            return
        self._listener.stage(f"{entrant.label}: measuring")
        start = llm.tokenizer.encode(prompt)
        whole = [*start, *ids]
        if len(whole) > min(llm.model.context, reference.model.context) or len(start) < 1:
            self._listener.note("Answers longer than a model's context are not measured.")
            return
        import exl2nb

        try:
            found = exl2nb.compare(reference, llm, whole, progress=None)
        except Exl2Error as problem:
            if isinstance(problem, OptionError):  # another vocabulary: the texts can be compared, the probabilities cannot
                self._listener.note(f"No KL for {entrant.label}: {problem}")
                return
            raise
        rows = slice(len(start) - 1, len(whole) - 1)
        kl, same, prob = found.kl[0, rows].tolist(), found.same_top1[0, rows].tolist(), found.reference_logprob[0, rows].exp().tolist()
        self._listener.measure(CellMeasure(cell, [float(f"{v:.6g}") for v in kl], [round(p, 6) for p in prob], same))


class _Watch:
    """Speed of one stream, for models that do not tell."""

    def __init__(self) -> None:
        import time

        self._clock = time.perf_counter
        self._begun = self._clock()
        self._first = self._latest = 0.0
        self._n = 0

    def count(self, n: int) -> None:
        self._latest = self._clock()
        if n and not self._n:
            self._first = self._latest
        self._n += n

    @property
    def first_s(self) -> float | None:
        return round(self._first - self._begun, 4) if self._n else None

    @property
    def per_second(self) -> float:
        span = self._latest - self._first
        return round((self._n - 1) / span, 2) if self._n > 1 and span > 0 else 0.0


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float(value: Any) -> float | None:
    return round(value, 3) if isinstance(value, float) else None


def measured(tokens: Sequence[KlToken], measures: Mapping[int, CellMeasure]) -> Iterator[KlToken]:
    """The tokens with what was measured of them."""
    places = dict[int, int]()
    for token in tokens:
        at = places.get(token.cell, 0)
        places[token.cell] = at + 1
        known = measures.get(token.cell)
        if known is None or at >= len(known.kl):
            yield token
        else:
            yield token._replace(kl=known.kl[at], reference_prob=known.reference_prob[at], same=known.same[at])

"""Bitrates or caches of one model side by side, and the base of the widgets that look inside them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import traitlets as t

from exl2nb.cache.spec import parse_mode
from exl2nb.core.errors import OptionError
from exl2nb.core.options import check_flag, check_keywords, shown
from exl2nb.widgets import bitgrid
from exl2nb.widgets.background import Background, BackgroundWidget
from exl2nb.widgets.base import as_text

if TYPE_CHECKING:
    from exl2nb.eval.trace import Trace
    from exl2nb.llm.llm import LLM

DEFAULT_PROMPT = "It was a dark night, and the old man walked to the river."
MOST_SIDES = 4
PASS_BYTES = 256 << 20
"""Activations of one side that are in memory at once; more layers are read in several passes."""


@dataclass(frozen=True)
class Side:
    """One model and the mode of its cache; the first side is the reference."""

    label: str
    llm: LLM
    cache: str = "fp32"

    def trace(self, prompt: Sequence[Any], capture: Sequence[str], **options: Any) -> Trace:
        """`llm.trace` under this side's cache."""
        return self.llm.trace(prompt, capture, cache=self.cache, max_bytes=1 << 34, **options)


def sides_of(source: Any, *, where: str, least: int = 2) -> list[Side]:
    """The sides of what a widget is given: models by label, or several models; each a loaded LLM, or a pair (LLM, {"cache": mode}).

    Raises:
        OptionError: too few or too many, something that is no loaded model, or models that differ in more than their bits.
    """
    pairs = list(source.items()) if isinstance(source, Mapping) else [("", entry) for entry in _listed(source)]
    if not least <= len(pairs) <= MOST_SIDES:
        raise OptionError(
            f"{where}: got {len(pairs)} of {shown(source)}; expected {least} to {MOST_SIDES} bitrates or caches of one model, such as "
            "{'16 bits': llm, '2.5 bpw': other}"
        )
    sides: list[Side] = []
    for label, entry in pairs:
        side = _side(label, entry, where)
        taken = [one.label for one in sides]
        sides.append(Side(side.label if side.label not in taken else f"{side.label} ({len(taken) + 1})", side.llm, side.cache))
    first = sides[0].llm.config
    for side in sides[1:]:
        config = side.llm.config
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "vocab_size"):
            if getattr(config, name) != getattr(first, name):
                what = f"{name} {getattr(config, name)} and {sides[0].label!r} {getattr(first, name)}"
                raise OptionError(f"{where}: {side.label!r} has {what}; expected bitrates or caches of one model")
    return sides


def _listed(source: Any) -> list[Any]:
    pair = isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping)
    return list(source) if isinstance(source, Sequence) and not isinstance(source, str) and not pair else [source]


def _side(label: object, entry: Any, where: str) -> Side:
    llm: Any = entry
    options: Any = {}
    if isinstance(entry, tuple) and len(entry) == 2:
        llm, options = entry
    if not callable(getattr(llm, "trace", None)) or not isinstance(options, Mapping):
        hint = "; load it first: ex.load(path)" if isinstance(llm, (str, os.PathLike)) else ""
        raise OptionError(f"{where}: {shown(entry)} is no loaded model, nor a pair (model, {{'cache': mode}}){hint}")
    check_keywords(dict(options), ["cache"], where=f"{where}: {label or llm.name}")
    cache = parse_mode(options.get("cache", "fp32"), where=where)
    name = str(label) or str(llm.name) + (f", {cache} cache" if options else "")
    return Side(bitgrid.plain(name)[:40], llm, cache)


def passes(side: Side, parts: Iterable[str], tokens: int) -> Iterator[tuple[range, list[str]]]:
    """Layers in groups whose points fit `PASS_BYTES`, each with the names to capture."""
    known, wanted = side.llm.model.points, list(parts)
    layers = side.llm.config.num_layers
    floats = max(_numbers(known[f"blocks.{layer}.{part}"].sized(tokens)) for layer in (0, layers - 1) for part in wanted
                 if f"blocks.{layer}.{part}" in known) * len(wanted)  # fmt: skip
    step = max(1, min(layers, PASS_BYTES // (4 * floats)))
    for first in range(0, layers, step):
        some = range(first, min(first + step, layers))
        yield some, [name for layer in some for part in wanted if (name := f"blocks.{layer}.{part}") in known]


def _numbers(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


class InsideWidget(BackgroundWidget):
    """Base of widgets that read one prompt with several bitrates or caches of a model and show what differs inside.

    A subclass measures in `_measure` and shows `_result`, plain JSON values; `to_dict` hands it out, and `result=` shows it again.
    `wait=False` displays at once and measures meanwhile; `.wait()` waits for it.
    """

    _least: ClassVar[int] = 2
    _empty: ClassVar[Mapping[str, Any]] = {}
    _most_tokens: ClassVar[int] = 512

    prompt = t.Unicode(DEFAULT_PROMPT).tag(sync=True, option=True)
    side = t.Int(1).tag(sync=True, option=True)
    _result = t.Dict().tag(sync=True)
    _share = t.Float(0.0).tag(sync=True)
    _has_model = t.Bool(False).tag(sync=True)

    def __init__(
        self, models: Any = None, prompt: str | None = None, *, result: Mapping[str, Any] | None = None, wait: bool = True, **kwargs: Any
    ) -> None:
        name = type(self).__name__
        self._background = Background(name)
        check_flag(f"{name}: wait", wait)
        if (models is None) == (result is None):
            raise OptionError(f"{name}: expected models, such as {{'16 bits': llm, '2.5 bpw': other}}, or result=, what to_dict() gave")
        self.sides = [] if models is None else sides_of(models, where=name, least=self._least)
        self._ids: list[int] = []
        super().__init__(**kwargs, **({} if prompt is None else {"prompt": prompt}))
        if result is not None:
            check_keywords(dict(result), list(self._empty), where=f"{name}: result")
            self._result = {**self._empty, **result}
            self.status = "done"
            return
        self._result, self._has_model = dict(self._empty), True
        if not wait:
            self.start()
            return
        self._read(threading.Event())
        self.status = "done"

    def _read(self, stop: threading.Event) -> None:
        """Measure the prompt; what was shown stays until that is done."""
        llm, name = self.sides[0].llm, type(self).__name__
        ids = self._tokens(llm)
        if not 2 <= len(ids) <= self._most_tokens:
            raise OptionError(f"{name}: the prompt has {len(ids)} tokens; expected 2 to {self._most_tokens}")
        found = self._measure(ids, stop)
        if found is not None and not stop.is_set():
            self._ids = ids
            self._result = found

    def _tokens(self, llm: LLM) -> list[int]:
        """The ids of the prompt."""
        return llm.tokenizer.encode(self.prompt)

    def _measure(self, ids: list[int], stop: threading.Event) -> dict[str, Any] | None:
        """What the widget shows of a prompt; None when it was stopped. Every subclass has its own."""
        return None

    def start(self, prompt: str | None = None) -> InsideWidget:
        """Begin to read the prompt, or another one, and return at once.

        Raises:
            OptionError: no model is attached. GenerationError: something runs already.
        """
        if not self.sides:
            raise OptionError(f"{type(self).__name__}: no model is attached; make it with {type(self).__name__}({{'16 bits': llm, ...}})")

        def before() -> None:
            if prompt is not None:
                self.prompt = prompt

        self._work(self._read, before)
        return self

    def _work(self, work: Any, before: Any = lambda: None) -> None:
        def starting() -> None:
            with self.hold_sync():
                self.status, self.error, self._share = "running", "", 0.0
                before()

        def done(status: Any, problem: BaseException | None) -> None:
            with self.hold_sync():
                self.status = status
                if problem is not None:
                    self.error = as_text(problem)
            self._refresh_static()

        self._background.begin(work, done, before=starting)

    def _receive_read(self, message: Mapping[str, Any]) -> None:
        prompt = message.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            raise OptionError(f"{type(self).__name__}: the page sent no prompt; write one, or reload the page")
        if not self._background.alive:
            self.start(prompt)

    def _receive_stop(self, _message: Mapping[str, Any]) -> None:
        self.stop()

    def to_dict(self) -> dict[str, Any]:
        """Everything shown, as plain JSON values; `result=` of a new widget shows it again."""
        return dict(self._result)

    def _export_state(self) -> dict[str, Any]:
        return {**super()._export_state(), "_has_model": False, "status": "done"}

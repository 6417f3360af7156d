"""Compare: the same prompts through several models, bitrates or settings; the first difference, and the KL of every token."""

from __future__ import annotations

import html
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import traitlets as t

from exl2nb.core.errors import Exl2Error, OptionError
from exl2nb.core.options import check_keywords
from exl2nb.core.show import size_text
from exl2nb.llm.llm import LLM
from exl2nb.llm.request_options import OPTION_DEFAULTS, RequestOptions
from exl2nb.sampling.params import check_integer
from exl2nb.widgets import static
from exl2nb.widgets.background import Background, BackgroundWidget
from exl2nb.widgets.base import as_text
from exl2nb.widgets.feed import Feed
from exl2nb.widgets.protocol import CellMeasure, CellSpeed, CompareColumn, CompareState, KlToken, Status
from exl2nb.widgets.tokens import items_of

if TYPE_CHECKING:
    import pandas as pd

MOST_COLUMNS = 8


@dataclass(frozen=True)
class ComparedModel:
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


def compared_models(source: Any) -> list[ComparedModel]:
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
    return [_compared_model(label, entry) for label, entry in pairs]


def _labelled(entries: Sequence[Any]) -> list[tuple[str, Any]]:
    pairs, seen = [], dict[str, int]()
    for entry in entries:
        model = entry[0] if isinstance(entry, tuple) and entry else entry
        name = os.path.basename(os.path.normpath(model)) if isinstance(model, (str, os.PathLike)) else str(getattr(model, "name", "model"))
        seen[name] = seen.get(name, 0) + 1
        pairs.append((name if seen[name] == 1 else f"{name} ({seen[name]})", entry))
    return pairs


def _compared_model(label: str, entry: Any) -> ComparedModel:
    model, settings = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, {})
    if not (isinstance(model, (str, os.PathLike)) or callable(getattr(model, "stream", None))) or not isinstance(settings, Mapping):
        raise OptionError(
            f"Compare: column {label!r} is {type(entry).__name__!r}; expected a loaded model, its directory, or a pair (model, settings)"
        )
    return ComparedModel(label, model, dict(settings))


@dataclass(frozen=True)
class Listener:
    """Where the results go. All are called on the worker thread."""

    stage: Callable[[str], None]
    column: Callable[[int, CompareColumn], None]
    tokens: Callable[[list[KlToken]], None]
    speed: Callable[[CellSpeed], None]
    measure: Callable[[CellMeasure], None]
    note: Callable[[str], None]


class CompareRun:
    """One run over all columns and prompts: column by column, so that a model given as a directory is loaded once and freed after it.

    The first column is the reference. Its model stays loaded to the end, because the others' answers are read by it.
    """

    def __init__(self, entrants: Sequence[ComparedModel], prompts: Sequence[str], settings: Mapping[str, Any], listener: Listener) -> None:
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

    def _open(self, column: int, entrant: ComparedModel) -> Any:
        if not isinstance(entrant.model, (str, os.PathLike)):
            return entrant.model
        import exl2nb

        self._listener.stage(f"loading {entrant.label}")
        llm = exl2nb.load(entrant.model, progress=None)
        self._loaded.append(llm)
        self._listener.column(column, ComparedModel(entrant.label, llm, entrant.settings).describe())
        return llm

    def _free(self, llm: Any) -> None:
        if any(llm is one for one in self._loaded):
            self._loaded.remove(llm)
            llm.close()

    def _answer(self, cell: int, entrant: ComparedModel, llm: Any, reference: Any, prompt: str, stop: threading.Event) -> None:
        self._listener.stage(f"{entrant.label}: generating")
        ids: list[int] = []
        stream = llm.stream(prompt, **{**self._settings, **entrant.settings})
        watch = StreamWatch()
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

    def _measure(self, cell: int, entrant: ComparedModel, llm: Any, reference: Any, prompt: str, ids: list[int]) -> None:
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


class StreamWatch:
    """Speed of one stream, for models that do not tell."""

    def __init__(self) -> None:
        import time

        self._clock = time.perf_counter
        self._begun = self._clock()
        self._first = self._latest = 0.0
        self._n = 0

    def count(self, n: int) -> None:
        """Count `n` tokens that came now."""
        self._latest = self._clock()
        if n and not self._n:
            self._first = self._latest
        self._n += n

    @property
    def first_s(self) -> float | None:
        """Seconds until the first token, None before it."""
        return round(self._first - self._begun, 4) if self._n else None

    @property
    def per_second(self) -> float:
        """Tokens per second after the first one."""
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


MOST_PROMPTS = 20
MOST_TOKENS = 1024
DEFAULT_SETTINGS = {"temperature": 0, "max_tokens": 48}
_PLAIN_TRAITS = ("columns", "prompts", "tokens", "measured", "speeds", "note")
_DEFAULT_PROMPTS = ("It was a dark night, and the old man", "She opened the letter and", "The captain looked at the sea;")


class Compare(BackgroundWidget):
    """Let several models, bitrates or settings answer the same prompts, side by side.

    The first column is the reference. Each answer is generated by its column and then scored by the reference (`exl2nb.compare`), so
    that every token has a KL: how far the column's probabilities are from the reference's at that position, in nats. The place where an
    answer leaves the reference's is marked. Columns run one after the other, so their speeds do not disturb each other.

    Args:
        models: a mapping label -> column, or a list. A column is a loaded model, its directory or hub id (loaded when its turn comes, freed
            after it), or a pair (model, settings) with settings of `generate` that only this column has. None: display only.
        result: what `to_dict` gave, to show again.
        settings: of all columns, as for `generate`. Default: temperature 0 (the most likely text) and max_tokens 48.

    Traits, also keywords (synced with the page both ways):
        prompts: texts to continue, at most 20. view: "kl" colours tokens by KL, "difference" greys what agrees with the reference.
        height: greatest height of an answer, CSS length or pixels.

    Example:
        >>> import exl2nb as ex
        >>> with ex.demo(progress=None) as llm:
        ...     both = {"greedy": llm, "sampled": (llm, {"temperature": 1.0, "seed": 1})}
        ...     frame = ex.widgets.Compare(both, prompts=["It was"], max_tokens=8).start().wait().to_dataframe()
        >>> list(frame.column), list(frame.tokens)
        (['greedy', 'sampled'], [8, 8])
    """

    _more_keywords = (RequestOptions.__annotations__, {**OPTION_DEFAULTS, **DEFAULT_SETTINGS})
    _bundle, _state_type = "compare", CompareState

    prompts = t.List(t.Unicode(), list(_DEFAULT_PROMPTS)).tag(sync=True, option=True)
    view = t.Enum(("kl", "difference"), "kl").tag(sync=True, option=True)
    stage = t.Unicode("").tag(sync=True)
    _columns = t.List().tag(sync=True)
    _run_prompts = t.List().tag(sync=True)
    _tokens = t.List().tag(sync=True)
    _measured = t.List().tag(sync=True)
    _speeds = t.List().tag(sync=True)
    _note = t.Unicode("").tag(sync=True)
    _has_model = t.Bool(False).tag(sync=True)

    def __init__(self, models: Any = None, *, result: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._background = Background("Compare")  # first: `close` needs it, also where this constructor raises
        self.entrants: list[ComparedModel] = [] if models is None else compared_models(models)
        own = self._keywords()
        self.settings = {**DEFAULT_SETTINGS, **{name: kwargs.pop(name) for name in list(kwargs) if name not in own}}
        _check_settings(self.settings, [one.settings for one in self.entrants], own)
        self._feed = Feed(self.send)
        self._known, self._went, self._heads = dict[int, CellMeasure](), dict[int, CellSpeed](), list[CompareColumn]()
        super().__init__(**kwargs)
        with self.hold_sync():
            self._has_model = bool(self.entrants)
            self._show_columns([one.describe() for one in self.entrants])
            if result is not None:
                self._take(result)

    @t.validate("prompts")
    def _some_prompts(self, proposal: Mapping[str, Any]) -> list[str]:
        prompts = [str(prompt) for prompt in proposal["value"]]
        if not 1 <= len(prompts) <= MOST_PROMPTS or not all(prompts):
            raise OptionError(f"Compare: prompts has {len(prompts)} texts; expected 1 to {MOST_PROMPTS}, none of them empty")
        return prompts

    # ---- running ----

    def start(self, prompts: Sequence[str] | None = None) -> Compare:
        """Begin and return at once.

        Args:
            prompts: replace those there are; None keeps them.

        Raises:
            OptionError: there is no model, or no prompt. GenerationError: a run is in progress.
        """
        if not self.entrants:
            raise OptionError("Compare: no model is attached; make it with Compare({'one': llm, 'other': small})")
        if prompts is not None:
            self.prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        chosen = [str(prompt) for prompt in self.prompts]
        listener = Listener(self._tell, self._loaded, self._feed.add, self._went_so, self._measure_known, self._remark)
        run = CompareRun(self.entrants, chosen, self.settings, listener)

        def starting() -> None:
            self._known, self._went = {}, {}
            with self.hold_sync():
                self.status, self.error, self.stage, self._note = "running", "", "", ""
                self._run_prompts, self._tokens, self._measured, self._speeds = chosen, [], [], []
            self._feed.begin()

        self._background.begin(run.carry_out, self._end, before=starting)
        return self

    def _end(self, status: Status, problem: BaseException | None) -> None:
        self._feed.finish(status)
        with self.hold_sync():
            self._tokens = [list(token) for token in self._feed.items]
            self.stage, self.status = "", status
            if problem is not None:
                self.error = as_text(problem)
        self._refresh_static()

    def _tell(self, stage: str) -> None:
        self.stage = stage

    def _remark(self, note: str) -> None:
        self._note = note

    def _loaded(self, place: int, column: CompareColumn) -> None:
        self._show_columns([*self._heads[:place], column, *self._heads[place + 1 :]])

    def _went_so(self, speed: CellSpeed) -> None:
        self._went[speed.cell] = speed
        self._speeds = [list(one) for one in self._went.values()]

    def _measure_known(self, measure: CellMeasure) -> None:
        self._known[measure.cell] = measure
        self._measured = [list(one) for one in self._known.values()]

    def _show_columns(self, heads: list[CompareColumn]) -> None:
        self._heads, self._columns = heads, [list(head) for head in heads]

    # ---- messages ----

    def _send_snapshot(self) -> None:
        self._feed.snapshot()

    def _receive_run(self, message: Mapping[str, Any]) -> None:
        prompts = message.get("prompts")
        if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
            raise OptionError("Compare: the page sent no prompts; reload the page")
        if not self._background.alive:  # else a second click that was on its way
            self.start([prompt for prompt in prompts if prompt.strip()])

    def _receive_stop(self, _message: Mapping[str, Any]) -> None:
        self.stop()

    # ---- results ----

    @property
    def answers(self) -> list[list[list[KlToken]]]:
        """Tokens by prompt and column."""
        width = max(1, len(self._heads))
        found: list[list[list[KlToken]]] = [[[] for _ in range(width)] for _ in self._run_prompts]
        for token in measured(self._feed.items, self._known):
            found[token.cell // width][token.cell % width].append(token)
        return found

    def to_frame(self) -> pd.DataFrame:
        """One row per prompt and column.

        prompt, column, text, tokens, first_difference (token at which the text leaves the reference's; NaN: it does not), kl_mean, kl_max
        (nats), same_choice (share of tokens where both like the same best), tokens_per_second, ttft_s, finish_reason, bpw, nbytes.
        """
        import pandas as pd

        rows = []
        for place, (prompt, answers) in enumerate(zip(self._run_prompts, self.answers)):
            for column, (head, tokens) in enumerate(zip(self._heads, answers)):
                known = [token.kl for token in tokens if token.kl is not None]
                speed = self._went.get(place * len(self._heads) + column)
                rows.append(
                    {
                        "prompt": prompt,
                        "column": head.label,
                        "text": "".join(token.text for token in tokens),
                        "tokens": len(tokens),
                        "first_difference": static.first_difference(answers[0], tokens),
                        "kl_mean": static.mean_kl(tokens),
                        "kl_max": max(known, default=None),
                        "same_choice": static.same_choice(tokens),
                        "tokens_per_second": speed.tps if speed else None,
                        "ttft_s": speed.ttft_s if speed else None,
                        "finish_reason": speed.reason if speed else "",
                        "bpw": head.bpw,
                        "nbytes": head.nbytes,
                    }
                )
        names = ["prompt", "column", "text", "tokens", "first_difference", "kl_mean", "kl_max", "same_choice"]
        names += ["tokens_per_second", "ttft_s", "finish_reason", "bpw", "nbytes"]
        return pd.DataFrame(rows, columns=names)

    to_dataframe = to_frame

    def to_token_frame(self) -> pd.DataFrame:
        """One row per token: prompt, column, position, text, id, prob, reference_prob, kl, same."""
        import pandas as pd

        rows = [
            {"prompt": prompt, "column": head.label, "position": i, **token._asdict()}
            for prompt, answers in zip(self._run_prompts, self.answers)
            for head, tokens in zip(self._heads, answers)
            for i, token in enumerate(tokens)
        ]
        return pd.DataFrame(rows, columns=["prompt", "column", "position", *KlToken._fields]).drop(columns=["cell", "favourite"])

    def to_dict(self) -> dict[str, Any]:
        """Everything shown, as plain JSON values; `Compare(result=...)` shows it again."""
        tokens = [list(token) for token in self._feed.items]
        return dict(
            zip(_PLAIN_TRAITS, (self._columns, self._run_prompts or self.prompts, tokens, self._measured, self._speeds, self._note))
        )

    def _take(self, result: Mapping[str, Any]) -> None:
        if not isinstance(result, Mapping):
            raise OptionError(f"Compare: result is {type(result).__name__!r}; expected what to_dict() gives")
        check_keywords(dict(result), list(_PLAIN_TRAITS), where="Compare: result")
        try:
            tokens = [KlToken(*token) for token in result.get("tokens", ())]
            heads = [CompareColumn(*head) for head in result.get("columns", ())]
            known = [CellMeasure(*one) for one in result.get("measured", ())]
            speeds = [CellSpeed(*one) for one in result.get("speeds", ())]
        except TypeError as error:
            raise OptionError(f"Compare: result cannot be read: {error}; expected what to_dict() gives") from error
        self.prompts = list(result.get("prompts", self.prompts))
        cells = len(heads) * len(self.prompts)
        if any(not 0 <= one.cell < cells for one in (*tokens, *known, *speeds)):
            raise OptionError("Compare: result has a token of a column or prompt it does not name; expected what to_dict() gives")
        self._show_columns(heads)
        self._known, self._went = {one.cell: one for one in known}, {one.cell: one for one in speeds}
        self._run_prompts, self._note = list(self.prompts), str(result.get("note", ""))
        self._measured, self._speeds = [list(one) for one in known], [list(one) for one in speeds]
        self._feed.load("", tokens, {"n": len(tokens), "tps": 0.0, "ttft_s": None})
        self._tokens, self.status = [list(token) for token in tokens], "done"

    # ---- without the page ----

    def _export_state(self) -> dict[str, Any]:
        live = {"_tokens": [list(token) for token in self._feed.items], "_has_model": False}
        return {**super()._export_state(), **live, "status": "stopped" if self.status == "running" else self.status, "stage": ""}

    def _summary(self) -> str:
        means = dict[str, list[float]]()
        for answers in self.answers:
            for head, tokens in zip(self._heads, answers):
                means.setdefault(head.label, []).extend(token.kl for token in tokens if token.kl is not None)
        parts = [f"{label} KL {sum(some) / len(some):.3g}" for label, some in means.items() if some]
        names = ", ".join(parts or [head.label for head in self._heads])
        return f"Compare({self.status}, {len(self._run_prompts or self.prompts)} prompts: {names[:160]})"

    def _static_body(self) -> str:
        parts = []
        for prompt, answers in zip(self._run_prompts, self.answers):
            shown = [
                static.column_html(head.label, _note(head, tokens), tokens, static.first_difference(answers[0], tokens))
                for head, tokens in zip(self._heads, answers)
            ]
            words = html.escape(prompt)
            parts.append(f'<div style="margin-top:6px;white-space:pre-wrap"><b>Prompt</b> {words}</div>{static.side_by_side(shown)}')
        return "".join(parts) or f"<div>{html.escape(self._summary())}</div>"


def _note(head: CompareColumn, tokens: Sequence[KlToken]) -> str:
    mean = static.mean_kl(tokens)
    parts = [head.note, size_text(head.nbytes) if head.nbytes else "", f"mean KL {mean:.3g}" if mean is not None else ""]
    return ", ".join(part for part in parts if part)


def _check_settings(settings: Mapping[str, Any], others: Sequence[Mapping[str, Any]], own: Sequence[str]) -> None:
    from dataclasses import fields

    from exl2nb.generator.request import Request
    from exl2nb.sampling.params import SamplingParams

    hidden = ("prompt_ids", "sampling", "stream", "top_logprobs")
    known = [f.name for cls in (Request, SamplingParams) for f in fields(cls) if f.name not in hidden]
    for some in (settings, *others):
        check_keywords(dict(some), [*known, "schema", "regex", "choice", "grammar", *own, "models", "result"], where="Compare")
        check_integer("Compare: max_tokens", some.get("max_tokens", 1), 1, MOST_TOKENS)

"""CacheExplorer: one prompt under FP16, Q8, Q6 and Q4 caches side by side, the cost of each per token, and what it saves."""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import traitlets as t

from exl2nb.cache.spec import CACHE_MODES, parse_mode, storages_of
from exl2nb.core.errors import OptionError
from exl2nb.core.options import check_keywords
from exl2nb.eval.cache_loss import Baseline, LockstepToken, Needle, NeedleResult, find_needle
from exl2nb.sampling.params import check_integer
from exl2nb.tokenizer.detokenize import Detokenizer
from exl2nb.widgets import static
from exl2nb.widgets.background import Background, BackgroundWidget
from exl2nb.widgets.base import as_text
from exl2nb.widgets.feed import Feed
from exl2nb.widgets.protocol import CacheKind, CachesState, KlToken, NeedleHit, Status
from exl2nb.widgets.static import percent

if TYPE_CHECKING:
    import pandas as pd

BASELINE_MODE = "fp16"
SPLIT_MODES = ("k16v8", "k16v4", "k8v16", "k4v16", "k4v8")
TURN_S = 1 / 30
"""Longest time the model is held before others get their turn and the page its tokens."""
_BIT_LABELS = {"q4": "4-bit", "q8": "8-bit", "fp8": "8-bit float", "fp16": "16-bit", "fp32": "32-bit"}


def kinds_of(llm: Any, free: int | None) -> list[CacheKind]:
    """Every mode that a model can have, with its sizes; `free` bytes say how many tokens fit."""
    names = [mode for mode in CACHE_MODES if mode != "fp32"]
    kinds = []
    for mode in (*names, *SPLIT_MODES):
        try:
            spec = llm.model.cache_spec(1, mode=mode)
        except OptionError:  # heads of this size have no such mode
            continue
        k, v = storages_of(mode)
        note = _BIT_LABELS[k] if k == v else f"K {_BIT_LABELS[k]}, V {_BIT_LABELS[v]}"
        fits = None if free is None else free // spec.page_bytes * spec.page_size
        kinds.append(CacheKind(mode, mode.upper(), note, round(spec.bits, 2), spec.token_bytes, fits))
    return kinds


def continuations(
    llm: Any, prompt: str, modes: Sequence[str], max_tokens: int, stop: threading.Event, tell: Callable[[str], None]
) -> Iterator[list[KlToken]]:
    """Continue a prompt greedily under each mode; yields tokens some times a second. The model is only held while it computes.

    Raises:
        OptionError, ContextOverflow, EngineClosed: it cannot run; says why.
    """
    tokenizer = llm.tokenizer
    ids = tokenizer.encode(prompt)
    base = Baseline(llm.engine.shared_model, ids, max_tokens=max_tokens, mode=BASELINE_MODE)
    try:
        for cell, mode in enumerate(modes):
            tell(mode)
            steps, words = base.run(mode, tuple(tokenizer.eos_ids)), Detokenizer(tokenizer, ids)
            ended = False
            while not ended and not stop.is_set():
                found, ended = take_turn(steps)
                yield [_token(cell, one, words, tokenizer) for one in found]
            if stop.is_set():
                return
            if rest := words.flush():
                yield [KlToken(cell, rest, -1, None, None, None, None, None)]
    finally:
        base.close()


def take_turn(steps: Iterator[LockstepToken]) -> tuple[list[LockstepToken], bool]:
    """The tokens of one turn, and whether the answer ended."""
    found, end = [], time.monotonic() + TURN_S
    for step in steps:
        found.append(step)
        if time.monotonic() >= end:
            return found, False
    return found, True


def _token(cell: int, step: LockstepToken, words: Detokenizer, tokenizer: Any) -> KlToken:
    same = step.favourite == step.id
    favourite = None if same else tokenizer.piece(step.favourite)
    numbers = (round(step.prob, 6), round(step.baseline_prob, 6), float(f"{step.kl:.6g}"))
    return KlToken(cell, words.feed(step.id), step.id, *numbers, same, favourite)


def search(llm: Any, needle: Needle, modes: Sequence[str], stop: threading.Event) -> Iterator[NeedleResult]:
    """Look for the needle under each mode, first without it, then at every depth; one result at a time."""
    for mode in modes:
        for depth in (None, *needle.depths):
            if stop.is_set():
                return
            result = find_needle(llm.engine.shared_model, llm.tokenizer, needle, mode=mode, depth=depth)
            yield result


def needle_verdict(hits: Sequence[NeedleHit], needle: Needle) -> str:
    """What may be said after looking, in words, and what may not."""
    found = {mode: [hit.prob for hit in hits if hit.mode == mode and hit.depth is not None] for mode in dict.fromkeys(h.mode for h in hits)}
    found = {mode: sum(probs) / len(probs) for mode, probs in found.items() if probs}
    if BASELINE_MODE not in found:
        return ""
    truth = found[BASELINE_MODE]
    without = next((hit.prob for hit in hits if hit.mode == BASELINE_MODE and hit.depth is None), 0.0)
    answer = needle.answer.strip()
    if truth < 0.01 or truth < 5 * without:
        return (
            f"Even with an FP16 cache this model gives “{answer}” only {percent(truth)} on average, against {percent(without)} where the "
            "fact is not in the text at all: it does not find the needle, so this says nothing about the other caches."
        )
    others = ", ".join(f"{mode.upper()} {percent(prob)}" for mode, prob in found.items() if mode != BASELINE_MODE)
    head = f"FP16 gives “{answer}” {percent(truth)} on average, against {percent(without)} where the fact is not in the text"
    return f"{head}; {others}." if others else f"{head}."


MOST_MODES = 8
MOST_TOKENS = 512
_PLAIN_TRAITS = ("modes", "prompt", "max_tokens", "free", "kinds", "tokens", "needle", "needle_text", "verdict", "context", "model")


class CacheExplorer(BackgroundWidget):
    """Read and continue one prompt under several cache modes, and see token by token what fewer bits change.

    Every mode decodes greedily. Beside it an FP16 cache reads the same tokens, so each token has a KL:
    how far the mode's probabilities are from those of FP16 at that position, in nats. "Run needle test" puts a fact into filler
    text at several depths and asks for it; what counts is the probability of the right answer, with each cache and without the fact.

    Args:
        llm: a loaded model. None: display only.
        result: what `to_dict` gave, to show again.
        needle: what is hidden, a `Needle` or a mapping of its fields (fact, question, answer, filler, sentences, depths).
        free: bytes of memory to fill with tokens. Default: what is free on the model's device now.

    Traits, also keywords (synced with the page both ways):
        prompt: text to continue. modes: the columns, names as in `load(cache=...)`; "fp16" is always the first. Default fp16, q8, q6, q4.
        max_tokens: of each continuation, 1 to 512. Default 48. height: greatest height of a text, CSS length or pixels.

    Example:
        >>> import exl2nb as ex
        >>> with ex.demo(progress=None) as llm:
        ...     frame = ex.widgets.CacheExplorer(llm, modes=["q4"], max_tokens=4).start().wait().to_frame()
        >>> list(frame.index), bool(frame.kl_mean["fp16"] == 0)
        (['fp16', 'q4'], True)
    """

    _bundle, _state_type = "caches", CachesState

    prompt = t.Unicode("It was a dark night, and the old man").tag(sync=True, option=True)
    modes = t.List(t.Unicode(), [BASELINE_MODE, "q8", "q6", "q4"]).tag(sync=True, option=True)
    max_tokens = t.Int(48).tag(sync=True, option=True)
    stage = t.Unicode("").tag(sync=True)
    _kinds = t.List().tag(sync=True)
    _run_modes = t.List().tag(sync=True)
    _run_prompt = t.Unicode("").tag(sync=True)
    _tokens = t.List().tag(sync=True)
    _needle = t.List().tag(sync=True)
    _needle_modes = t.List().tag(sync=True)
    _needle_depths = t.List().tag(sync=True)
    _needle_text = t.Dict().tag(sync=True)
    _verdict = t.Unicode("").tag(sync=True)
    _free = t.Int(None, allow_none=True).tag(sync=True)
    _context = t.Int(0).tag(sync=True)
    _model_label = t.Unicode("").tag(sync=True)
    _has_model = t.Bool(False).tag(sync=True)

    def __init__(
        self,
        llm: Any = None,
        *,
        result: Mapping[str, Any] | None = None,
        needle: Needle | Mapping[str, Any] | None = None,
        free: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._background = Background("CacheExplorer")  # first: `close` needs it, also where this constructor raises
        if llm is not None and not all(hasattr(llm, name) for name in ("model", "tokenizer", "engine")):
            raise OptionError(f"CacheExplorer: llm is {type(llm).__name__!r}; expected a loaded model, for example exl2nb.load(DIR)")
        if free is not None:
            check_integer("CacheExplorer: free", free, 1, 1 << 60)
        self.llm, self.needle = llm, _needle(needle)
        self._feed, self._hits, self._sizes = Feed(self.send), list[NeedleHit](), dict[str, CacheKind]()
        super().__init__(**kwargs)
        self._check()
        with self.hold_sync():
            self._describe_needle(0)
            if llm is not None:
                self._describe(llm, free)
            if result is not None:
                self._take(result)

    @t.validate("modes")
    def _known_modes(self, proposal: Mapping[str, Any]) -> list[str]:
        found = [parse_mode(mode, where="CacheExplorer") for mode in proposal["value"]]
        found = list(dict.fromkeys([BASELINE_MODE, *found]))
        if len(found) > MOST_MODES:
            raise OptionError(f"CacheExplorer: modes has {len(found)} caches with fp16; expected at most {MOST_MODES}")
        return found

    def _check(self) -> None:
        check_integer("CacheExplorer: max_tokens", self.max_tokens, 1, MOST_TOKENS)

    # ---- running ----

    def start(self, prompt: str | None = None) -> CacheExplorer:
        """Begin to generate under each mode, one after the other, and return at once.

        Raises:
            OptionError: no model, or a number out of range. GenerationError: something runs already.
        """
        llm = self._model()
        self._check()
        if prompt is not None:
            self.prompt = prompt
        prompt, modes, count = self.prompt, list(self.modes), int(self.max_tokens or 1)

        def before() -> None:
            self._run_modes, self._run_prompt, self._tokens = modes, prompt, []
            self._feed.begin(prompt)

        def work(stop: threading.Event) -> None:
            for tokens in continuations(llm, prompt, modes, count, stop, self._tell):
                self._feed.add(tokens)

        self._begin(before, work, self._end_of_feed)
        return self

    def hide_needle(self) -> CacheExplorer:
        """Look for the needle under each mode and at each depth, in the background; errors as in `start`."""
        llm, modes = self._model(), list(self.modes)

        def before() -> None:
            self._hits, self._needle, self._needle_modes, self._verdict = [], [], modes, ""

        def work(stop: threading.Event) -> None:
            for hit in search(llm, self.needle, modes, stop):
                self._hits.append(NeedleHit(hit.mode, hit.depth, round(hit.prob, 8), hit.rank))
                with self.hold_sync():
                    self._describe_needle(hit.tokens)
                    self.stage = hit.mode
                    self._needle = [list(h) for h in self._hits]
            self._verdict = needle_verdict(self._hits, self.needle)

        self._begin(before, work, lambda status: None)
        return self

    def _model(self) -> Any:
        if self.llm is None:
            raise OptionError("CacheExplorer: no model is attached; make it with CacheExplorer(llm)")
        return self.llm

    def _begin(self, before: Callable[[], None], work: Callable[[threading.Event], None], after: Callable[[Status], None]) -> None:
        def starting() -> None:
            with self.hold_sync():
                self.status, self.error = "running", ""
                before()

        def done(status: Status, problem: BaseException | None) -> None:
            after(status)
            with self.hold_sync():
                self.stage, self.status = "", status
                if problem is not None:
                    self.error = as_text(problem)
            self._refresh_static()

        self._background.begin(work, done, before=starting)

    def _end_of_feed(self, status: Status) -> None:
        self._feed.finish(status)
        self._tokens = [list(token) for token in self._feed.items]

    def _tell(self, mode: str) -> None:
        self.stage = mode

    # ---- messages ----

    def _send_snapshot(self) -> None:
        self._feed.snapshot()

    def _receive_run(self, message: Mapping[str, Any]) -> None:
        prompt, modes = message.get("prompt"), message.get("modes")
        if not isinstance(prompt, str) or not isinstance(modes, list) or not prompt.strip():
            raise OptionError("CacheExplorer: the page sent no prompt or no modes; write a prompt, or reload the page")
        if self._background.alive:
            return  # a second click in flight
        check_integer("CacheExplorer: max_tokens", message.get("max_tokens"), 1, MOST_TOKENS)
        with self.hold_sync():
            self.modes, self.max_tokens = modes, int(message["max_tokens"])
        self.start(prompt)

    def _receive_needle(self, message: Mapping[str, Any]) -> None:
        if self._background.alive:
            return
        if isinstance(message.get("modes"), list):
            self.modes = message["modes"]
        self.hide_needle()

    def _receive_stop(self, _message: Mapping[str, Any]) -> None:
        self.stop()

    # ---- results ----

    @property
    def tokens(self) -> dict[str, list[KlToken]]:
        """Mode -> its text so far."""
        found: dict[str, list[KlToken]] = {mode: [] for mode in self._run_modes}
        for token in self._feed.items:
            found[self._run_modes[token.cell]].append(token)
        return found

    @property
    def verdict(self) -> str:
        """The result of the needle test, in words; "" before it ran."""
        return self._verdict

    def to_frame(self) -> pd.DataFrame:
        """One row per mode: bits, token_bytes, fits, tokens, kl_mean, kl_max, same_choice, first_difference (token; NaN: none), text."""
        import pandas as pd

        kinds, found = self._sizes, self.tokens
        rows = []
        for mode in self._run_modes or self.modes:
            kind, tokens = kinds.get(mode), found.get(mode, [])
            known = [token.kl for token in tokens if token.kl is not None]
            rows.append(
                {
                    "mode": mode,
                    "bits": kind.bits if kind else None,
                    "token_bytes": kind.token_bytes if kind else None,
                    "fits": kind.fits if kind else None,
                    "tokens": len(tokens),
                    "kl_mean": static.mean_kl(tokens),
                    "kl_max": max(known, default=None),
                    "same_choice": static.same_choice(tokens),
                    "first_difference": static.first_difference(found.get(BASELINE_MODE, []), tokens),
                    "text": "".join(token.text for token in tokens),
                }
            )
        return pd.DataFrame(rows).set_index("mode")

    to_dataframe = to_frame

    def to_token_frame(self) -> pd.DataFrame:
        """One row per token: mode, position, text, id, prob, reference_prob, kl, same, favourite."""
        import pandas as pd

        rows = [{"mode": mode, "position": i, **token._asdict()} for mode, some in self.tokens.items() for i, token in enumerate(some)]
        return pd.DataFrame(rows, columns=["mode", "position", *KlToken._fields]).drop(columns="cell")

    def to_needle_frame(self) -> pd.DataFrame:
        """Probability of the needle's answer: a row per depth (NaN: the fact was not there), a column per mode."""
        import pandas as pd

        frame = pd.DataFrame(self._hits, columns=list(NeedleHit._fields))
        return frame.pivot_table(index="depth", columns="mode", values="prob", dropna=False, sort=False, observed=False)

    def to_dict(self) -> dict[str, Any]:
        """Everything shown, as plain JSON values; `CacheExplorer(result=...)` shows it again."""
        tokens = [list(token) for token in self._feed.items]
        kinds = [list(kind) for kind in self._sizes.values()]
        values = (self._run_modes or self.modes, self._run_prompt or self.prompt, self.max_tokens, self._free, kinds, tokens)
        return dict(zip(_PLAIN_TRAITS, (*values, self._needle, self._needle_text, self._verdict, self._context, self._model_label)))

    def _take(self, result: Mapping[str, Any]) -> None:
        if not isinstance(result, Mapping):
            raise OptionError(f"CacheExplorer: result is {type(result).__name__!r}; expected what to_dict() gives")
        check_keywords(dict(result), list(_PLAIN_TRAITS), where="CacheExplorer: result")
        try:
            tokens = [KlToken(*token) for token in result.get("tokens", ())]
            kinds = [CacheKind(*kind) for kind in result.get("kinds", ())]
            hits = [NeedleHit(*hit) for hit in result.get("needle", ())]
        except TypeError as error:
            raise OptionError(f"CacheExplorer: result cannot be read: {error}; expected what to_dict() gives") from error
        self.modes = list(result.get("modes", self.modes))
        if any(not 0 <= token.cell < len(self.modes) for token in tokens):
            raise OptionError("CacheExplorer: result has a token of a mode it does not name; expected what to_dict() gives")
        self.prompt = self._run_prompt = str(result.get("prompt", ""))
        self.max_tokens = result.get("max_tokens", self.max_tokens)
        self._check()
        self._run_modes, self._hits, self._needle = list(self.modes), hits, [list(hit) for hit in hits]
        self._show_sizes(kinds)
        self._needle_modes, self._verdict = list(dict.fromkeys(hit.mode for hit in hits)), str(result.get("verdict", ""))
        self._needle_depths = list(dict.fromkeys(hit.depth for hit in hits)) or self._needle_depths
        self._needle_text = {**self._needle_text, **dict(result.get("needle_text") or {})}
        self._context, self._free = int(result.get("context") or 0), result.get("free")
        self._model_label = str(result.get("model", ""))
        self._feed.load(self._run_prompt, tokens, {"n": len(tokens), "tps": 0.0, "ttft_s": None})
        self._tokens, self.status = [list(token) for token in tokens], "done"

    def _describe(self, llm: Any, free: int | None) -> None:
        from exl2nb.llm.memory import free_bytes

        self._free = free_bytes(llm.model.device) if free is None else free
        self._show_sizes(kinds_of(llm, self._free))
        self._context, self._has_model = llm.model.context, True
        self._model_label = str(getattr(llm, "name", ""))

    def _show_sizes(self, kinds: list[CacheKind]) -> None:
        self._sizes, self._kinds = {kind.mode: kind for kind in kinds}, [kind._asdict() for kind in kinds]

    def _describe_needle(self, tokens: int) -> None:
        needle = self.needle
        self._needle_text = {"fact": needle.fact, "question": needle.question, "answer": needle.answer, "tokens": tokens}
        self._needle_depths = [None, *needle.depths]

    # ---- without the page ----

    def _export_state(self) -> dict[str, Any]:
        live = {"_tokens": [list(token) for token in self._feed.items], "_has_model": False}
        return {**super()._export_state(), **live, "status": "stopped" if self.status == "running" else self.status, "stage": ""}

    def _summary(self) -> str:
        found = self.tokens
        parts = [f"{mode} KL {kl:.3g}" for mode, some in found.items() if (kl := static.mean_kl(some)) is not None]
        return f"CacheExplorer({self.status}" + (f": {', '.join(parts)})" if parts else f", {', '.join(self.modes)})")

    def _static_body(self) -> str:
        found, kinds = self.tokens, self._sizes
        base = found.get(BASELINE_MODE, [])
        shown = []
        for mode in self._run_modes or self.modes:
            tokens, kind = found.get(mode, []), kinds.get(mode)
            mean = static.mean_kl(tokens)
            note = "" if kind is None else f"{kind.note}, {kind.token_bytes:,} bytes per token"
            note += "" if mean is None else f", mean KL {mean:.3g}"
            shown.append(static.column_html(mode.upper(), note, tokens, static.first_difference(base, tokens)))
        prompt = html.escape(self._run_prompt or self.prompt)
        head = f'<div style="white-space:pre-wrap"><b>Prompt</b> {prompt}</div>'
        return head + static.side_by_side(shown) + self._needle_html()

    def _needle_html(self) -> str:
        if not self._hits:
            return ""
        at = {(hit.mode, hit.depth): hit.prob for hit in self._hits}
        cell = '<td style="text-align:right;padding:0 8px">'
        rows = "".join(
            f'<tr><th style="text-align:left">{_depth(depth)}</th>'
            + "".join(f"{cell}{_share(at.get((mode, depth)))}</td>" for mode in self._needle_modes)
            + "</tr>"
            for depth in self._needle_depths
        )
        head = "".join(f'<th style="text-align:right;padding:0 8px">{html.escape(mode.upper())}</th>' for mode in self._needle_modes)
        fact = html.escape(str(self._needle_text.get("fact", "")))
        return (
            f'<div style="margin-top:8px"><b>Needle</b> {fact}<table style="font-size:12px"><thead><tr><th></th>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table>{html.escape(self._verdict)}</div>"
        )


def _depth(depth: float | None) -> str:
    return "absent (control)" if depth is None else f"at {depth:.0%}"


def _share(prob: float | None) -> str:
    return "" if prob is None else static.percent(prob)


def _needle(source: Needle | Mapping[str, Any] | None) -> Needle:
    if source is None or isinstance(source, Needle):
        return source or Needle()
    if not isinstance(source, Mapping):
        raise OptionError(f"CacheExplorer: needle is {type(source).__name__!r}; expected a Needle, or a mapping of its fields")
    check_keywords(dict(source), list(Needle.__dataclass_fields__), where="CacheExplorer: needle")
    return Needle(**source)

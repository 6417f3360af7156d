"""SamplerMicroscope: one row of logits on its way through the samplers to a token, with sliders."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import traitlets as t

from exl2nb.core.errors import Exl2Error, OptionError
from exl2nb.core.options import check_keywords, make
from exl2nb.llm.request_options import OPTION_DEFAULTS, SamplingOptions
from exl2nb.sampling.explanation import Explanation, as_html
from exl2nb.sampling.filters import FILTER_DESCRIPTIONS
from exl2nb.sampling.params import SAMPLING_OPTIONS, SamplingParams
from exl2nb.sampling.replay import Replay, seeded
from exl2nb.widgets import static
from exl2nb.widgets.base import ExlWidget
from exl2nb.widgets.protocol import LINE_PROB, SHOWN_TOKENS, SLIDER_FIELDS, LinePart, MicroscopeState, SampleStep, SampleToken

if TYPE_CHECKING:
    import pandas as pd

_SLIDER_NAMES = tuple(one["name"] for one in SLIDER_FIELDS)
MOST_TEXT = 4000  # characters of the prompt that travel


class SamplerMicroscope(ExlWidget):
    """What the samplers do to the model's choice, step by step: how many tokens survive each, their probability, and which one is drawn.

    Runs the chain of `exl2nb.sampling.explain`, the same that generation runs: with the settings and the seed of an answer it draws the
    tokens of the answer. Sliders change the settings of this one choice; the text before it stays.

    Args:
        source: an `LLM`, which continues `prompt` by `max_tokens` tokens; a completion made with `return_logits=True`; raw logits `(V,)`
            or `(n, V)`; or a `sampling.replay.Replay`.
        prompt: text or ids, for an LLM.
        max_tokens: places to look at, for an LLM. Default 24.
        prompt_ids, new_ids: what stood before, for a completion and for logits; penalties look back on it.
        tokenizer: names the tokens of a completion or of logits.
        settings: fields of `SamplingParams`, such as temperature=0.8, top_p=0.9, seed=7.

    Traits, also keywords (synced with the page both ways):
        at: which new token, from 0. Default 0.
    Traits to read:
        token, token_text, prob, uniform: what is drawn. settings: of the sliders.

    Example:
        >>> scope = SamplerMicroscope(np.log(np.float32([0.5, 0.3, 0.15, 0.05])), top_p=0.6, seed=1)
        >>> [(step.name, step.survivors) for step in scope.explanation.steps]
        [('logits', 4), ('top_p', 2)]
        >>> scope.set(temperature=0).token
        0
    """

    _more_keywords = (SamplingOptions.__annotations__, OPTION_DEFAULTS)
    _bundle, _state_type = "microscope", MicroscopeState

    at = t.Int(0).tag(sync=True, option=True)
    settings = t.Dict().tag(sync=True)
    token = t.Int(-1).tag(sync=True)
    token_text = t.Unicode("").tag(sync=True)
    prob = t.Float(0.0).tag(sync=True)
    uniform = t.Float(None, allow_none=True).tag(sync=True)
    seed = t.Unicode("").tag(sync=True)
    _index = t.Int(0).tag(sync=True)
    _others = t.Unicode("").tag(sync=True)
    _prompt = t.Unicode("").tag(sync=True)
    _answer = t.List().tag(sync=True)
    _vocab = t.Int(0).tag(sync=True)
    _steps = t.List().tag(sync=True)
    _tokens = t.List().tag(sync=True)
    _line = t.List().tag(sync=True)
    _samplers = t.List(SLIDER_FIELDS).tag(sync=True)
    _about = t.Dict(FILTER_DESCRIPTIONS).tag(sync=True)

    def __init__(
        self,
        source: Any,
        prompt: Any = None,
        *,
        max_tokens: int = 24,
        prompt_ids: Iterable[int] = (),
        new_ids: Iterable[int] = (),
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        names = {f.name for f in fields(SamplingParams)}
        given = {name: options.pop(name) for name in list(options) if name in names}
        check_keywords(options, [*self._keywords(), *names], where="SamplerMicroscope")
        if getattr(source, "seed", None) is not None:
            given.setdefault("seed", source.seed)
        params = seeded(make(SamplingParams, given, where="SamplerMicroscope"))
        self.replay: Replay = _replay(source, prompt, params, max_tokens, (tuple(prompt_ids), tuple(new_ids)), tokenizer)
        self._asked: tuple[int, SamplingParams] | None = None
        super().__init__(**options)
        text = prompt if isinstance(prompt, str) else getattr(source, "prompt", None) or self._text_of(self.replay.prompt_ids)
        with self.hold_sync():
            self._prompt = text[-MOST_TEXT:]
            self._answer = [list(SampleToken(i, self._name(i))) for i in self.replay.new_ids]
            self._vocab = self.replay.logits.shape[1]
            self._show(self.at, params)

    # ---- looking ----

    @property
    def explanation(self) -> Explanation:
        """The chain shown: every step with its survivors and probabilities. `print` it, or `.to_frame()`."""
        return self._explanation

    @property
    def params(self) -> SamplingParams:
        """The settings shown."""
        return self._explanation.params

    def set(self, **changes: Any) -> SamplerMicroscope:
        """Change settings (fields of SamplingParams) and draw again.

        Raises:
            OptionError: unknown, out of range or contradicting each other; nothing changes. GenerationError: no token would be left.
        """
        known = [f.name for f in fields(SamplingParams)]
        check_keywords(changes, known, where="SamplerMicroscope.set")
        self._show(self.at, replace(self.params, **changes))
        return self

    def look(self, at: int) -> SamplerMicroscope:
        """Go to another place of the answer.

        Raises:
            OptionError: there is no such place.
        """
        self._show(at, self.params)
        return self

    def _show(self, at: int, params: SamplingParams) -> None:
        found = self.replay.explain(at, params)
        shown = found.shown(SHOWN_TOKENS)
        self._explanation, self._asked = found, (at, params)
        rest = {name: value for name, value in params.changed.items() if name not in (*_SLIDER_NAMES, "seed", "post_sampling")}
        with self.hold_sync():
            self.at, self.error, self.status = at, "", "idle"
            self.settings = {name: getattr(params, name) for name in _SLIDER_NAMES}
            self._others = ", ".join(f"{name}={str(value)[:40]}" for name, value in rest.items())
            self._tokens = [list(SampleToken(i, self._name(i))) for i in shown]
            self._steps = [step._asdict() for step in _steps(found, shown)]
            self._line = [list(part) for part in line_of(found, self._name)]
            self.token, self.token_text, self.prob = found.token, self._name(found.token), found.prob
            self.uniform, self.seed, self._index = found.uniform, str(found.seed), found.index
        self._fire("change", self)

    def on_change(self, callback: Callable[[SamplerMicroscope], Any], remove: bool = False) -> None:
        """Call `callback(microscope)` after every change of settings or place."""
        self._listen("change", callback, remove)

    @t.observe("at")
    def _follow(self, change: Mapping[str, Any]) -> None:
        asked = getattr(self, "_asked", None)
        if asked is None or asked[0] == change["new"]:
            return
        try:
            self._show(change["new"], asked[1])
        except Exl2Error:
            self.at = asked[0]
            raise

    def _receive_sample(self, message: Mapping[str, Any]) -> None:
        at, changes = message.get("at"), message.get("settings")
        if not isinstance(at, int) or not isinstance(changes, dict) or not all(name in (*_SLIDER_NAMES, "seed") for name in changes):
            raise OptionError("SamplerMicroscope: the page sent invalid settings; reload it")
        whole = {name: int(value) if SAMPLING_OPTIONS[name].kind is int and _is_whole(value) else value for name, value in changes.items()}
        self._show(min(max(at, 0), len(self.replay) - 1), replace(self.params, **whole))

    # ---- words ----

    def _name(self, token: int) -> str:
        words = self.replay.tokenizer
        return f"#{token}" if words is None else str(words.piece(token))

    def _text_of(self, ids: Iterable[int]) -> str:
        return "".join(self._name(i) for i in list(ids)[-200:])

    def to_frame(self) -> pd.DataFrame:
        """One line per step: settings, survivors, removed, its mass, temperature, entropy, the best token, the drawn one's probability."""
        return self._explanation.to_frame()

    def tokens_frame(self, count: int = 20) -> pd.DataFrame:
        """One line per token: its probability after each step."""
        return self._explanation.tokens_frame(count)

    def _summary(self) -> str:
        left = len(self._explanation.ids)
        return (
            f"SamplerMicroscope(token {self.at} of {len(self.replay)}: {left} of {self._vocab} left, "
            f"drew {self.token_text!r} at {static.percent(self.prob)})"
        )

    def _static_body(self) -> str:
        told = self._prompt[-400:] + "".join(str(text) for _, text in self._answer[: self.at])
        return f'<div style="white-space:pre-wrap;opacity:.8">{html.escape(told)}▏</div>{as_html(self._explanation)}'


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and float(value).is_integer()


def _steps(found: Explanation, shown: list[int]) -> list[SampleStep]:
    steps = []
    for step, row in zip(found.steps, found.rows()):
        at = step.ids.searchsorted(shown).clip(max=len(step.ids) - 1)
        probs = [round(float(step.after[i]), 7) if step.ids[i] == token else None for i, token in zip(at, shown)]
        steps.append(
            SampleStep(
                step.name, row["settings"], step.survivors, len(step.removed), round(step.removed_mass, 7), round(step.temperature, 6),
                round(row["entropy_bits"], 4), probs,
            )
        )  # fmt: skip
    return steps


def line_of(found: Explanation, name: Callable[[int], str]) -> list[LinePart]:
    """The line that the draw walks along: probabilities in order of ids; where they are tiny, neighbours are one piece."""
    ids, probs = found.ids, found.probs
    sums = np.concatenate([[0.0], probs.cumsum()])
    parts: list[LinePart] = []
    first = 0
    for place in [*np.flatnonzero((probs >= LINE_PROB) | (ids == found.token)).tolist(), len(ids)]:
        if place > first:
            parts.append(
                LinePart(-1, f"{place - first} token{'s' if place - first > 1 else ''}", round(float(sums[place] - sums[first]), 7))
            )
        if place < len(ids):
            parts.append(LinePart(int(ids[place]), name(int(ids[place])), round(float(probs[place]), 7)))
        first = place + 1
    return parts


def _replay(source: Any, prompt: Any, params: SamplingParams, max_tokens: int, ids: tuple[tuple[int, ...], ...], tokenizer: Any) -> Replay:
    """The source as rows of logits with their context."""
    if isinstance(source, Replay):
        return source
    prompt_ids, new_ids = ids
    if callable(getattr(source, "generate", None)):
        if prompt is None:
            raise OptionError("SamplerMicroscope: there is no prompt; give the text that the model continues")
        words = source.tokenizer
        before = words.encode(prompt) if isinstance(prompt, str) else list(prompt)
        settings = {f.name: getattr(params, f.name) for f in fields(params)}
        done = source.generate(before, max_tokens=max_tokens, return_logits=True, **settings)
        return Replay.of(done.logits, [token.id for token in done.tokens], before, tokenizer=words)
    if hasattr(source, "tokens") and hasattr(source, "logits"):
        if source.logits is None:
            raise OptionError("SamplerMicroscope: the completion kept no logits; generate it with return_logits=True")
        if not prompt_ids and tokenizer is not None and isinstance(source.prompt, str):
            prompt_ids = tuple(tokenizer.encode(source.prompt))
        return Replay.of(source.logits, [token.id for token in source.tokens], prompt_ids, tokenizer=tokenizer)
    if not hasattr(source, "shape") or not hasattr(source, "dtype"):
        raise OptionError(
            f"SamplerMicroscope: got {type(source).__name__!r}; expected an LLM and a prompt, a completion with logits, or logits"
        )
    return Replay.of(source, new_ids, prompt_ids, tokenizer=tokenizer)

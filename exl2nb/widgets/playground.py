"""Playground: a prompt, the sampling controls, and the text as it streams, each token tinted by its probability."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import traitlets as t

from exl2nb.core.errors import OptionError
from exl2nb.core.log import logger
from exl2nb.core.options import check_keywords
from exl2nb.sampling.defaults import CHAT_DEFAULTS, DEFAULT_NAMES, NEUTRAL_VALUES, SamplingDefaults
from exl2nb.sampling.explanation import Explanation
from exl2nb.sampling.params import SamplingParams, check_integer
from exl2nb.sampling.replay import Replay
from exl2nb.widgets import static
from exl2nb.widgets.background import Background
from exl2nb.widgets.base import ExlWidget
from exl2nb.widgets.chat import ChatMode, turns_html, turns_text
from exl2nb.widgets.feed import Feed
from exl2nb.widgets.protocol import SAMPLER_FIELDS, Fates, PlaygroundState, Stats, Status, TokenItem, Tops
from exl2nb.widgets.tokens import brief_rows, items_of, raw_items, token_item

if TYPE_CHECKING:
    import pandas as pd


def _trait(default: float | bool) -> t.TraitType:
    made = t.Bool(default) if isinstance(default, bool) else t.Int(default) if isinstance(default, int) else t.Float(default)
    return made.tag(sync=True, option=True)


class SamplerTraits(t.HasTraits):
    """One synced trait, also a keyword, for each of `SAMPLER_FIELDS`, under the names of `SamplingParams`."""

    vars().update({one["name"]: _trait(one["neutral"]) for one in SAMPLER_FIELDS})


def explain_place(llm: Any, prompt_ids: Sequence[int], new_ids: Sequence[int], at: int, params: SamplingParams) -> Explanation:
    """How the token at place `at` of a finished answer was chosen; its prefix is scored once, mostly from cached pages.

    Args:
        llm: the model that wrote it.
        prompt_ids, new_ids: the prompt and the answer.
        at: a place of the answer.
        params: its settings, with its seed. Mirostat remembers: then the answer is written again up to there.
    """
    if params.mirostat:
        rows = llm.generate(list(prompt_ids), max_tokens=at + 1, return_logits=True, **params.changed).logits
    else:
        prefix = [*prompt_ids, *new_ids[:at]]
        rows = llm.generate(prefix, max_tokens=1, temperature=0.0, ignore_eos=True, return_logits=True).logits[0]
    return Replay.of(rows, new_ids[:at], prompt_ids, tokenizer=llm.tokenizer).explain(at, params)


def fates(found: Explanation, count: int) -> tuple[list[str], int, int]:
    """For each of the `count` most likely tokens "" where it stayed, else the sampler that removed it; survivors; candidates at first."""
    taken = {int(token): step.name for step in found.steps for token in step.removed}
    first = found.steps[0]
    return [taken.get(token, "") for token in first.best(count).tolist()], len(found.ids), first.survivors


class Survival:
    """Computes sampler fates on its own thread, the latest request first; a failure leaves the request unanswered.

    Args:
        send: takes a message.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send, self._wish = send, None
        self._background = Background("Playground's card")

    def ask(self, llm: Any, prompt: str, completion: Any, settings: Mapping[str, Any], where: tuple[int, int, int]) -> None:
        """Work out the fates at `where`: run, place, number of alternatives. Returns at once."""
        self._wish = (llm, prompt, completion, settings, where)
        if not self._background.alive:
            self._background.begin(self._work, lambda _status, _problem: None)

    def close(self) -> None:
        """Answer nothing more."""
        self._wish = None
        self._background.stop()

    def wait(self) -> None:
        """Wait until everything is answered."""
        self._background.wait()

    def _work(self, stop: threading.Event) -> None:
        while (wish := self._wish) is not None and not stop.is_set():
            self._wish = None
            llm, prompt, completion, settings, (run, at, count) = wish
            named = {name: value for name, value in settings.items() if name != "max_tokens"}
            params = SamplingParams(**{**named, "seed": completion.seed})
            new_ids = [token.id for token in completion.tokens]
            if at < len(new_ids):
                found = explain_place(llm, llm.tokenizer.encode(prompt), new_ids, at, params)
                names, left, of = fates(found, count)
                self._send(Fates(type="fates", run=run, at=at, names=names, left=left, of=of))


TOP_TOKENS = 6
"""Alternatives requested per token, for the card of a token."""
_SETTING_NAMES = (*(one["name"] for one in SAMPLER_FIELDS), "seed")
_FOLDED_DEFAULTS = {one["name"]: one["neutral"] for one in SAMPLER_FIELDS if not one["common"]}


class Playground(ExlWidget, ChatMode, SamplerTraits):
    """Prompt a model and watch the text stream, token by token.

    The last line of a cell displays it. Generate and Stop work in the page, also while another cell runs; `start`, `stop` and `wait` do the
    same from Python. Pointing at a token, or walking through the text with the arrow keys, shows its probability and its alternatives.

    Args:
        llm: a loaded model; anything with `stream(prompt, *, top_logprobs, **settings)` that yields chunks
            (or strings) will do. None: display only.
        result: a finished run to show: a Completion, or a mapping with `text`, `tokens` and perhaps `prompt`, `finish_reason`.

    Raises:
        OptionError: llm is no model, or an option is out of range. TokenizerError: chat is True and there is no chat template.

    Traits, also keywords (synced with the page both ways):
        prompt: text to continue. Default "".
        max_tokens: largest number of tokens in one run. Default 128.
        temperature, top_k, top_p, min_p, repetition_penalty: as in `SamplingParams`. Default: `llm.sampling_defaults`, which the page
            names, too: the values of the model's generation_config.json, else temperature 0.7 and top_p 0.95.
        seed: as in `SamplingParams`. Default None.
        typical_p, xtc_probability, dry_multiplier, mirostat and every other number or switch of `SamplingParams`, neutral by default.
        view: "probability" or "rank", which tints the tokens, or "plain". Default "probability".
        chat: hold a conversation instead, in the model's chat format: `say`, `again`, `edit`, `go`. Default False; not changed later.
        template: Jinja source of a chat format instead of the model's own; stays in Python. Default None.
        height: greatest height of the text, CSS length or pixels. Default "" (320 px).
    Traits to read:
        text: the generated text; set once, when a run ends. n_tokens, tokens_per_second, ttft_s, finish_reason, status, error: how it went.

    Example:
        >>> play = Playground(lambda_model, prompt="It was", max_tokens=5)  # doctest: +SKIP
        >>> play.start().wait()  # doctest: +SKIP
    """

    # never begun: what `close` finds where the arguments did not fit the constructor
    _background, _stream = Background("Playground"), None
    _bundle, _state_type = "playground", PlaygroundState
    _state_keys = (*PlaygroundState.__annotations__, *_SETTING_NAMES)

    prompt = t.Unicode("").tag(sync=True, option=True)
    max_tokens = t.Int(128).tag(sync=True, option=True)
    temperature = t.Float(CHAT_DEFAULTS.temperature).tag(sync=True, option=True)
    top_p = t.Float(CHAT_DEFAULTS.top_p).tag(sync=True, option=True)
    seed = t.Int(None, allow_none=True).tag(sync=True, option=True)
    view = t.Enum(("probability", "rank", "plain"), "probability").tag(sync=True, option=True)
    text = t.Unicode("").tag(sync=True)
    n_tokens = t.Int(0).tag(sync=True)
    tokens_per_second = t.Float(0.0).tag(sync=True)
    ttft_s = t.Float(None, allow_none=True).tag(sync=True)
    finish_reason = t.Unicode("").tag(sync=True)
    _run_prompt = t.Unicode("").tag(sync=True)
    _tokens = t.List().tag(sync=True)
    _model_label = t.Unicode("").tag(sync=True)
    _has_model = t.Bool(False).tag(sync=True)
    _sees = t.Bool(False).tag(sync=True)
    _samplers = t.List(SAMPLER_FIELDS).tag(sync=True)
    _defaults = t.Unicode("").tag(sync=True)

    def __init__(self, llm: Any = None, *, result: Any = None, **kwargs: Any) -> None:
        self._background, self._stream = Background("Playground"), None  # first: `close` needs them, also where this constructor raises
        if llm is not None and not callable(getattr(llm, "stream", None)):
            raise OptionError(f"Playground: llm is {type(llm).__name__!r}; expected a loaded model, for example exl2nb.load(DIR)")
        self.llm = llm
        self._feed = Feed(self.send, brief=brief_rows, whole=items_from)
        self._survival = Survival(self.send)
        self._run_settings: dict[str, Any] = {}
        defaults = getattr(llm, "sampling_defaults", CHAT_DEFAULTS)
        super().__init__(**{**_start_values(defaults, kwargs), **kwargs})
        self._checked_settings()
        self._check_chat()
        with self.hold_sync():
            self._has_model, self._model_label = llm is not None, _label(llm)
            self._sees = getattr(llm, "vision", None) is not None
            self._defaults = "" if llm is None else str(defaults)
        if result is not None:
            self._take(result)

    # ---- running ----

    @property
    def settings(self) -> dict[str, Any]:
        """The sampling settings as keywords of `stream`; of the folded samplers only those that do something."""
        values = {name: getattr(self, name) for name in _SETTING_NAMES}
        return {name: value for name, value in values.items() if name not in _FOLDED_DEFAULTS or value != _FOLDED_DEFAULTS[name]}

    @property
    def tokens(self) -> list[TokenItem]:
        """The tokens so far: text, id, prob, rank and top alternatives of each."""
        return items_from(self._feed.items)

    def start(self, prompt: str | None = None) -> Playground:
        """Begin to generate and return at once; the text streams into the page.

        Args:
            prompt: replaces the prompt; None keeps it. In chat mode: what is said.

        Raises:
            OptionError: there is no model, or a setting is out of range.
            GenerationError: a run is in progress.
        """
        if self.chat:
            return self.say(self.prompt if prompt is None else prompt)

        def before() -> str:
            if prompt is not None:
                self.prompt = prompt
            return self.prompt

        return self._launch(before, lambda **settings: self.llm.stream(str(self._run_prompt), **settings))

    def _launch(self, before: Callable[[], str], ask: Callable[..., Any]) -> Playground:
        """Begin a run: `before` gives the text to show before the answer, `ask(**settings)` the stream."""
        if self.llm is None:
            raise OptionError("Playground: no model is attached; make it with Playground(llm)")
        settings = self._checked_settings()

        def starting() -> None:
            shown = before()
            self._stream = None
            with self.hold_sync():
                self.status, self.error, self.finish_reason, self.text = "running", "", "", ""
                self._run_prompt, self._tokens = shown, []
            self._feed.begin(shown)

        def work(stop: threading.Event) -> None:
            self._generate(stop, ask, settings)

        self._reason, self._speed, self._run_settings = "", None, settings
        self._background.begin(work, self._end, before=starting)
        return self

    def stop(self) -> None:
        """Ask the run to end; its text stays. Returns at once."""
        self._background.stop()
        cancel = getattr(self._stream, "cancel", None)
        if callable(cancel):
            cancel()

    def wait(self, timeout: float | None = None) -> str:
        """Wait for the run to end and return the text. An interrupt stops the run.

        Args:
            timeout: seconds to wait at most; the text so far is returned then, and the run goes on.

        Raises:
            Exl2Error: the run failed.
        """
        try:
            self._background.wait(timeout)
        except KeyboardInterrupt:
            self.stop()
            raise
        finally:
            self._refresh_static()
        return "".join([item.text for item in self._feed.items])

    def close(self) -> None:
        """Stop the run and remove the widget from the page."""
        self.stop()
        survival = getattr(self, "_survival", None)
        if survival is not None:
            survival.close()
        super().close()

    def _generate(self, stop: threading.Event, ask: Callable[..., Any], settings: dict[str, Any]) -> None:
        """The worker: everything that happens here reaches the page, errors included."""
        try:
            self._stream = stream = ask(top_logprobs=TOP_TOKENS, **settings)
            if stop.is_set():  # Stop came before there was a request to cancel
                self.stop()
            waits = hasattr(stream, "poll")  # tokens queue on the engine thread; this thread sleeps until the next frame
            for chunk in stream:
                fresh = raw_items(chunk)
                self._feed.add(fresh)
                if self._callbacks.get("token"):
                    for item in items_from(fresh):
                        self._fire("token", item)
                if stop.is_set() or (waits and stop.wait(self._feed.rest_s)):
                    break
            completion = getattr(stream, "completion", None)
            self._reason = getattr(completion, "finish_reason", "")
            timings = getattr(completion, "timings", None)
            self._speed = None if timings is None else (timings.decode_tok_s, timings.first_token_s)
        finally:
            close = getattr(self._stream, "close", None)
            if callable(close):
                close()

    def _end(self, status: Status, problem: BaseException | None) -> None:
        reason = self._reason
        if status == "done" and not reason:
            reason = "length" if self._feed.stats["n"] >= self.max_tokens else ""
        stats = self._feed.finish(status if status != "done" else reason or "done", speed=self._speed)
        with self.hold_sync():
            self._record(self.tokens, stats)
            self.finish_reason = reason
            if self.chat:
                self._answered(status, reason, self.text, self.tokens, stats)
            self.status = status
            if problem is not None:
                self._show_error(problem)
        try:
            self._refresh_static()
            self._fire("done", self)
        except Exception as late:
            logger.exception("Playground: after the run")
            self._background.problem = problem or late
            self._show_error(late)

    def _record(self, items: list[TokenItem], stats: Stats) -> None:
        self._tokens = [list(item) for item in items]
        self.text = "".join(item.text for item in items)
        self.n_tokens, self.tokens_per_second, self.ttft_s = stats["n"], stats["tps"], stats["ttft_s"]

    def _checked_settings(self) -> dict[str, Any]:
        settings = self.settings
        check_integer("max_tokens", settings["max_tokens"], 1, 2**31 - 1)
        SamplingParams(**{name: value for name, value in settings.items() if name != "max_tokens"})
        return settings

    def _take(self, result: Any) -> None:
        read = result.get if isinstance(result, Mapping) else lambda name, default=None: getattr(result, name, default)
        items = [token_item(token) for token in read("tokens") or ()] or items_of(read("text") or "")
        stats = Stats(n=len(items), tps=float(read("tokens_per_second") or 0.0), ttft_s=read("ttft_s"))
        self.prompt = read("prompt") or self.prompt
        self._feed.load(self.prompt, items, stats)
        with self.hold_sync():
            self._record(items, stats)
            self._run_prompt, self.finish_reason, self.status = self.prompt, read("finish_reason") or "", "done"

    # ---- messages ----

    def _send_snapshot(self) -> None:
        self._feed.snapshot()

    def _receive_generate(self, message: Mapping[str, Any]) -> None:
        prompt = message.get("prompt")
        if not isinstance(prompt, str):
            raise OptionError("Playground: the page sent no prompt; reload the page")
        if self._take_settings(message):
            self.start(prompt)

    def _take_settings(self, message: Mapping[str, Any]) -> bool:
        """Apply the settings of a message; False during a run (a second click in flight)."""
        settings = message.get("settings")
        if not isinstance(settings, dict):
            raise OptionError("Playground: the page sent no settings; reload the page")
        check_keywords(settings, list(_SETTING_NAMES), where="Playground")
        if self._background.alive:
            return False
        with self.hold_sync():
            for name, value in settings.items():
                setattr(self, name, value)
        return True

    def _receive_stop(self, _message: Mapping[str, Any]) -> None:
        self.stop()

    def _receive_look_at(self, message: Mapping[str, Any]) -> None:
        found = self._feed.at(message.get("run"), message.get("at"))
        if found is not None:
            self.send(Tops(type="tops", run=message["run"], at=message["at"], top=token_item(found).top or []))

    def _receive_look_into(self, message: Mapping[str, Any]) -> None:
        run, at = message.get("run"), message.get("at")
        found, completion = self._feed.at(run, at), getattr(self._stream, "completion", None)
        told = found is not None and completion is not None and not self.chat and hasattr(self.llm, "tokenizer")
        if told and not self._background.alive:
            count = len(token_item(found).top or ())
            self._survival.ask(self.llm, str(self._run_prompt), completion, self._run_settings, (message["run"], message["at"], count))

    # ---- events ----

    def on_token(self, callback: Callable[[TokenItem], Any], remove: bool = False) -> None:
        """Call `callback(token)` for each token, on the worker thread, at most a frame late. An error in it ends the run and shows."""
        self._listen("token", callback, remove)

    def on_done(self, callback: Callable[[Playground], Any], remove: bool = False) -> None:
        """Call `callback(playground)` when a run has ended, on the worker thread."""
        self._listen("done", callback, remove)

    # ---- without the page ----

    def to_frame(self) -> pd.DataFrame:
        """One row per token: text, id, prob, rank, top."""
        import pandas as pd

        return pd.DataFrame([item._asdict() for item in self.tokens], columns=list(TokenItem._fields))

    def _export_state(self) -> dict[str, Any]:
        stats = self._feed.stats
        live = {"_tokens": [list(item) for item in self.tokens], "n_tokens": stats["n"]}
        speed = {"tokens_per_second": stats["tps"], "ttft_s": stats["ttft_s"]}
        status = {"status": "stopped"} if self.status == "running" else {}
        return {**super()._export_state(), **live, **speed, **status}

    def _caption(self) -> str:
        stats = self._feed.stats
        count = f"{stats['n']} token{'' if stats['n'] == 1 else 's'}"
        if self.status == "stopped":
            words = f"stopped after {count}"
        elif self.status == "error":
            words = f"failed after {count}: {self.error}"
        else:
            words = f"{self.status}, {count}" if stats["n"] else self.status
        return words + (f", {stats['tps']:.0f} tok/s" if stats["tps"] and self.status != "running" else "")

    def _summary(self) -> str:
        text = "".join(item.text for item in self.tokens[:24])
        if self.turns:
            return f"Playground({self._caption()})\n{turns_text(self.turns)}"
        return f"Playground({self._caption()})" + (f": {(self._run_prompt[-40:] + text)[:100]!r}..." if text else "")

    def _static_body(self) -> str:
        tokens = static.token_html(self.tokens, self._run_prompt) or html.escape(self.prompt)
        tokens = turns_html(self.turns, tokens) if self.turns else tokens
        return f'<div style="white-space:pre-wrap;line-height:1.7">{tokens}</div>'


def items_from(tokens: Sequence[Any]) -> list[TokenItem]:
    """Whole rows of what the feed holds."""
    return [token if type(token) is TokenItem else token_item(token) for token in tokens]


def _start_values(defaults: SamplingDefaults, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first values of the controls: the model's defaults, except those that another given option excludes."""
    others = {name: value for name, value in given.items() if name not in DEFAULT_NAMES}  # temperature=0 leaves the other sliders alone
    return {**NEUTRAL_VALUES, **defaults.beside(others).values}


def _label(llm: Any) -> str:
    """A short name for the corner of the widget."""
    name, bpw = getattr(llm, "name", ""), None
    with suppress(Exception):  # read from the files' headers, which may be gone by now
        bpw = getattr(llm, "bpw", None)
    if not isinstance(name, str):
        return ""
    return f"{name} · {bpw:.1f} bpw" if isinstance(bpw, float) else name

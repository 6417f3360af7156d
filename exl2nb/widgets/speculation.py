"""Speculation: accepted and rejected draft tokens of an answer, acceptance rate and speedup."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import traitlets as t

from exl2nb.core.errors import OptionError
from exl2nb.llm.request_options import OPTION_DEFAULTS, RequestOptions
from exl2nb.widgets.base import ExlWidget
from exl2nb.widgets.protocol import SpecStats, SpecToken, SpeculationState

if TYPE_CHECKING:
    import pandas as pd

MOST_TEXT = 4000  # characters of the prompt that travel
MOST_TOKENS = 2000
TOKEN_SOURCES = ("target", "draft", "ngram", "forced", "rewound")
_SOURCE_TINTS = {
    "target": "transparent",
    "draft": "rgba(46,125,50,.28)",
    "ngram": "rgba(46,125,50,.28)",
    "forced": "rgba(23,105,184,.26)",
    "rewound": "rgba(226,60,70,.34)",
}


class Speculation(ExlWidget):
    """An answer with its draft tokens: the accepted ones marked, the rejected ones struck through.

    Each pass of the model verifies a run of draft tokens and then draws one token of its own: the longer the runs, the faster. Draft tokens
    come from a draft model or from the text itself (`speculation="ngram"`); they change the speed, never the text.

    Args:
        source: an `LLM`, which continues `prompt` twice, with and without speculation; or a completion made with speculation.
        prompt: text or ids, for an LLM.
        plain: the same answer without speculation (a completion), for the comparison; made by an LLM unless False.
        tokenizer: decodes the rejected draft tokens of a completion.
        options: of `generate`, for an LLM. Default speculation="auto": the draft model if there is one, else "ngram".

    Traits, also keywords (synced with the page both ways):
        title: default, the kind of drafting.

    Example:
        >>> import exl2nb as ex
        >>> with ex.demo(progress=None) as llm:
        ...     seen = Speculation(llm, "One, two, three. " * 8, max_tokens=24, temperature=0)
        >>> seen.stats["same"]
        True
    """

    _more_keywords = (RequestOptions.__annotations__, {**OPTION_DEFAULTS, "speculation": "auto"})
    _bundle, _state_type = "speculation", SpeculationState

    title = t.Unicode("").tag(sync=True, option=True)
    _prompt = t.Unicode("").tag(sync=True)
    _tokens = t.List().tag(sync=True)
    _stats = t.Dict().tag(sync=True)

    def __init__(self, source: Any, prompt: Any = None, *, plain: Any = None, tokenizer: Any = None, **options: Any) -> None:
        own = {name: options.pop(name) for name in list(options) if name in self._keywords()}
        if callable(getattr(source, "generate", None)):
            if prompt is None:
                raise OptionError("Speculation: there is no prompt; give the text that the model continues")
            tokenizer = source.tokenizer
            done, plain = _answers(source, prompt, plain, options)
        elif options:
            raise OptionError(f"Speculation: got {', '.join(options)} with a finished answer; they apply when an LLM generates one")
        else:
            done = source
        if not hasattr(done, "tokens") or not hasattr(done, "speculation"):
            raise OptionError(f"Speculation: got {type(done).__name__!r}; expected an LLM and a prompt, or a completion")
        if done.speculation is None:
            raise OptionError(
                "Speculation: no draft tokens were proposed for this answer; generate it with speculation='ngram' or a draft model"
            )
        super().__init__(**own)
        told = done.prompt or (prompt if isinstance(prompt, str) else "")
        with self.hold_sync():
            self._tokens = [list(token) for token in spec_tokens(done, tokenizer)]
            self._stats = dict(_stats(done, plain or None))
            self._prompt = told[-MOST_TEXT:]
            self.title = self.title or ("draft model" if self._stats["kind"] == "draft" else "n-gram lookup")

    @property
    def stats(self) -> SpecStats:
        """What speculation did, as plain data."""
        return SpecStats(**self._stats)  # type: ignore[typeddict-item]

    def to_frame(self) -> pd.DataFrame:
        """One line per token: text, id, source, prob, step, wrong (draft tokens rejected there)."""
        import pandas as pd

        return pd.DataFrame(self._tokens, columns=list(SpecToken._fields))

    # ---- without the page ----

    def _summary(self) -> str:
        return f"Speculation({words(self.stats)})"

    def _static_body(self) -> str:
        parts = [f'<span style="opacity:.7">{html.escape(self._prompt[-400:])}</span>'] if self._prompt else []
        parts += [_token_html(token) for token in self._tokens]
        key = "green: accepted draft tokens; struck through: rejected"
        body = f'<div style="white-space:pre-wrap;line-height:1.7">{"".join(parts)}</div>'
        return f'<b>{html.escape(self.title)}</b>{body}<div style="font-size:12px">{key}</div>'


def spec_tokens(done: Any, tokenizer: Any = None) -> list[SpecToken]:
    """The tokens of a completion with the pass of the model that decided each, and the draft tokens rejected there.

    A pass is a run of accepted draft tokens and the token after them.
    """
    wrong: dict[int, tuple[int, ...]] = {}
    right: set[int] = set()
    for verified in done.speculation.trail:
        place = verified.at + verified.accepted
        right.update(range(verified.at, place))
        if verified.accepted < len(verified.ids):
            wrong[place] = verified.ids[verified.accepted :]
    found: list[SpecToken] = []
    step = 0
    for place, token in enumerate(done.tokens[:MOST_TOKENS]):
        step += place > 0 and place - 1 not in right
        names = [_piece(tokenizer, i) for i in wrong.get(place, ())]
        source = token.source if token.source in TOKEN_SOURCES else "target"
        found.append(SpecToken(token.text, int(token.id), source, round(float(token.prob), 6), step, names))
    return found


def words(stats: SpecStats) -> str:
    """One line."""
    passes = stats["steps"] + stats["plain_steps"]
    rate = stats["accepted"] / stats["proposed"] if stats["proposed"] else 0.0
    per_pass = (passes + stats["accepted"]) / passes if passes else 1.0
    plain = stats["plain_tps"]
    gain = f"; {stats['tps']:.0f} tok/s, {plain:.0f} tok/s without speculation" if plain else ""
    return f"{stats['accepted']} of {stats['proposed']} draft tokens accepted ({rate:.0%}), {per_pass:.2f} tokens per pass{gain}"


def _answers(llm: Any, prompt: Any, plain: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """The answer with guesses and the one without."""
    kind = options.pop("speculation", "auto")
    if kind == "auto" and llm.engine.drafter is None:
        kind = "ngram"
    if plain is None:
        plain = llm.generate(prompt, speculation="off", **options)
        options.setdefault("seed", plain.seed)
    return llm.generate(prompt, speculation=kind, **options), plain


def _stats(done: Any, plain: Any) -> SpecStats:
    told = done.speculation
    return SpecStats(
        kind=told.kind,
        steps=told.steps,
        plain_steps=told.plain_steps,
        proposed=told.proposed,
        accepted=told.accepted,
        lengths=list(told.lengths),
        tokens=len(done.tokens),
        tps=round(done.tokens_per_second, 1),
        plain_tps=None if plain is None else round(plain.tokens_per_second, 1),
        same=None if plain is None else plain.text == done.text,
    )


def _piece(tokenizer: Any, token: int) -> str:
    return f"#{token}" if tokenizer is None else str(tokenizer.piece(token))


def _token_html(token: Sequence[Any]) -> str:
    text, _id, source, _prob, step, wrong = token
    lost = f'<del style="opacity:.7;color:#b3261e">{html.escape(wrong[0])}</del>' if wrong else ""
    title = f"{source}, pass {step + 1}"
    return f'{lost}<span title="{title}" style="background:{_SOURCE_TINTS[source]};border-radius:2px">{html.escape(text)}</span>'

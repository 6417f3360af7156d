"""Requests and completions: the arguments and results of generation as plain data, and its static HTML. Knows no threads."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from exl2nb.core.errors import OptionError, StructureError
from exl2nb.core.options import check_flag, check_integer, check_keywords, check_options, check_range, option, shown
from exl2nb.generator.speculation import Acceptance, Speculation
from exl2nb.sampling.defaults import DEFAULT_NAMES, NO_DEFAULTS, SamplingDefaults
from exl2nb.sampling.params import MAX_COUNT, SamplingParams
from exl2nb.tokenizer.reply import Reply, ReplyFormat

if TYPE_CHECKING:
    import numpy as np

    from exl2nb.constraint.structure import Structure
    from exl2nb.model.vision.prompt import PromptPictures

MOST_TOKENS = 2000  # that are tinted; the text of the others follows as it is
MOST_TITLES = 200  # tokens with a tooltip of alternatives: bounds the time to make a page


def completion_html(completion: Completion) -> str:
    """The prompt if known, the answer, one line of figures."""
    prompt = f'<span style="opacity:.6">{html.escape(completion.prompt)}</span>' if completion.prompt else ""
    shown, rest = completion.tokens[:MOST_TOKENS], completion.tokens[MOST_TOKENS:]
    tokens = "".join([_token_html(token, place < MOST_TITLES) for place, token in enumerate(shown)])
    tokens += html.escape("".join([token.text for token in rest]) if shown else completion.text)
    settings = f"; {words}" if (words := settings_text(completion)) else ""
    return (
        f'<div style="white-space:pre-wrap;line-height:1.6">{prompt}{tokens}</div>'
        f'<div style="opacity:.6;font-size:85%">{completion.finish_reason}; {html.escape(str(completion.timings))}; '
        f"seed {completion.seed}{html.escape(settings)}</div>"
    )


def settings_text(completion: Completion) -> str:
    """The sampling settings of an answer in words if defaults were among them; otherwise nothing."""
    added = completion.sampling_defaults
    if not added:
        return ""
    changed, values = completion.sampling.changed, added.values
    given = ", ".join(f"{name} {changed[name]:g}" for name in DEFAULT_NAMES if name in changed and name not in values)
    return f"{given} as given, {added}" if given else str(added)


def _token_html(token: Token, whole: bool) -> str:
    title = f"{token.prob:.1%}, rank {token.rank}"
    if token.top and whole:
        title += "".join(f"\n{other.prob:6.1%} {other.text!r}" for other in token.top)
    tint = round(0.45 * (1.0 - token.prob), 2)
    return f'<span title="{html.escape(title)}" style="background:rgba(214,120,40,{tint})">{html.escape(token.text)}</span>'


MAX_TOP = 100
MAX_BEAMS = 64
MAX_PRIORITY = 1000
DEFAULT_SAMPLING = SamplingParams()  # defaults, made and checked once
DEFAULT_SPECULATION = Speculation()
PLAIN_REPLY = ReplyFormat()


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraRow:
    """The adapters of a request. row: of `Model.adapters`, theirs while this lives. key: equal for equal numbers. label: to be shown."""

    row: int
    key: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and its settings.

    prompt_ids: at least one token. sampling: how tokens are chosen. max_tokens: at most this many new ones; fewer where the context ends.
    stop: texts and token ids that end the answer; they are not part of it (a least length is `sampling.min_tokens`). ignore_eos: go on
    after an end-of-text token. banned_strings: texts that never occur in the answer (upper and lower case alike): where one appears, the
    answer goes back to the token that began it and takes another there. token_healing: the last prompt token is drawn again among the
    tokens that begin with its text, so that a prompt may end in the middle of a word. top_logprobs: alternatives reported per token.
    return_logits: keep the raw logits of every token. priority: higher ones run first, and preempt lower ones where there is no
    room. timeout_s: seconds after which generation stops; None = never. structure: what the answer must look like; None =
    anything. stream: hand tokens over as they come; False only the completion at the end, which costs less.

    negative_ids, cfg_scale: classifier-free guidance: a second prompt runs in step with the first, and tokens are drawn from
    `negative + cfg_scale * (positive - negative)` of their log probabilities.

    beams, length_penalty, early_stopping, n: beam search (more than one beam); score = sum of log probabilities / length ** length_penalty.
    The `n` best are returned. early_stopping: True ends it when `beams` answers are complete, False when no better one is likely, "never"
    when none is possible.

    speculation: draft tokens that the model verifies several at a time. "auto" (from the draft model if there is one), "draft",
    "ngram", "off", or a `Speculation`. It changes the speed, never the text.

    reply: how the answer of a chat is read: reasoning, content, tool calls.

    lora: adapters that the prompt and the answer run with; None = the model alone. `llm.generate(..., lora="name")` makes it.

    pictures: of the prompt, encoded and placed; None = it has none. `llm.chat` makes it of messages with pictures.

    sampling_defaults: the values in `sampling` that the caller did not give, and their source. `llm.chat` makes it.

    Raises:
        OptionError: a value out of range, or two that exclude each other.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = DEFAULT_SAMPLING
    max_tokens: int = option(
        256,
        "most new tokens (default 256)",
        range=(1, MAX_COUNT),
        label="Max tokens",
        hint="length limit",
        slider=(1, 2048, 1),
        common=True,
        aliases=("max_completion_tokens", "max_new_tokens", "max_length", "n_predict", "num_predict"),
    )
    stop: tuple[str | int, ...] = ()
    ignore_eos: bool = False
    banned_strings: tuple[str, ...] = ()
    token_healing: bool = False
    top_logprobs: int = 0
    return_logits: bool = False
    priority: int = 0
    timeout_s: float | None = None
    structure: Structure | None = None
    stream: bool = True
    negative_ids: tuple[int, ...] = ()
    cfg_scale: float = 1.0
    beams: int = 1
    n: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    speculation: Speculation = DEFAULT_SPECULATION
    reply: ReplyFormat = PLAIN_REPLY
    lora: LoraRow | None = None
    pictures: PromptPictures | None = None
    sampling_defaults: SamplingDefaults = NO_DEFAULTS

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise OptionError("the prompt has no tokens; expected at least one: give some text, or ids that begin with BOS")
        for name in ("ignore_eos", "token_healing", "return_logits", "stream"):
            check_flag(name, getattr(self, name))
        check_options(self)
        check_integer("top_logprobs", self.top_logprobs, 0, MAX_TOP)
        check_integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.timeout_s is not None:
            check_range("timeout_s", self.timeout_s, 0.001, 1e9)
        check_integer("beams", self.beams, 1, MAX_BEAMS)
        check_integer("n", self.n, 1, MAX_BEAMS)
        if self.n > self.beams:
            hint = "" if self.beams > 1 else "; samples of one prompt: generate or stream with n="
            raise OptionError(f"n is {self.n} and beams {self.beams}; expected at most as many answers as beams{hint}")
        check_range("cfg_scale", self.cfg_scale, 0.0, 100.0)
        check_range("length_penalty", self.length_penalty, -10.0, 10.0)
        if not isinstance(self.speculation, Speculation):
            object.__setattr__(self, "speculation", Speculation.of(self.speculation))
        if not isinstance(self.reply, ReplyFormat):
            raise OptionError(f"reply is {shown(self.reply)}; expected a ReplyFormat; llm.chat makes one")
        if not isinstance(self.sampling_defaults, SamplingDefaults):
            raise OptionError(f"sampling_defaults is {shown(self.sampling_defaults)}; expected SamplingDefaults; llm.chat makes them")
        if self.lora is not None and not isinstance(self.lora, LoraRow):
            raise OptionError(f"lora is {shown(self.lora)}; expected adapters of a loaded model: give their names to llm.generate")
        if self.pictures is not None:
            from exl2nb.model.vision.prompt import PromptPictures  # of a model that sees: the others load without it

            if not isinstance(self.pictures, PromptPictures):
                raise OptionError(f"pictures is {shown(self.pictures)}; expected what llm.chat makes of messages with pictures")
            if self.token_healing or self.lora is not None:
                what = "token_healing" if self.token_healing else "lora"
                raise OptionError(f"a prompt with pictures and {what} exclude each other; leave {what} or the pictures out")
        if self.structure is not None and not callable(getattr(self.structure, "start", None)):
            raise OptionError(f"structure is {shown(self.structure)}; expected a Structure; schema=, regex=, choice= and grammar= make one")
        if not isinstance(self.negative_ids, (tuple, list)) or not all(_is_id(one) for one in self.negative_ids):
            raise OptionError(f"negative_ids is {shown(self.negative_ids)}; expected token ids (for text: negative_prompt)")
        if not all((isinstance(one, str) and one) or _is_id(one) for one in self.stop):
            raise OptionError(f"stop is {str(self.stop)[:80]}; expected texts or token ids, none of them empty")
        if not all(isinstance(text, str) and text for text in self.banned_strings):
            raise OptionError(f"banned_strings is {str(self.banned_strings)[:80]}; expected a text or several, none of them empty")
        if not isinstance(self.early_stopping, (bool, str)) or self.early_stopping not in (True, False, "never"):
            raise OptionError(f"early_stopping is {shown(self.early_stopping)}; expected True, False or 'never'")
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.sampling.min_tokens > self.max_tokens:
            raise OptionError(f"min_tokens is {self.sampling.min_tokens}; expected at most max_tokens, which is {self.max_tokens}")
        if self.beams > 1:
            plain = replace(self.sampling, seed=None, min_tokens=0) == SamplingParams(temperature=0)
            checks = (
                ("cfg_scale", self.guided),
                ("banned_strings", self.banned_strings),
                ("a structure", self.structure is not None),
                ("return_logits", self.return_logits),
                ("token_healing", self.token_healing),
                ("a sampler other than temperature=0", not plain),
            )
            if wrong := [name for name, on in checks if on]:
                why = {"return_logits": "its tokens come from several beams", "token_healing": "beams begin after the whole prompt"}
                why = why.get(wrong[0], "beam search draws nothing")
                raise OptionError(f"beams={self.beams} and {wrong[0]} exclude each other: {why}; leave it out, or beams=1")
        if self.structure is not None and self.token_healing:
            raise OptionError("token_healing and a structure exclude each other: the healed token is part of the prompt; leave one out")
        if self.cfg_scale != 1.0 and not self.negative_ids:
            raise OptionError(f"cfg_scale is {self.cfg_scale:g} and there is no negative_prompt; give both, or leave both out")

    @property
    def guided(self) -> bool:
        """True where two prompts run in step."""
        return bool(self.negative_ids) and self.cfg_scale != 1.0

    @property
    def reported_sampling(self) -> SamplingParams:
        """`sampling` without the caller's functions, which would keep a completion from being pickled."""
        return replace(self.sampling, post_sampling=()) if self.sampling.post_sampling else self.sampling

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts in `stop`."""
        return tuple(one for one in self.stop if isinstance(one, str))

    @property
    def stop_ids(self) -> frozenset[int]:
        """The token ids in `stop`."""
        return frozenset(one for one in self.stop if not isinstance(one, str))

    @classmethod
    def of(cls, prompt_ids: Sequence[int], *, where: str, stream: bool = True, **options: Any) -> Request:
        """Build from flat keywords: those of this class and those of SamplingParams side by side.

        Raises:
            OptionError: an unknown keyword (names the nearest known one), or a value out of range.
        """
        own = [f.name for f in fields(cls) if f.name not in ("prompt_ids", "sampling", "stream")]
        known = [*own, *(f.name for f in fields(SamplingParams))]
        check_keywords(options, known, where=where)
        for name, kinds in (("stop", (str, int)), ("banned_strings", (str,))):
            if name in options:
                options[name] = _as_tuple(options[name], kinds, f"{where}: {name}")
        mine = {name: options.pop(name) for name in own if name in options}
        if mine.get("beams", 1) != 1:
            options.setdefault("temperature", 0)
        return cls(prompt_ids=tuple(prompt_ids), sampling=SamplingParams(**options), stream=stream, **mine)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _as_tuple(value: Any, kinds: tuple[type, ...], name: str) -> tuple[Any, ...]:
    """One value or a collection of them, as a tuple."""
    if isinstance(value, kinds) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, (list, tuple, set, frozenset)):
        return tuple(value)
    words = " or ".join("a token id" if kind is int else "a text" for kind in kinds)
    raise OptionError(f"{name} is {str(value)[:80]!r}; expected {words}, or a list of them")


class TokenAlternative(NamedTuple):
    """One of the most probable tokens at a position."""

    id: int
    text: str
    logprob: float
    prob: float


class Token(NamedTuple):
    """One generated token.

    text: its part of the answer ("" while a character is incomplete; the token that completes it has the text). logprob, prob, rank: under
    the model's own distribution, before any filter. top: the best alternatives, if asked for. source: where it comes from: "target"
    (drawn), "draft" or "ngram" (an accepted draft token), "forced" (a constraint left no other), "rewound" (drawn in the place of
    one that began a banned text).
    """

    id: int
    text: str
    logprob: float
    prob: float
    rank: int
    top: Sequence[TokenAlternative] = ()
    source: str = "target"


class Rewind(NamedTuple):
    """An answer that went back: the banned text that appeared, the ids that were taken back, and their text."""

    banned: str
    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Chunk:
    """What became certain since the last chunk; text is the text of the tokens side by side."""

    text: str
    tokens: tuple[Token, ...]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Where the time of one request went.

    queue_s: waiting for pages. first_token_s: from the call to the first token (TTFT). prefill_s: running the prompt. decode_s: from the
    first to the last token. reused_tokens: of the prompt, found in the cache instead of computed. preemptions: how often it was preempted.
    """

    prompt_tokens: int
    new_tokens: int
    queue_s: float
    first_token_s: float
    prefill_s: float
    decode_s: float
    reused_tokens: int = 0
    preemptions: int = 0

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens computed per second; those found in the cache do not count."""
        return (self.prompt_tokens - self.reused_tokens) / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tok_s(self) -> float:
        """New tokens per second after the first."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s > 0 and self.new_tokens > 1 else 0.0

    def __str__(self) -> str:
        found = f" ({self.reused_tokens} found in the cache)" if self.reused_tokens else ""
        return (
            f"{self.prompt_tokens} prompt tokens{found} at {self.prefill_tok_s:.0f} tok/s, first token after {self.first_token_s:.3f} s, "
            f"{self.new_tokens} new at {self.decode_tok_s:.0f} tok/s"
        )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The answer to one request.

    finish_reason: "eos" (the model ended it), "stop" (a stop text or token, or the structure is complete), "length" (max_tokens), "context"
    (no room left), "cancelled", "timeout". stopped_by: the stop text, stop token or end-of-text token that ended it. withheld: tokens that
    a stop text took away. seed: reproduces the answer. rewinds: where banned texts made it go back. speculation: what it did, None
    where it was off. logits: raw, f32 `(tokens, V)`, if asked for. score: of a beam; beams: the best beams, this one first. structure:
    the required structure, and whether it is complete. reply: of a chat: content, reasoning and tool calls. sampling: the sampling
    settings that were used. sampling_defaults: those of its values that came from the defaults of a chat, and their source.
    """

    text: str
    tokens: tuple[Token, ...]
    finish_reason: str
    timings: Timings
    seed: int
    prompt: str | None = None
    stopped_by: str | int | None = None
    withheld: tuple[Token, ...] = ()
    rewinds: tuple[Rewind, ...] = ()
    speculation: Acceptance | None = None
    logits: np.ndarray | None = field(default=None, compare=False)
    score: float | None = None
    beams: tuple[Completion, ...] = field(default=(), compare=False)
    structure: Structure | None = field(default=None, repr=False, compare=False)
    complete: bool = field(default=True, repr=False, compare=False)
    reply_format: ReplyFormat = field(default=PLAIN_REPLY, repr=False, compare=False)
    sampling: SamplingParams = field(default=DEFAULT_SAMPLING, compare=False)
    sampling_defaults: SamplingDefaults = field(default=NO_DEFAULTS, compare=False)

    @cached_property
    def reply(self) -> Reply:
        """The answer of a chat taken apart: content, reasoning, tool calls; `reply.message` goes back into the conversation."""
        return Reply(self.text) if self.reply_format.plain else self.reply_format.read(self.tokens)

    @cached_property
    def parsed(self) -> Any:
        """The answer as the value that was asked for: an object of the type given as schema, plain data for a JSON schema, else its text.

        Raises:
            StructureError: no structure was asked for, generation ended before it was complete, or the type refuses the value.
        """
        if self.structure is None:
            raise StructureError("the answer has no structure to read; give schema=, regex=, choice= or grammar= when you generate")
        text = self.text if self.reply_format.plain else self.reply.content
        return self.structure.parse(text, complete=self.complete)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log probability of each token, before any filter."""
        return tuple(token.logprob for token in self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second after the first."""
        return self.timings.decode_tok_s

    @property
    def ttft_s(self) -> float:
        """Seconds from the call to the first token."""
        return self.timings.first_token_s

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        more = f", {self.speculation}" if self.speculation is not None else "" if self.score is None else f", score {self.score:.4f}"
        more += f", {words}" if (words := settings_text(self)) else ""
        return f"Completion({shown!r}, {len(self.tokens)} tokens, {self.finish_reason}, {self.timings.decode_tok_s:.0f} tok/s{more})"

    def _repr_html_(self) -> str:
        return completion_html(self)

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row per token; a column `top` of (text, probability) pairs where alternatives were asked for."""
        import pandas

        columns = [*Token._fields[:5], "source"]
        frame = pandas.DataFrame([(*token[:5], token.source) for token in self.tokens], columns=columns)
        if any(token.top for token in self.tokens):
            frame["top"] = [tuple((other.text, round(other.prob, 4)) for other in token.top) for token in self.tokens]
        return frame

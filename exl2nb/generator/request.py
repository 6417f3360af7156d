"""What a caller asks for and what comes back, as plain data. Knows no threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from exl2nb.core.errors import OptionError, StructureError
from exl2nb.core.options import check_keywords, check_range
from exl2nb.sampling.params import SamplingParams, check_integer

if TYPE_CHECKING:
    from exl2nb.constraint.structure import Structure

MAX_TOP = 100
MAX_PRIORITY = 1000
FINISH_REASONS = ("eos", "stop", "length", "context", "cancelled", "timeout")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and its settings.

    prompt_ids: at least one token. sampling: how tokens are chosen. max_tokens: at most this many new ones; fewer where the context ends.
    stop: texts that end the answer; they are not part of it. ignore_eos: go on after an end-of-text token. top_logprobs: alternatives
    reported per token. priority: higher ones run first, and take the place of lower ones where there is none. timeout_s: seconds after
    which the answer ends as it stands; None = never. structure: what the answer must look like; None = anything. stream: hand tokens over
    as they come; False only the completion at the end, which costs less.

    Raises:
        OptionError: a value out of range.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int = 0
    priority: int = 0
    timeout_s: float | None = None
    structure: Structure | None = None
    stream: bool = True

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise OptionError("the prompt has no tokens; expected at least one: give some text, or ids that begin with BOS")
        check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_integer("top_logprobs", self.top_logprobs, 0, MAX_TOP)
        check_integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.timeout_s is not None:
            check_range("timeout_s", self.timeout_s, 0.001, 1e9)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise OptionError(f"stop is {str(self.stop)[:80]}; expected a text or several, none of them empty")

    @classmethod
    def of(cls, prompt_ids: Sequence[int], *, where: str, stream: bool = True, **options: Any) -> Request:
        """Build from flat keywords: those of this class and those of SamplingParams side by side.

        Raises:
            OptionError: an unknown keyword (names the nearest known one), or a value out of range.
        """
        own = [f.name for f in fields(cls) if f.name not in ("prompt_ids", "sampling", "stream")]
        known = [*own, *(f.name for f in fields(SamplingParams))]
        check_keywords(options, known, where=where)
        if isinstance(stop := options.get("stop", ()), str):
            options["stop"] = (stop,)
        elif isinstance(stop, (list, tuple, set, frozenset)):
            options["stop"] = tuple(stop)
        else:
            raise OptionError(f"{where}: stop is {stop!r}; expected a text or a list of texts")
        mine = {name: options.pop(name) for name in own if name in options}
        return cls(prompt_ids=tuple(prompt_ids), sampling=SamplingParams(**options), stream=stream, **mine)


class Alternative(NamedTuple):
    """One of the most probable tokens at a position."""

    id: int
    text: str
    logprob: float
    prob: float


class Token(NamedTuple):
    """One generated token.

    text: its part of the answer ("" while a character is incomplete; the token that completes it has the text). logprob, prob, rank: under
    the model's own distribution, before any filter. top: the best alternatives, if asked for.
    """

    id: int
    text: str
    logprob: float
    prob: float
    rank: int
    top: tuple[Alternative, ...] = ()


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
    first to the last token. reused_tokens: of the prompt, found in the cache instead of computed. preemptions: how often it gave its pages
    to a request of higher rank and went on later.
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
        return (
            f"{self.prompt_tokens} prompt tokens at {self.prefill_tok_s:.0f} tok/s, first token after {self.first_token_s:.3f} s, "
            f"{self.new_tokens} new at {self.decode_tok_s:.0f} tok/s"
        )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The answer to one request.

    finish_reason: "eos" (the model ended it), "stop" (a stop text, or the structure is complete), "length" (max_tokens), "context" (no room
    left), "cancelled", "timeout". seed: reproduces the answer. structure: what it had to look like, and whether it came to an end.
    """

    text: str
    tokens: tuple[Token, ...]
    finish_reason: str
    timings: Timings
    seed: int
    prompt: str | None = None
    structure: Structure | None = field(default=None, repr=False, compare=False)
    complete: bool = field(default=True, repr=False, compare=False)

    @cached_property
    def parsed(self) -> Any:
        """The answer as the value that was asked for: an object of the type given as schema, plain data for a JSON schema, else its text.

        Raises:
            StructureError: no structure was asked for, generation ended before it was complete, or the type refuses the value.
        """
        if self.structure is None:
            raise StructureError("the answer has no structure to read; give schema=, regex=, choice= or grammar= when you generate")
        return self.structure.parse(self.text, complete=self.complete)

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
        return f"Completion({shown!r}, {len(self.tokens)} tokens, {self.finish_reason}, {self.timings.decode_tok_s:.0f} tok/s)"

    def _repr_html_(self) -> str:
        from exl2nb.generator.render import completion_html

        return completion_html(self)

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row per token."""
        import pandas

        return pandas.DataFrame([token[:5] for token in self.tokens], columns=list(Token._fields[:5]))

"""From sampled ids to the text and tokens that may be shown: whole characters only, nothing of a stop text, nothing banned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from exl2nb.generator.request import Rewind, Token, TokenAlternative
from exl2nb.sampling.draw import Sampled
from exl2nb.tokenizer.detokenize import Detokenizer
from exl2nb.tokenizer.tokenizer import Tokenizer


class TextMatch(NamedTuple):
    """Where one of the texts stands, in characters from the very beginning, and which one it is."""

    start: int
    end: int
    text: str


class StopMatcher:
    """Finds texts while text still comes, across token boundaries; what may still become one of them is held back. Knows no tokens.

    Args:
        stops: texts that end the answer; may be none.
        ignore_case: take upper and lower case for the same.

    Example:
        >>> matcher = StopMatcher(["END"])
        >>> matcher.feed("the E"), matcher.feed("N"), matcher.feed("D of it")
        ((4, False), (4, False), (4, True))
        >>> matcher.match.text
        'END'
    """

    def __init__(self, stops: Sequence[str], *, ignore_case: bool = False) -> None:
        self._given = tuple(stops)
        self._fold = _lower_same_length if ignore_case else str
        self._stops = tuple(map(self._fold, self._given))
        self._longest = max(map(len, self._stops), default=0)
        self._text, self._start = "", 0  # the last characters, which may be part of a stop text, and where they begin
        self._passed = 0  # matches that end here or earlier do not count
        self.match: TextMatch | None = None
        self.beginnings = frozenset(stop[0] for stop in self._stops)  # folded; a piece with none of these may be passed over, see `skip_to`

    def skip_to(self, place: int) -> None:
        """So many characters have come, the last ones without being fed: nothing was held, and none of them was in `beginnings`."""
        self._text, self._start = "", place

    def feed(self, text: str, *, armed: bool = True) -> tuple[int, bool]:
        """Take more text.

        Args:
            text: what comes next.
            armed: False: what is complete with this text does not count, now or later (an answer that is too short to end).

        Returns:
            How many characters of all the text so far may be shown, and whether a stop text was found: then these are all of the answer,
            up to the stop text that is complete first, which does not depend on how the text was cut into pieces.
        """
        if not self._stops:
            self._start += len(text)
            return self._start, False
        self._text += self._fold(text)
        if not armed:
            self._passed = self._start + len(self._text)
        found = [match for stop, given in zip(self._stops, self._given) if (match := self._find(stop, given)) is not None]
        if found:
            self.match = min(found, key=lambda match: (match.end, match.start))
            return self.match.start, True
        held = next((n for n in range(min(self._longest - 1, len(self._text)), 0, -1) if self._ends_with_beginning(n)), 0)
        cut = len(self._text) - held
        self._text, self._start = self._text[cut:], self._start + cut
        return self._start, False

    def save(self) -> tuple[str, int, int]:
        """What `load` needs to come back here."""
        return self._text, self._start, self._passed

    def load(self, saved: tuple[str, int, int]) -> None:
        """Go back to a saved place."""
        self._text, self._start, self._passed = saved
        self.match = None

    def _find(self, stop: str, given: str) -> TextMatch | None:
        at = self._text.find(stop, max(0, self._passed - self._start - len(stop) + 1))
        return None if at < 0 else TextMatch(self._start + at, self._start + at + len(stop), given)

    def _ends_with_beginning(self, n: int) -> bool:
        tail = self._text[-n:]
        return any(len(stop) > n and stop.startswith(tail) for stop in self._stops)


def _lower_same_length(text: str) -> str:
    """Lower case without a change of length, so that places stay places."""
    return text.lower() if text.isascii() else "".join([low if len(low := c.lower()) == 1 else c for c in text])


def visible_specials(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[int, str]:
    """The texts of all special tokens by id, if one of `texts` contains the text of one; otherwise empty."""
    special = tokenizer.special_texts
    return special if any(one and one in text for text in texts for one in special.values()) else {}


# ---- The alternatives of a token, made when they are read: at 2,000 tokens a second most of them never are.


class Alternatives(Sequence[TokenAlternative]):
    """Reads, compares, prints and copies as the tuple it stands for.

    Args:
        pairs: id and log probability, the most probable first.
        piece: id -> text.
    """

    __slots__ = ("_made", "_pairs", "_piece")

    def __init__(self, pairs: Sequence[tuple[int, float]], piece: Callable[[int], str]) -> None:
        self._pairs, self._piece, self._made = pairs, piece, None

    def _all(self) -> tuple[TokenAlternative, ...]:
        if self._made is None:
            self._made: tuple[TokenAlternative, ...] | None = tuple(
                [TokenAlternative(i, self._piece(i), logprob, math.exp(logprob)) for i, logprob in self._pairs]
            )
        return self._made

    def __len__(self) -> int:
        return len(self._pairs)

    def __iter__(self) -> Iterator[TokenAlternative]:
        return iter(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __eq__(self, other: object) -> bool:
        return self._all() == (other._all() if isinstance(other, Alternatives) else other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def __reduce__(self) -> Any:
        return tuple, (self._all(),)


# ---- The answer.

_new = tuple.__new__  # half the time of `Token(...)`, once per token and sequence


class _Checkpoint(NamedTuple):
    """Everything about the output before a token was pushed."""

    detokenizer: Any
    stop: Any
    banned: Any
    skip: int


class Output:
    """The answer of one request while it grows.

    `tokens` are those that may be shown; their texts side by side are the text of the answer, always. A token is held while its text may
    still change, or may turn out to be part of a stop text or of a banned one.

    Special tokens have no text in the answer. Where a stop text or a banned text contains the text of one ("<|im_end|>"), the matchers see
    that text too, so places are counted in the text that the matchers see.

    Args:
        prompt_ids: what the text continues.
        stop: texts that end it.
        banned: texts that must not appear in it; see `rewind`.
        skip: characters at the beginning that are not shown, because the prompt has them (token healing).
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str] = (), banned: Sequence[str] = (), *, skip: int = 0
    ) -> None:
        self.tokens: list[Token] = []
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._stop = StopMatcher(stop)
        self._banned = StopMatcher(banned, ignore_case=True) if banned else None
        self._seen_specials = visible_specials(tokenizer, (*stop, *banned))
        self._held: list[Token] = []
        self._widths: list[int] = []  # of the held tokens: characters that the matchers see of each
        self._checkpoints: list[_Checkpoint] = []  # one per held token, where texts are banned
        self._shown = 0  # characters that the matchers saw of `tokens`
        self._skip = skip
        self._plain, self._beginnings = self._detokenizer.plain, self._stop.beginnings
        self._fast_path = self._banned is None and not skip
        self.bans = self._banned is not None  # whether `must_rewind` can ever be True
        self.withheld: tuple[Token, ...] = ()  # tokens that a stop text took away

    @property
    def text(self) -> str:
        """The text that may be shown."""
        return "".join([token.text for token in self.tokens])

    @property
    def stopped_by(self) -> str | None:
        """The stop text that was found."""
        return self._stop.match.text if self._stop.match is not None else None

    @property
    def held(self) -> int:
        """Tokens that are held."""
        return len(self._held)

    def push(self, sampled: Sampled, *, source: str = "target", armed: bool = True) -> bool:
        """Take one id. True: a stop text is complete, and `tokens` ends before it.

        Args:
            sampled: the id, its log probability, rank and alternatives.
            source: who proposed it.
            armed: False: stop texts do not count yet.
        """
        text = None
        if self._fast_path and not self._held:
            text = self._plain(sampled[0])
            if text is not None and (not self._beginnings or self._beginnings.isdisjoint(text)):
                token_id, logprob, rank, top = sampled
                if top:
                    top = Alternatives(top, self._tokenizer.piece)
                self.tokens.append(_new(Token, (token_id, text, logprob, math.exp(logprob), rank, top, source)))
                self._shown += len(text)
                return False
            self._stop.skip_to(self._shown)
        if self._banned is not None:
            self._checkpoints.append(_Checkpoint(self._detokenizer.save(), self._stop.save(), self._banned.save(), self._skip))
        if text is None:
            text = self._cut(self._detokenizer.feed(sampled.id))
        seen = text + self._seen_specials.get(sampled.id, "")
        self._held.append(self._token(sampled, text, source))
        self._widths.append(len(seen))
        visible, found = self._stop.feed(seen, armed=armed)
        if self._banned is not None:
            safe, banned = self._banned.feed(seen)
            if banned and found and self._found(self._banned).end > visible:
                self._banned.match = None  # it ends inside or after the stop text: what shows of it is not banned
            elif banned:
                return False
            visible = visible if found else min(visible, safe)
        if found or not self._detokenizer.pending:
            self._release(visible, cut=found)
        return found

    def finish(self) -> bool:
        """The last id was pushed: show what is held. True: a stop text came to light in it."""
        rest = self._cut(self._detokenizer.flush())
        if rest and self._held:
            self._held[-1] = self._held[-1]._replace(text=self._held[-1].text + rest)
            self._widths[-1] += len(rest)
        if not self._held:
            self._stop.skip_to(self._shown)
        visible, found = self._stop.feed(rest)
        self._release(visible if found else 1 << 62, cut=found)
        return found

    @property
    def must_rewind(self) -> bool:
        """True after a push that completed a banned text."""
        return self._banned is not None and self._banned.match is not None

    def rewind(self) -> Rewind:
        """Take back the tokens of the banned text that was found, from the one that began it on.

        Returns:
            What was taken back. The output is then as it was before the first of these tokens.
        """
        assert self._banned is not None
        match = self._found(self._banned)
        at, end = 0, self._shown + self._widths[0]
        while end <= match.start:
            at += 1
            end += self._widths[at]
        while at > 0 and not self._held[at - 1].text and self._held[at - 1].id not in self._tokenizer.skipped_ids:
            at -= 1  # a token without text holds the first bytes of the character
        gone, place = self._held[at:], self._checkpoints[at]
        del self._held[at:], self._widths[at:], self._checkpoints[at:]
        self._detokenizer.load(place.detokenizer)
        self._stop.load(place.stop)
        self._banned.load(place.banned)
        self._skip = place.skip
        return Rewind(match.text, tuple(token.id for token in gone), "".join([token.text for token in gone]))

    @staticmethod
    def _found(matcher: StopMatcher) -> TextMatch:
        assert matcher.match is not None, "a text was found"
        return matcher.match

    def _cut(self, text: str) -> str:
        if not self._skip:
            return text
        cut = min(self._skip, len(text))
        self._skip -= cut
        return text[cut:]

    def _release(self, visible: int, *, cut: bool) -> None:
        for i, token in enumerate(self._held):
            end = self._shown + self._widths[i]
            if end > visible:
                if cut:
                    self.withheld = tuple(self._held[i:])
                    if visible > self._shown and token.text:
                        self.tokens.append(token._replace(text=token.text[: visible - self._shown]))
                        self._shown = visible
                kept = len(self._held) if cut else i
                self._held, self._widths, self._checkpoints = self._held[kept:], self._widths[kept:], self._checkpoints[kept:]
                return
            self.tokens.append(token)
            self._shown = end
        self._held, self._widths, self._checkpoints = [], [], []

    def _token(self, sampled: Sampled, text: str, source: str) -> Token:
        token_id, logprob, rank, top = sampled
        listed = Alternatives(top, self._tokenizer.piece) if top else ()
        return Token(token_id, text, logprob, math.exp(logprob), rank, listed, source)

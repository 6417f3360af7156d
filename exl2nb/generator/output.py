"""Sampled ids to the tokens and text that may be shown: whole characters only, and nothing of a stop text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from exl2nb.generator.request import Alternative, Token
from exl2nb.generator.stop import StopMatcher
from exl2nb.sampling.report import Sampled
from exl2nb.tokenizer.detokenize import Detokenizer
from exl2nb.tokenizer.tokenizer import Tokenizer


class Output:
    """The answer of one request while it grows.

    `tokens` are those that may be shown; their texts side by side are the text of the answer, always. A token is held while its text may
    still change or may turn out to be part of a stop text.

    Args:
        tokenizer: of the model.
        prompt_ids: what the text continues.
        stop: texts that end it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.tokens: list[Token] = []
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._matcher = StopMatcher(stop)
        self._held: list[Token] = []
        self._shown = 0  # characters in `tokens`

    @property
    def text(self) -> str:
        """The text that may be shown."""
        return "".join([token.text for token in self.tokens])

    def push(self, sampled: Sampled) -> bool:
        """Take one id. True: a stop text is complete, and `tokens` ends before it."""
        text = self._detokenizer.feed(sampled.id)
        self._held.append(self._token(sampled, text))
        visible, found = self._matcher.feed(text)
        if found or not self._detokenizer.pending:
            self._release(visible, cut=found)
        return found

    def finish(self) -> bool:
        """The last id was pushed: show what is held. True: a stop text came to light in it."""
        rest = self._detokenizer.flush()
        if rest and self._held:
            self._held[-1] = self._held[-1]._replace(text=self._held[-1].text + rest)
        visible, found = self._matcher.feed(rest)
        self._release(visible if found else 1 << 62, cut=found)
        return found

    def _release(self, visible: int, *, cut: bool) -> None:
        for i, token in enumerate(self._held):
            end = self._shown + len(token.text)
            if end > visible:
                if cut and visible > self._shown:
                    self.tokens.append(token._replace(text=token.text[: visible - self._shown]))
                    self._shown = visible
                self._held = [] if cut else self._held[i:]
                return
            self.tokens.append(token)
            self._shown = end
        self._held = []

    def _token(self, sampled: Sampled, text: str) -> Token:
        piece = self._tokenizer.piece
        top = tuple([Alternative(i, piece(i), logprob, math.exp(logprob)) for i, logprob in sampled.top])
        return Token(sampled.id, text, sampled.logprob, math.exp(sampled.logprob), sampled.rank, top)

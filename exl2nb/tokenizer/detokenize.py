"""Ids to text while they arrive: never half a character, and in the end exactly `Tokenizer.decode` of them all.

Ours and not `DecodeStream` of the tokenizers library (0.23): that takes 1.9 us a token, this 0.8. Of 1000 random sequences of 12 ids its
text equals `decode` for 644 (byte-level) and 60 (SentencePiece), ours for all: it has no flush for an incomplete end, and with byte
tokens it raises "Invalid prefix" (305) or gives other text (314). It takes no prompt as context (benchmarks/libraries.py, 2026-11).
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from exl2nb.tokenizer.backend import reraise
from exl2nb.tokenizer.tokenizer import Tokenizer

CONTEXT_TOKENS = 6  # prompt tokens that a decoder sees: enough to know whether a space at the start of a token shows


class Detokenizer:
    """Turns ids into text, one at a time.

    Most tokens have a text of their own (`Tokenizer.plain_texts`), which is returned at once while no text is held. The others depend on
    the tokenizer's decoder: byte-level vocabularies map every token to bytes, which are decoded as UTF-8; all others decode a short
    window of tokens again and return what was added. Text that may still change is held: an incomplete character, and for
    vocabularies with byte tokens a run of them, since one wrong byte at its end changes how the whole run is read.

    Args:
        tokenizer: of the model.
        context: ids before the first one fed (the prompt). Matters only for vocabularies that mark spaces at the start of words: the text
            then continues the prompt. Without it the first space is left out, as `decode` does.
        skip_special: leave special tokens out of the text.

    Example:
        >>> import exl2nb.tokenizer.tokenizer as t; from pathlib import Path; import exl2nb
        >>> tok = t.Tokenizer.load(Path(exl2nb.__file__).parent / "demo_model")
        >>> stream, ids = Detokenizer(tok), tok.encode("naïve café", add_special=False)
        >>> "".join(map(stream.feed, ids)) + stream.flush()
        'naïve café'
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special: bool = True) -> None:
        self._skipped = tokenizer.skipped_ids if skip_special else frozenset()
        table = tokenizer.byte_table
        kept = [i for i in context[-4 * CONTEXT_TOKENS :] if i not in self._skipped][-CONTEXT_TOKENS:]
        self._decoder: _Bytes | _Window = _Bytes(table) if table is not None else _Window(tokenizer, kept)
        self._plain = self._decoder.plain(tokenizer.plain_texts)

    @property
    def pending(self) -> bool:
        """True while text is held."""
        return self._decoder.pending

    def feed(self, token_id: int) -> str:
        """The text that became certain with this token; often empty."""
        if token_id in self._skipped:
            return ""
        if not self._decoder.pending and (text := self._plain(token_id)) is not None:
            return text
        return self._decoder.feed(token_id)

    @property
    def plain(self) -> Callable[[int], str | None]:
        """Fast path of `feed`, only while nothing is held: the text of a token that has its own; None, without effect, for others."""
        return self._plain

    def flush(self) -> str:
        """The text still held, incomplete characters as U+FFFD. The last call."""
        return self._decoder.flush()

    def save(self) -> Any:
        """The state that `load` restores; small."""
        return self._decoder.save()

    def load(self, saved: Any) -> None:
        """Restore a saved state, as if the tokens fed since had never been."""
        self._decoder.load(saved)


class _Bytes:
    """Byte-level vocabularies: bytes per token, decoded as UTF-8."""

    def __init__(self, table: dict[int, bytes]) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def plain(self, texts: Mapping[int, str | None]) -> Callable[[int], str | None]:
        return texts.__getitem__  # whole characters leave no trace

    def feed(self, token_id: int) -> str:
        return self._utf8.decode(self._table.get(token_id, b""))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def save(self) -> Any:
        return self._utf8.getstate()

    def load(self, saved: Any) -> None:
        self._utf8.setstate(saved)


class _Window:
    """Any other vocabulary: decode [shown before | new], give what the new ones add."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._decode = tokenizer.backend.decode
        self._byte_ids = tokenizer.byte_ids
        self._shown, self._new = context, list[int]()
        self._passed: deque[int] = deque(maxlen=CONTEXT_TOKENS)  # given as plain texts since `_shown`
        self._prefix = self._text(context)

    @property
    def pending(self) -> bool:
        return bool(self._new)

    def plain(self, texts: Mapping[int, str | None]) -> Callable[[int], str | None]:
        passed = self._passed.append

        def text_of(token_id: int) -> str | None:
            text = texts[token_id] if self._shown else None  # where a text begins a space may be left out
            if text is not None:
                passed(token_id)
            return text

        return text_of

    def feed(self, token_id: int) -> str:
        if self._passed:
            self._shown = list(self._passed)
            self._passed.clear()
            self._prefix = self._text(self._shown)
        self._new.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self._text(self._shown + self._new)
        if text.endswith("�"):
            return ""
        return self._accept(text)

    def flush(self) -> str:
        return self._accept(self._text(self._shown + self._new)) if self._new else ""

    def save(self) -> Any:
        return list(self._shown), list(self._new), self._prefix, list(self._passed)

    def load(self, saved: Any) -> None:
        shown, new, self._prefix, passed = saved
        self._shown, self._new = list(shown), list(new)
        self._passed.clear()
        self._passed.extend(passed)

    def _accept(self, text: str) -> str:
        added = text[len(self._prefix) :]
        if self._new[-1] not in self._byte_ids:
            self._shown, self._new = self._new[-CONTEXT_TOKENS:], []
            self._prefix = self._text(self._shown)
        return added

    def _text(self, ids: list[int]) -> str:
        if not ids:
            return ""
        try:
            return self._decode(ids, skip_special_tokens=False)
        except BaseException as error:
            reraise(error)


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token in its context; joined they are the decoded text. Special tokens have none."""
    stream = Detokenizer(tokenizer)
    texts = [stream.feed(i) for i in ids]
    if texts and (rest := stream.flush()):
        texts[-1] += rest
    return texts

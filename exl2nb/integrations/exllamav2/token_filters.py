"""exllamav2's filters: objects that say after each token which may follow; here a structure of the request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from exl2nb.core.errors import OptionError, StructureError
from exl2nb.integrations.exllamav2.absent import Documented, table
from exl2nb.integrations.exllamav2.loading import ExLlamaV2, ExLlamaV2Tokenizer
from exl2nb.sampling.constraint import Allowed


class ExLlamaV2Filter(Documented):
    """Base of filters: override `begin`, `feed` and `next`.

    Args:
        model, tokenizer: as exllamav2 passes them.
    """

    absent: ClassVar = table(masks="prepare_logit_mask mask_logits background_prepare_logit_mask")
    allow_return_type_list = True

    def __init__(self, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.sequence_str, self.background_result = "", None

    def clone(self, c: Any = None) -> ExLlamaV2Filter:
        """An independent copy."""
        made = type(self).__new__(type(self)) if c is None else c
        made.__dict__.update(self.__dict__)
        return made

    def begin(self, prefix_str: str) -> None:
        """Start; prefix_str: what token healing took off the prompt."""

    def feed(self, token: Any) -> None:
        """Take in a token: an int64 tensor `(1, 1)`."""

    def next(self) -> tuple[Iterable[int] | None, Iterable[int]]:
        """Ids that may follow, None = all; and those of them that end the text. Here: everything, and nothing ends it."""
        return None, ()

    def use_background_worker(self) -> bool:
        """Ignored: the engine calls `next` when it needs the mask."""
        return False

    def can_mask_logits(self) -> bool:
        """Ignored: the engine calls `next`."""
        return False

    def background_next(self, pool: Any) -> None:
        """Nothing: see `use_background_worker`."""

    def background_drop(self) -> None:
        """Nothing: see `use_background_worker`."""

    def get_next(self, mask: bool = False) -> tuple[Iterable[int] | None, Iterable[int]]:
        """`next`."""
        return self.next()


class ExLlamaV2PrefixFilter(ExLlamaV2Filter):
    """The answer begins with one of these texts; what follows is free.

    Args:
        prefix_strings: a text or several.
    """

    free = True

    def __init__(self, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, prefix_strings: str | Sequence[str]) -> None:
        super().__init__(model, tokenizer)
        self.texts = [prefix_strings] if isinstance(prefix_strings, str) else list(prefix_strings)
        self.text = ""

    def begin(self, prefix_str: str = "") -> None:
        """Start."""
        self.text = ""

    def feed(self, token: Any) -> None:
        """Take in a token."""
        self.text += self.tokenizer.get_id_to_piece_list()[int(token)]

    def next(self) -> tuple[set[int] | None, set[int]]:
        """Tokens along one of the texts; those that complete one end a selection."""
        if self.free and any(self.text.startswith(text) for text in self.texts):
            return None, set()
        rests = [text[len(self.text) :] for text in self.texts if self._same(text[: len(self.text)], self.text)]
        allowed, ends = set(), set()
        for i, piece in enumerate(self.tokenizer.get_id_to_piece_list()):
            for rest in rests if piece else ():
                if self._same(rest[: len(piece)], piece) or (self.free and self._same(piece[: len(rest)], rest)):
                    allowed.add(i)
                    if not self.free and len(piece) == len(rest):
                        ends.add(i)
        return allowed, ends

    def _same(self, one: str, other: str) -> bool:
        return one == other


class ExLlamaV2SelectFilter(ExLlamaV2PrefixFilter):
    """The answer is one of these texts.

    Args:
        options: the texts. case_insensitive: upper and lower case count as equal.
    """

    free = False

    def __init__(self, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, options: Sequence[str], case_insensitive: bool = True) -> None:
        super().__init__(model, tokenizer, options)
        self.case_insensitive = case_insensitive

    def _same(self, one: str, other: str) -> bool:
        return one.lower() == other.lower() if self.case_insensitive else one == other


class FilterStructure:
    """The filters of one job as a structure of a request.

    Args:
        filters: all of them must allow a token. vocab_size: of the model. end_ids: tokens that end a text.
    """

    kind = "filter"

    def __init__(self, filters: Sequence[Any], vocab_size: int, end_ids: Iterable[int]) -> None:
        if wrong := [one for one in filters if not all(callable(getattr(one, name, None)) for name in ("begin", "feed", "next"))]:
            raise OptionError(f"filters holds {str(wrong[0])[:60]!r}; expected objects with begin, feed and next")
        self.filters, self.vocab_size, self.end_ids = filters, vocab_size, frozenset(end_ids)

    def start(self) -> FilterConstraint:
        """At the beginning of an answer."""
        return FilterConstraint(self, [])

    def parse(self, text: str, *, complete: bool = True) -> str:
        """The text."""
        return text


class FilterConstraint:
    """The place of one answer: filters can only be fed, so going back starts them again."""

    def __init__(self, structure: FilterStructure, ids: list[int]) -> None:
        self._structure = structure
        self._ids: list[int] = []
        self._ended = False
        self._restart(ids)

    def _restart(self, ids: Sequence[int]) -> None:
        self._filters = [one.clone() if callable(getattr(one, "clone", None)) else one for one in self._structure.filters]
        self._ids, self._ended, self._next = [], False, None
        for one in self._filters:
            one.begin("")
        for token in ids:
            self.accept(token)

    def _sets(self) -> tuple[set[int] | None, set[int]]:
        if self._next is None:
            allowed: set[int] | None = None
            ends: set[int] = set()
            for one in self._filters:
                passed, stops = one.next()
                if passed is not None:
                    allowed = set(passed) if allowed is None else allowed & set(passed)
                ends |= set(stops)
            self._next = allowed, ends
        return self._next

    @property
    def finished(self) -> bool:
        """True after a token that ends the text."""
        return self._ended

    @property
    def accepting(self) -> bool:
        """True where the text could end: filters say so only with a token."""
        return self._ended or self._sets()[0] is None

    def allowed(self) -> Allowed:
        """What every filter allows; where the text is complete, its end."""
        mask = np.zeros(self._structure.vocab_size, bool)
        allowed, _ = self._sets() if not self._ended else (set(self._structure.end_ids), set())
        if allowed is None:
            mask[:] = True
        elif not allowed:
            raise StructureError("the filters allow no token here; two of them may contradict each other")
        else:
            mask[[i for i in allowed if i < len(mask)]] = True
        return Allowed.of(mask)

    def accept(self, token_id: int) -> None:
        """Feed it to every filter."""
        _, ends = self._sets()
        self._ids.append(token_id)
        if token_id in self._structure.end_ids:
            self._ended = True
            return
        self._ended = token_id in ends
        import torch

        for one in self._filters:
            one.feed(torch.tensor([[token_id]]))
        self._next = None

    def rewind(self, count: int) -> None:
        """Start again with the tokens before."""
        self._restart(self._ids[: len(self._ids) - count])

    def copy(self) -> FilterConstraint:
        """Another one at the same place."""
        return FilterConstraint(self._structure, list(self._ids))

    def forced(self) -> list[int]:
        """None are known."""
        return []

"""Scores of given text: log probabilities, the most likely of several options, activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from exl2nb.core.errors import OptionError
from exl2nb.core.options import several
from exl2nb.generator.engine import Engine
from exl2nb.llm.requests import ids_of
from exl2nb.model.model import Model
from exl2nb.tokenizer.detokenize import token_texts
from exl2nb.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from exl2nb.eval.score import Choice, Score
    from exl2nb.eval.trace import Hidden
    from exl2nb.llm.loras import Loras


class ScoringMixin:
    """The part of `LLM` that scores given text. It pauses running requests and uses an fp32 KV cache of its own."""

    model: Model
    tokenizer: Tokenizer
    engine: Engine
    loras: Loras

    def score(self, text: str | Sequence[int], *, lora: str | Mapping[str, float] | None = None) -> Score:
        """How likely a text is: log probability and rank of every token, their sum, the perplexity.

        Args:
            text: text or token ids, at least two tokens; the first (usually BOS) is not predicted.
            lora: adapters, as for `generate`.

        Raises:
            OptionError: too short, ids outside the vocabulary, or an adapter that is not loaded. ContextOverflow: longer than the context.
            EngineClosed: closed.

        Example:
            >>> import exl2nb as ex
            >>> with ex.demo(progress=None) as llm:
            ...     found = llm.score("It was a dark and stormy night.")
            ...     found.total > llm.score("night stormy and dark a was It.").total
            True
        """
        from exl2nb.eval.score import score

        ids = ids_of(text, self.tokenizer, where="score", name="text", context=self.model.context)
        row = None if lora is None else self.loras.row(lora, where="score")
        return score(self.engine.shared_model, self.tokenizer, ids, adapter=-1 if row is None else row.row)

    def choose(self, prompt: str | Sequence[int], options: Sequence[str], *, normalise: str = "sum") -> Choice:
        """Which of several continuations is the most likely.

        Args:
            prompt: text or token ids.
            options: at least two different texts that may follow it directly: mind the space at their beginning.
            normalise: "sum" compares the log probabilities of whole options, "mean" those per token (options of unlike length).

        Raises:
            OptionError: fewer than two options, or two of them equal. ContextOverflow: longer than the context. EngineClosed: closed.

        Example:
            >>> import exl2nb as ex
            >>> with ex.demo(progress=None) as llm:
            ...     choice = llm.choose("The old", [" man", " the", " xylophone"])
            ...     choice.best, round(sum(choice.probs.values()), 6)
            (' man', 1.0)
        """
        from exl2nb.eval.score import choice_of, option_logprobs

        texts = several(options)
        if len(texts) < 2 or not all(isinstance(text, str) and text for text in texts) or len(set(texts)) < len(texts):
            raise OptionError(f"choose: options is {str(options)[:80]}; expected at least two different texts, none of them empty")
        if isinstance(prompt, str):
            rows = [self.tokenizer.encode(prompt + text) for text in texts]
        else:
            start = ids_of(prompt, self.tokenizer, where="choose")
            rows = [start + self.tokenizer.encode(text, add_special=False) for text in texts]
        if len(set(map(tuple, rows))) < len(rows):
            raise OptionError("choose: two options are the same tokens to this model; leave one of them out")
        shown = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
        found = option_logprobs(self.engine.shared_model, rows)
        return choice_of(shown, texts, found, normalise=normalise)

    def hidden(
        self,
        text: str | Sequence[int],
        points: str | Sequence[str] = "layers.*.output",
        *,
        lora: str | Mapping[str, float] | None = None,
    ) -> Hidden:
        """What passes through the model at named points, as arrays.

        Args:
            text: text or token ids.
            points: names or patterns: "embedding", "layers.3.attention" (what the heads read out), "layers.3.middle" (the residual stream
                after attention), "layers.3.output" (after the layer), "logits"; `points` lists them all.
            lora: adapters, as for `generate`. On the CPU they are merged into each matrix for the moment that it is used, in fp32.

        Raises:
            OptionError: a name that is no point, or an adapter that is not loaded. ContextOverflow: longer than the context. EngineClosed:
            closed.

        Example:
            >>> import exl2nb as ex
            >>> with ex.demo(progress=None) as llm:
            ...     found = llm.hidden("It was", ["embedding", "layers.*.output"])
            ...     len(found), found["layers.3.output"].shape[1] == llm.config.hidden_size
            (13, True)
        """
        from exl2nb.eval.trace import hidden

        ids = ids_of(text, self.tokenizer, where="hidden", name="text")
        row = None if lora is None else self.loras.row(lora, where="hidden")
        texts, adapter = token_texts(self.tokenizer, ids), -1 if row is None else row.row
        return hidden(self.engine.shared_model, ids, points, texts=texts, adapter=adapter)

    @property
    def points(self) -> list[str]:
        """Names of the points of `hidden`, in running order."""
        from exl2nb.eval.trace import point_names

        return point_names(self.model)

"""What the model makes of given text: scores, choices, activations by name, and the answer when some of them are replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from exl2nb.core.errors import EngineClosed, OptionError
from exl2nb.core.options import several, shown
from exl2nb.generator.engine import Engine
from exl2nb.llm.requests import ids_of
from exl2nb.model.model import Model
from exl2nb.sampling.params import check_integer
from exl2nb.tokenizer.detokenize import token_texts
from exl2nb.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from exl2nb.eval.score import Choice, Score
    from exl2nb.eval.trace import Hidden, Trace
    from exl2nb.llm.loras import Loras
    from exl2nb.model.points import Edit


RESIDUAL_POINTS = ("blocks.*.hook_resid_post",)
Patch = Mapping[str, Any]


class InsideMixin:
    """The part of `LLM` that scores given text and looks inside while the model reads it, on a KV cache of its own.

    `score`, `choose` and `hidden` pause running requests. `trace` and `patch` run beside them, and the requests keep their bits.
    """

    model: Model
    tokenizer: Tokenizer
    engine: Engine
    loras: Loras
    name: Any

    if TYPE_CHECKING:

        def chat_request(
            self, messages: Sequence[Mapping[str, Any]] | str, options: Mapping[str, Any], *, where: str
        ) -> tuple[list[int], dict[str, Any]]:
            """Of `ChatMixin`."""
            ...

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

    def trace(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        capture: str | Sequence[str] = RESIDUAL_POINTS,
        *,
        patch: Patch | None = None,
        cache: str = "fp32",
        pattern_size: int | None = None,
        max_bytes: int = 1 << 30,
        on_step: Callable[[int, Mapping[str, Tensor]], None] | None = None,
    ) -> Trace:
        """Read a prompt and keep what passes through the model, by TransformerLens' names, as tensors on the CPU.

        Args:
            prompt: text, token ids, or messages as for `chat`, also with pictures; an answer at their end is the end.
            capture: names or patterns: "blocks.3.hook_resid_pre", "blocks.*.attn.hook_pattern", "blocks.*.mlp.hook_post",
                "ln_final.hook_normalized", "logits" (of every token); `trace_points` lists them all.
            patch: what is replaced meanwhile, as in `patch`.
            cache: mode of the KV cache; hook_rot_k and hook_v are what it holds.
            pattern_size: attention patterns of more tokens are averaged to so many rows and columns; None = they are kept whole.
            max_bytes: of all tensors together.
            on_step: called after each step with the number of tokens read so far and the tensors so far, to show them; what it raises ends
                the trace.

        Raises:
            OptionError: an unknown name, an edit that does not fit, or more than `max_bytes`; says how many. ContextOverflow: longer than
                the context. EngineClosed: closed.

        Cost: one pass over the prompt op by op, in steps of at most 1024 tokens; running requests wait for one such step.

        Example:
            >>> import exl2nb as ex
            >>> with ex.demo(progress=None) as llm:
            ...     found = llm.trace("It was a dark", ["blocks.*.hook_resid_post", "blocks.5.attn.hook_pattern"])
            ...     early = found.lens(2)[-1].argmax()  # what the model would say after layer 2
            >>> found["blocks.5.attn.hook_pattern"].shape, len(found)
            (torch.Size([4, 5, 5]), 13)
        """
        pictures = None
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
            talk = cast("Sequence[Mapping[str, Any]]", prompt)
            ends = isinstance(talk[-1], Mapping) and talk[-1].get("role") == "assistant"
            ids, options = self.chat_request(talk, {"continue_final_message": ends}, where="trace")
            pictures = options.get("pictures")
        else:
            ids = ids_of(prompt, self.tokenizer, where="trace", context=self.model.context)
        edits, layers = _parts(patch or {})
        from exl2nb.eval.trace import trace

        return trace(
            self.engine.shared_model, ids, capture, patch=edits, layers=layers, texts=token_texts(self.tokenizer, ids), cache=cache,
            pattern_size=pattern_size, max_bytes=max_bytes, name=str(self.name), on_step=on_step,
            pictures=pictures,
        )  # fmt: skip

    def patch(self, patch: Patch) -> Patched:
        """The model with some activations replaced, for a `with` block; the model itself, and requests that run on it, do not change.

        Args:
            patch: by name or pattern, as in `trace`: a number, a tensor (of one token, or of all tokens of the prompt), or a function of
                (value, hook), which edits the value in place or returns another one; hook.name, hook.layer and hook.start (position of the
                first token) say where it is. "blocks.3": another LLM of the same shape, with whose weights this layer then runs.

        Raises:
            OptionError: an unknown name, or something that is no edit.

        Example: without the second head of layer 4.
            >>> import exl2nb as ex
            >>> def ablate(z, hook):
            ...     z[:, 1] = 0
            >>> with ex.demo(progress=None) as llm:
            ...     before = llm.trace("It was a dark", "logits")
            ...     with llm.patch({"blocks.4.attn.hook_z": ablate}) as patched:
            ...         after = patched.trace("It was a dark", "logits")
            >>> bool(before.kl(after)[-1] > 0)
            True
        """
        from exl2nb.model.points import match_points

        edits, _ = _parts(patch)
        for name in edits:
            match_points(self.model.points, name, where="patch")
        return Patched(self, dict(patch))

    @property
    def trace_points(self) -> list[str]:
        """Names of the points of `trace`, in running order."""
        return list(self.model.points)


class Patched:
    """A model under edits, made by `LLM.patch`; usable until its `with` block ends."""

    def __init__(self, llm: Any, patch: Patch) -> None:
        self._llm, self._patch, self._open = llm, patch, True

    def __enter__(self) -> Patched:
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False

    def trace(self, prompt: str | Sequence[int], capture: str | Sequence[str] = RESIDUAL_POINTS, **options: Any) -> Trace:
        """As `LLM.trace`, under the edits; a `patch` of the call comes after them."""
        self._check()
        return self._llm.trace(prompt, capture, patch={**self._patch, **(options.pop("patch", None) or {})}, **options)

    def generate(self, prompt: str | Sequence[int], *, max_tokens: int = 32, cache: str = "fp32") -> str:
        """The greedy continuation under the edits.

        Raises:
            OptionError: an edit of a fixed number of tokens; otherwise as `trace`.
        """
        self._check()
        llm = self._llm
        check_integer("patch: max_tokens", max_tokens, 1, llm.model.context)
        ids = ids_of(prompt, llm.tokenizer, where="patch", context=llm.model.context)
        edits, layers = _parts(self._patch)
        stop = tuple(llm.tokenizer.eos_ids)
        from exl2nb.eval.trace import continued

        columns = llm.tokenizer.highest_id + 1 or None
        edited = {"patch": edits, "layers": layers, "cache": cache, "columns": columns}
        found = continued(llm.engine.shared_model, ids, max_tokens=max_tokens, stop=stop, **edited)
        return llm.tokenizer.decode(found)

    def _check(self) -> None:
        if not self._open:
            raise EngineClosed("patch: this with block has ended; begin another one with llm.patch")

    def __repr__(self) -> str:
        return f"Patched({self._llm.name}: {', '.join(self._patch)})"


def _parts(patch: Any) -> tuple[dict[str, Edit], dict[int, Any]]:
    """Edits by name, and by layer the models whose weights it runs with."""
    if not isinstance(patch, Mapping):
        raise OptionError(f"patch is {shown(patch)}; expected a mapping of names, such as {{'blocks.3.hook_mlp_out': 0.0}}")
    edits, layers = {}, {}
    for name, value in patch.items():
        if not isinstance(value, InsideMixin):
            edits[name] = value
            continue
        number = name.removeprefix("blocks.") if isinstance(name, str) else ""
        if not number.isdecimal() or name != f"blocks.{number}":
            raise OptionError(f"patch: {shown(name)} is given a model; expected the name of a layer, such as 'blocks.3'")
        layers[int(number)] = value.engine.shared_model
    return edits, layers

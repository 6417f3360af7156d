"""lm-eval: EleutherAI's evaluation harness over a loaded model, as the model "exl2nb"; `exl2nb.evaluate` is the shortcut.

`python -m exl2nb.integrations.lm_eval run --model exl2nb --model_args pretrained=DIR --tasks NAME` is the harness's own command line with
this model in it.
"""

from __future__ import annotations

import os
from itertools import groupby
from typing import TYPE_CHECKING, Any

from exl2nb.core.errors import MissingDependency, OptionError
from exl2nb.core.options import shown

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
except ImportError as error:
    raise MissingDependency(f"exl2nb.integrations.lm_eval needs the evaluation harness ({error}); pip install lm-eval") from error

from exl2nb.eval.score import continuation_logprobs

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from exl2nb.llm.llm import LLM

MAX_NEW_TOKENS = 256  # of generate_until, where the task does not say: the harness's own default
_IGNORED_OPTIONS = {"batch_size", "max_batch_size"}  # of the harness's command line: the engine makes its own batches
_SAMPLING_OPTIONS = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"}


@register_model("exl2nb")
class Exl2LM(TemplateLM):
    """A model of the harness.

    Args:
        pretrained: directory, hub id, or "demo". llm: a loaded model instead, which stays its owner's.
        max_length: tokens of context and continuation; None = what the model was loaded with.
        max_gen_toks: of generate_until, where the task does not say.
        options: of `exl2nb.load`; batch_size and max_batch_size are ignored, since the engine makes its own batches.

    Raises:
        OptionError: an option that `exl2nb.load` does not have. Otherwise as `exl2nb.load`.
    """

    def __init__(
        self,
        pretrained: str | os.PathLike[str] | None = None,
        *,
        llm: LLM | None = None,
        max_length: int | None = None,
        max_gen_toks: int = MAX_NEW_TOKENS,
        **options: Any,
    ) -> None:
        super().__init__()
        if (pretrained is None) == (llm is None):
            raise OptionError("lm_eval: give pretrained=, a directory or hub id, or llm=, a loaded model, and not both")
        self._own: LLM | None = None
        if llm is None:
            import exl2nb

            given = {"progress": None, **{name: value for name, value in options.items() if name not in _IGNORED_OPTIONS}}
            llm = self._own = exl2nb.demo(**given) if pretrained == "demo" else exl2nb.load(str(pretrained), **given)
        elif unknown := [name for name in options if name not in _IGNORED_OPTIONS]:
            raise OptionError(f"lm_eval: {unknown[0]!r} is an option of loading, and the model is loaded already; leave it out")
        self.llm = llm
        self.max_length = min(max_length or llm.context, llm.context)
        self.max_gen_toks = max_gen_toks

    def close(self) -> None:
        """Give the memory of a model back that was loaded here."""
        if self._own is not None:
            self._own.close()

    # ---- tokens

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return min(self.llm.tokenizer.eos_ids, default=self.llm.tokenizer.bos_id or 0)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: BOS, or the end of the text before."""
        bos = self.llm.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Text to ids; BOS where the tokenizer adds one and the text has none."""
        return self.llm.tokenizer.encode(string, add_special=add_special_tokens is not False)

    @property
    def tokenizer_name(self) -> str:
        """Names the requests in the harness's cache."""
        return self.llm.name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; without a generation prompt its last message is left open."""
        return self.llm.render_chat(
            chat_history, add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the model's template."""
        if chat_template is False:
            return None
        return self.llm.tokenizer.templates.pick(name=chat_template if isinstance(chat_template, str) else None)

    # ---- requests

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Requests with equal contexts, such as the options of a question, share one pass over it."""
        cut = [_fitted(context, rest, self.max_length) for _, context, rest in requests]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: cut[i][0])
        for context, group in groupby(order, key=lambda i: cut[i][0]):
            places = list(group)
            rests = [cut[i][1] for i in places]
            for i, answer in zip(places, continuation_logprobs(self.llm.engine.shared_model, context, rests)):
                found[i] = answer
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Whole texts, cut into windows as the harness does."""
        totals = []
        for request in requests:
            (text,) = request.args
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),  # BOS is predicted, too, as the harness has it for Transformers
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            rows: Any = [(None, *utils.make_disjoint_window(window)) for window in windows]
            total = sum(logprob for logprob, _ in self._loglikelihood_tokens(rows))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            totals.append(total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """All of them together, in the engine's batches.

        Raises:
            OptionError: a generation option that is not known here.
        """
        batch = [{"id": i, **self._request(*request.args)} for i, request in enumerate(requests)]
        texts: dict[Any, str] = {}
        for event in self.llm.batch(batch):
            if event.error is not None:
                raise event.error
            if event.completion is not None:
                texts[event.id] = event.completion.text
        for i, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, texts[i])
        return [texts[i] for i in range(len(requests))]

    def _request(self, context: str, gen_kwargs: dict[str, Any]) -> dict[str, Any]:
        given: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        sampled, tokens = given.pop("do_sample", False), given.pop("max_gen_toks")
        stop = [text for text in handle_stop_sequences(given.pop("until", None), eos=None) if text]
        if unknown := set(given) - _SAMPLING_OPTIONS:
            raise OptionError(
                f"lm_eval: the task asks for {shown(min(unknown))}; known are until, max_gen_toks, {', '.join(sorted(_SAMPLING_OPTIONS))}"
            )
        room = self.max_length - tokens
        if room < 1:
            raise OptionError(
                f"lm_eval: the task asks for {tokens} new tokens, the context is {self.max_length}; load with a larger context"
            )
        if not sampled:
            given["temperature"] = 0
        return {"prompt": self.tok_encode(context)[-room:], "max_tokens": tokens, "stop": stop, **given}


def _fitted(context: list[int], rest: list[int], longest: int) -> tuple[list[int], list[int]]:
    """Context and continuation cut from the left, as the harness cuts them for Transformers: the last token is predicted and not read."""
    whole = [*context, *rest][-(longest + 1) :]
    rest = rest[-len(whole) + 1 :]
    return whole[: len(whole) - len(rest)], rest


def main() -> None:
    """The harness's own command line, with the model "exl2nb" in it."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()

"""What a loaded model does for many requests at once, and what it keeps of them: jobs and the cache of prompts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from exl2nb.core.errors import OptionError
from exl2nb.core.options import shown
from exl2nb.generator.engine import Engine
from exl2nb.generator.handle import Handle
from exl2nb.generator.job import Job
from exl2nb.generator.prompt_cache import PromptCache
from exl2nb.generator.request import Chunk, Completion
from exl2nb.llm.requests import compile_structure, request_of
from exl2nb.model.model import Model
from exl2nb.tokenizer.tokenizer import Tokenizer


class Working:
    """The part of `LLM` that runs many requests and remembers what they computed.

    cache: what the pages of the KV cache hold: `cache.snapshot()`, `cache.save(path)`, `cache.load(path)`, `cache.clear()`, `cache.reuse`.
    """

    model: Model
    tokenizer: Tokenizer
    engine: Engine
    cache: PromptCache

    def job(self) -> Job:
        """An empty job: add requests with `job.add(prompt, id=..., ...)`, iterate it for their events."""
        return Job(self)

    def batch(self, prompts: Sequence[Any] | Mapping[Hashable, Any], **options: Any) -> Job:
        """Queue many requests and return at once; iterate the result for `Event`s of all of them as they come, tagged by id.

        Args:
            prompts: texts, lists of token ids, or dicts with "prompt", options of their own and perhaps "id". Their ids are 0, 1, ..., or
                the keys of a mapping.
            options: for all of them, as for `generate`.

        Raises:
            OptionError, ContextOverflow: a request cannot run; none of them does.

        Example:
            >>> import exl2nb as ex
            >>> with ex.demo(progress=None) as llm:
            ...     job = llm.batch({"a": "It was", "b": {"prompt": "She", "max_tokens": 2}}, max_tokens=4, temperature=0)
            ...     lengths = {event.id: len(event.completion.tokens) for event in job if event.over}
            >>> sorted(lengths.items())
            [('a', 4), ('b', 2)]
        """
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            raise OptionError(
                f"batch: prompts is {str(prompts)[:40]!r}; expected several: [text, text], or a mapping of them; for one: generate"
            )
        options = dict(options)
        compile_structure(options, self.tokenizer, self.model.config.vocab_size, where="batch")
        job = self.job()
        try:
            for id, prompt in prompts.items() if isinstance(prompts, Mapping) else enumerate(prompts):
                own = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
                if "prompt" not in own:
                    raise OptionError(f"batch: request {id!r} is {str(own)[:80]}; expected a text, ids, or a dict with 'prompt'")
                text, own = own.pop("prompt"), {"id": id, **options, **own}
                if wrong := [name for name in own if not isinstance(name, str) or name == "prompt"]:
                    raise OptionError(f"batch: unknown keyword {shown(wrong[0])}; prompts are the first argument")
                job.add(text, **own)
        except BaseException:
            job.cancel()
            raise
        return job

    def submit_for_job(self, prompt: Any, options: dict[str, Any], *, stream: bool, group: object) -> Handle:
        """Queue one request of a job; errors as in `stream`."""
        request = request_of(prompt, options, self.tokenizer, self.model.config.vocab_size, where="job.add", stream=stream)
        handle = self.engine.submit(request, group=group)
        handle.owner = self
        return handle


def call_back(handle: Handle, on_chunk: Callable[[Chunk], object]) -> Completion:
    """Read a request to its end, calling `on_chunk` with every chunk in the caller's thread; what it raises cancels the request."""
    with handle:
        for chunk in handle:
            on_chunk(chunk)
    return handle.result()

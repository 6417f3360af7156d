"""exllamav2's generators and jobs: each job is one request of the engine, read by `iterate`."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from exl2nb.core.errors import OptionError
from exl2nb.core.options import shown
from exl2nb.generator.handle import Handle
from exl2nb.generator.request import Completion, Token
from exl2nb.integrations.exllamav2.absent import Documented, NotOffered, table
from exl2nb.integrations.exllamav2.loading import CACHE_MULTIPLE_TOKENS, ExLlamaV2, ExLlamaV2CacheBase, ExLlamaV2Lora, ExLlamaV2Tokenizer
from exl2nb.integrations.exllamav2.sampler import ExLlamaV2PostSamplingHook, ExLlamaV2PostSamplingResult, ExLlamaV2Sampler
from exl2nb.integrations.exllamav2.token_filters import (
    ExLlamaV2Filter,
    ExLlamaV2PrefixFilter,
    ExLlamaV2SelectFilter,
    FilterStructure,
)
from exl2nb.integrations.exllamav2.vision import ExLlamaV2MMEmbedding, placed_prompt

__all__ = [
    "ExLlamaV2BaseGenerator",
    "ExLlamaV2DynamicGenerator",
    "ExLlamaV2DynamicGeneratorAsync",
    "ExLlamaV2DynamicJob",
    "ExLlamaV2DynamicJobAsync",
    "ExLlamaV2Filter",
    "ExLlamaV2MMEmbedding",
    "ExLlamaV2PostSamplingHook",
    "ExLlamaV2PostSamplingResult",
    "ExLlamaV2PrefixFilter",
    "ExLlamaV2Sampler",
    "ExLlamaV2SelectFilter",
    "ExLlamaV2StreamingGenerator",
]
POLL_S = 0.0005
# finish_reason: eos_reason
FINISH_REASONS = {
    "eos": "stop_token",
    "length": "max_new_tokens",
    "context": "max_new_tokens",
    "cancelled": "cancelled",
    "timeout": "max_new_tokens",
}
Settings = ExLlamaV2Sampler.Settings


class ExLlamaV2DynamicJob(Documented):
    """One prompt and its settings.

    Args:
        input_ids: int64 `(1, n)`, or two of them for classifier-free guidance with gen_settings.cfg_scale.
        max_new_tokens, min_new_tokens: of the answer.
        gen_settings: None = exllamav2's defaults. seed: None = a fresh one.
        stop_conditions: token ids and texts; without the end-of-text token the answer goes on after it.
        return_top_tokens, return_probs: add top_k_tokens, top_k_probs and token_probs to results. return_logits: adds logits to the last.
        filters: see `filters`. banned_strings: texts that never appear. token_healing: the prompt may end inside a word.
        identifier: comes with every result.
        embeddings: pictures that the prompt was encoded with.
        max_skips, filter_prefer_eos, decode_special_tokens: ignored. Unknown keywords: refused.

    Attributes:
        full_completion, new_tokens, is_finished, cached_pages, cached_tokens, accepted_draft_tokens, rejected_draft_tokens: so far.
        generator: that runs it, None before it is enqueued.
    """

    absent: ClassVar = table(
        loop="get_max_seq_len get_input_ids_list receive_logits receive_sample prepare_for_queue current_new_pages_required prefill"
        " get_block_index allocate_pages deallocate_pages all_unique_hashes allocated_pages alt_rope_embed alt_rope_offset checkpoint"
        " banned_strings_utf32_buffer banned_strings_utf32_offsets held_k_probs held_k_tokens held_logits held_probs held_text held_token"
        " held_tokens ngram_position ngrams non_sequential_pages prefix_token rng sequences skips stop_strings_utf32_buffer"
        " stop_strings_utf32_offsets total_pages",
        results="time_enqueue time_first_prefill time_first_token time_last_token",
    )
    _serials = itertools.count(1)

    def __init__(
        self,
        input_ids: Tensor | list[Tensor] | tuple[Tensor, ...],
        max_new_tokens: int,
        min_new_tokens: int = 0,
        max_skips: int | None = 4,
        gen_settings: Settings | None = None,
        seed: int | None = None,
        stop_conditions: Sequence[int | str] | set[int | str] | None = None,
        decode_special_tokens: bool = False,
        return_top_tokens: int = 0,
        return_logits: bool = False,
        return_probs: bool = False,
        filters: list[Any] | None = None,
        filter_prefer_eos: bool = False,
        token_healing: bool = False,
        identifier: object | None = None,
        banned_strings: list[str] | None = None,
        embeddings: list[Any] | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise OptionError(f"ExLlamaV2DynamicJob: unknown keyword {shown(next(iter(unknown)))}")
        self.prompts = [ids.view(-1).tolist() for ids in (input_ids if isinstance(input_ids, (list, tuple)) else [input_ids])]
        self.embeddings: list[ExLlamaV2MMEmbedding] = list(embeddings or ())
        if wrong := [one for one in self.embeddings if not isinstance(one, ExLlamaV2MMEmbedding)]:
            raise OptionError(f"ExLlamaV2DynamicJob: embeddings holds {shown(wrong[0])}; expected what ExLlamaV2VisionTower makes")
        self.settings = gen_settings or Settings()
        self.options: dict[str, Any] = {
            "max_tokens": max_new_tokens,
            "min_tokens": min(min_new_tokens, max_new_tokens),
            "token_healing": token_healing,
            "top_logprobs": return_top_tokens,
            "return_logits": return_logits,
        }
        if seed is not None:
            self.options["seed"] = seed
        if banned_strings:
            self.options["banned_strings"] = list(banned_strings)
        self.stops = [stop for stop in stop_conditions or () if stop is not None]
        self.filters, self.return_probs, self.return_top = filters, return_probs, return_top_tokens
        self.gen_settings, self.max_new_tokens, self.min_new_tokens = self.settings, max_new_tokens, min_new_tokens
        self.return_top_tokens, self.return_logits, self.max_skips = return_top_tokens, return_logits, max_skips
        self.banned_strings, self.decode_special_tokens = list(banned_strings or ()), decode_special_tokens
        self.filter_prefer_eos = filter_prefer_eos
        self.generator: ExLlamaV2DynamicGenerator | None = None
        self.cancelled = False
        self.identifier = identifier
        self.serial_number = next(self._serials)
        self.handle: Handle | None = None
        self.text = ""
        self._started = False
        self._seen, self._ended = 0, dict[str, Any]()

    @property
    def stop_tokens(self) -> set[int]:
        """Ids that end it."""
        return {stop for stop in self.stops if isinstance(stop, int)}

    @property
    def stop_tokens_list(self) -> list[int]:
        """The same, sorted."""
        return sorted(self.stop_tokens)

    @property
    def stop_strings(self) -> set[str]:
        """Texts that end it."""
        return {stop for stop in self.stops if isinstance(stop, str)}

    @property
    def stop_strings_list(self) -> list[str]:
        """The same, sorted."""
        return sorted(self.stop_strings)

    @property
    def full_completion(self) -> str:
        """The answer so far."""
        return self.text

    @property
    def new_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._ended.get("new_tokens", self._seen)

    @property
    def is_finished(self) -> bool:
        """Whether its last result was read, or it was cancelled."""
        return bool(self._ended) or self.cancelled

    def is_prefill_done(self) -> bool:
        """Whether the answer has begun."""
        return self._seen > 0 or self.is_finished

    @property
    def cached_pages(self) -> int:
        """Pages of the prompt that were cached; 0 before the end."""
        return self._ended.get("cached_pages", 0)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were cached; 0 before the end."""
        return self._ended.get("cached_tokens", 0)

    @property
    def accepted_draft_tokens(self) -> int:
        """Draft tokens that were accepted; 0 before the end."""
        return self._ended.get("accepted_draft_tokens", 0)

    @property
    def rejected_draft_tokens(self) -> int:
        """Draft tokens that were not; 0 before the end."""
        return self._ended.get("rejected_draft_tokens", 0)

    def request(self, generator: ExLlamaV2DynamicGenerator) -> tuple[list[int], dict[str, Any]]:
        """Prompt and options of `llm.stream`."""
        llm = generator.llm
        ends = llm.tokenizer.eos_ids
        options = {**self.options, **self.settings.options(llm.config.vocab_size)}
        options["ignore_eos"] = not any(stop in ends for stop in self.stops)
        options["stop"] = [stop for stop in self.stops if stop not in ends]
        options["speculation"] = generator.speculation
        if generator.loras:
            options["lora"] = generator.loras
        if self.filters:
            options["structure"] = FilterStructure(self.filters, llm.config.vocab_size, ends)
            options["ignore_eos"] = False
        prompt, scale = self.prompts[0], self.settings.cfg_scale
        if self.embeddings:
            config = llm.config
            prompt, options["pictures"] = placed_prompt(prompt, self.embeddings, whole=config.sees_whole, axes=config.mrope is not None)
        if len(self.prompts) > 1 or scale is not None:
            if len(self.prompts) != 2 or scale is None:
                raise OptionError(
                    f"ExLlamaV2DynamicJob: {len(self.prompts)} prompts and cfg_scale {scale}; expected a pair with one, or one prompt"
                )
            other = self.prompts[1]
            if scale < 0:  # s * a + (1 - s) * b, with a and b changed over
                prompt, other, scale = other, prompt, 1 - scale
            options["cfg_scale"], options["negative_ids"] = scale, tuple(other)
        return prompt, options

    def poll(self, tokenizer: ExLlamaV2Tokenizer) -> list[dict[str, Any]]:
        """What became of it since the last call, as exllamav2's results."""
        assert self.handle is not None, "enqueued"
        results: list[dict[str, Any]] = []
        base: dict[str, Any] = {"job": self, "eos": False, "serial": self.serial_number}
        if self.identifier is not None:
            base["identifier"] = self.identifier
        if not self._started:
            self._started = True
            results.append({**base, "stage": "started"})
        ended = self.handle.done  # asked before the chunks are taken: the last ones arrive before the end
        while (chunk := self.handle.poll()) is not None:
            self.text += chunk.text
            self._seen += len(chunk.tokens)
            results.append({**base, "stage": "streaming", "text": chunk.text, **self._tokens(chunk.tokens)})
        if ended:
            completion = self.handle.result()
            left = completion.text[len(self.text) :]
            self.text, self._ended = completion.text, self._last(completion)
            results.append({**base, "stage": "streaming", **({"text": left} if left else {}), **self._ended})
        return results

    def _tokens(self, tokens: Sequence[Token]) -> dict[str, Any]:
        found: dict[str, Any] = {"token_ids": torch.tensor([[token.id for token in tokens]])}
        if self.return_probs:
            found["token_probs"] = torch.tensor([[token.prob for token in tokens]])
        if self.return_top:
            found["top_k_tokens"] = torch.tensor([[[other.id for other in token.top] for token in tokens]])
            found["top_k_probs"] = torch.tensor([[[other.prob for other in token.top] for token in tokens]])
        return found

    def _last(self, completion: Completion) -> dict[str, Any]:
        timings, reason = completion.timings, completion.finish_reason
        found: dict[str, Any] = {
            "eos": True,
            "eos_reason": FINISH_REASONS.get(reason, "stop_string" if isinstance(completion.stopped_by, str) else "stop_token"),
            "full_completion": completion.text,
            "new_tokens": timings.new_tokens,
            "prompt_tokens": timings.prompt_tokens,
            "time_enqueued": timings.queue_s,
            "time_prefill": timings.prefill_s,
            "time_generate": timings.decode_s,
            "cached_pages": timings.reused_tokens // CACHE_MULTIPLE_TOKENS,
            "cached_tokens": timings.reused_tokens,
        }
        if self.filters and reason == "stop" and completion.stopped_by is None:
            found["eos_reason"] = "end_filter"
        if isinstance(completion.stopped_by, str):
            found["eos_triggering_string"] = completion.stopped_by
        elif completion.stopped_by is not None:
            found["eos_triggering_token_id"] = completion.stopped_by
        if completion.rewinds:
            found["suppressed_text"] = "".join(rewind.text for rewind in completion.rewinds)
            found["suppressed_tokens"] = torch.tensor([[i for rewind in completion.rewinds for i in rewind.ids]])
        if completion.speculation is not None:
            found["accepted_draft_tokens"] = completion.speculation.accepted
            found["rejected_draft_tokens"] = completion.speculation.proposed - completion.speculation.accepted
        if completion.logits is not None:
            found["logits"] = torch.as_tensor(completion.logits)[None]
        return found


class ExLlamaV2DynamicGenerator(Documented):
    """Runs jobs in the engine's batch; the model is loaded here if it is not yet.

    Args:
        model, cache, tokenizer: of exllamav2's kinds.
        max_seq_len: at most the config's. draft_model, draft_cache: a smaller model that proposes tokens. num_draft_tokens: up to 7.
        use_ngram_draft, max_ngram: tokens proposed from the text itself.
        max_batch_size, max_chunk_size, max_q_size, paged, threads, filter_background_eval: ignored: the engine decides. Unknown: refused.

    Attributes:
        page_size, max_pages, max_total_tokens: of the cache.
        max_batch_size, max_chunk_size: of the engine.
        pending_jobs, active_jobs: jobs that have not begun, and those that have.
        current_loras: as set.
    """

    absent: ClassVar = table(
        loop="get_paged_params iterate_ngram_gen iterate_draftmodel_gen iterate_gen iterate_start_jobs access_serial all_pages"
        " defrag_buffer defrag_buffers draft_ids_pinned draft_input_ids_pinned filter_pool filter_queue job_serial"
        " last_defrag_serial logits_pinned"
        " referenced_pages unreferenced_pages sampling_pool print_page_list validate_cache",
    )
    page_size = CACHE_MULTIPLE_TOKENS
    paged = True

    def __init__(
        self,
        model: ExLlamaV2,
        cache: ExLlamaV2CacheBase,
        tokenizer: ExLlamaV2Tokenizer,
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        max_chunk_size: int | None = None,
        max_q_size: int = 8,
        draft_model: ExLlamaV2 | None = None,
        draft_cache: ExLlamaV2CacheBase | None = None,
        num_draft_tokens: int = 4,
        use_ngram_draft: bool = False,
        max_ngram: int = 4,
        max_sampling_threads: int = 16,
        min_sampling_threads: int = 3,
        paged: bool = True,
        filter_background_eval: bool = True,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise OptionError(f"{type(self).__name__}: unknown keyword {shown(next(iter(unknown)))}")
        if draft_model is not None and use_ngram_draft:
            raise OptionError(f"{type(self).__name__}: draft_model and use_ngram_draft exclude each other; leave one out")
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.max_seq_len = max_seq_len or model.config.max_seq_len
        self.llm: Any = model.open(cache)
        self.speculation: Any = "off"
        if draft_model is not None:
            from exl2nb.llm.load import make_drafter

            draft = draft_model.open(draft_cache or ExLlamaV2CacheBase(draft_model))
            if self.llm.engine.drafter is None:
                self.llm.engine.drafter = make_drafter(self.llm, draft, cache=cache.mode, progress=None)
            self.speculation = {"kind": "draft", "max_tokens": min(num_draft_tokens, 7)}
        elif use_ngram_draft:
            self.speculation = {"kind": "ngram", "max_tokens": min(num_draft_tokens, 7)}
        self.jobs: list[ExLlamaV2DynamicJob] = []
        self.loras: dict[str, float] = {}
        self.current_loras: list[ExLlamaV2Lora] = []
        self.draft_model, self.draft_cache, self.num_draft_tokens = draft_model, draft_cache, num_draft_tokens
        self.use_ngram_draft, self.max_ngram = use_ngram_draft, max_ngram
        self.max_sampling_threads, self.min_sampling_threads = max_sampling_threads, min_sampling_threads
        self.max_total_tokens = cache.max_seq_len * cache.batch_size
        self.max_pages = self.max_total_tokens // CACHE_MULTIPLE_TOKENS
        self.padded_vocab_size = -(-self.llm.config.vocab_size // 32) * 32

    @property
    def max_batch_size(self) -> int:
        """Sequences that the engine runs together."""
        return self.llm.engine.loop.scheduler.max_sequences

    @property
    def max_chunk_size(self) -> int:
        """Tokens of prompts in one step."""
        return self.llm.engine.loop.scheduler.chunks.max_tokens

    @property
    def pending_jobs(self) -> list[ExLlamaV2DynamicJob]:
        """Jobs without a result."""
        return [job for job in self.jobs if not job._started]

    @property
    def active_jobs(self) -> list[ExLlamaV2DynamicJob]:
        """Jobs with a result that have not ended."""
        return [job for job in self.jobs if job._started]

    def defrag_cache(self) -> None:
        """Nothing: pages need no order here."""

    def warmup(self) -> None:
        """Run one short job."""
        self.llm.generate([self.llm.tokenizer.bos_id or 0, 5, 6], max_tokens=8, temperature=0)

    def set_loras(self, loras: ExLlamaV2Lora | list[ExLlamaV2Lora] | None) -> None:
        """Adapters of the jobs that are enqueued from now on, all of them together; None = none.

        Raises:
            OptionError: something else than ExLlamaV2Lora. As `llm.loras.load`.
        """
        several = [] if not loras else loras if isinstance(loras, list) else [loras]
        if wrong := [one for one in several if not isinstance(one, ExLlamaV2Lora)]:
            raise OptionError(f"set_loras: {shown(wrong[0])} was given; expected ExLlamaV2Lora objects")
        for one in several:
            if one.name not in self.llm.loras:
                self.llm.loras.load(one.directory, name=one.name, progress=None)
        for name in self.loras.keys() - {one.name for one in several}:
            self.llm.loras.unload(name)
        self.loras = {one.name: one.lora_scaling for one in several}
        self.current_loras = several

    def num_remaining_jobs(self) -> int:
        """Jobs that have not ended."""
        return len(self.jobs)

    def enqueue(self, job: ExLlamaV2DynamicJob | list[ExLlamaV2DynamicJob]) -> int | list[int]:
        """Queue jobs, all or none; errors as of `llm.stream`. Returns serial numbers."""
        several, handles = job if isinstance(job, list) else [job], []
        try:
            for prompt, options in [one.request(self) for one in several]:
                handles.append(self.llm.stream(prompt, **options))
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        for one, one.handle in zip(several, handles):
            one.generator = self
            self.jobs.append(one)
        return [one.serial_number for one in several] if isinstance(job, list) else several[0].serial_number

    def cancel(self, job: ExLlamaV2DynamicJob) -> None:
        """End a job; it gives no more results."""
        job.cancelled = True
        if job.handle is not None:
            job.handle.cancel()
        if job in self.jobs:
            self.jobs.remove(job)

    def clear_queue(self) -> None:
        """End all jobs."""
        for job in list(self.jobs):
            self.cancel(job)

    def reset_page_table(self) -> None:
        """Forget what is cached."""
        self.llm.cache.clear()

    def iterate(self) -> list[dict[str, Any]]:
        """Wait until a job has something, and give all there is: dicts with job, stage ("started", "streaming"), eos, text and so on."""
        while self.jobs:
            if results := self.poll():
                return results
            time.sleep(POLL_S)
        return []

    def poll(self) -> list[dict[str, Any]]:
        """What there is now."""
        results: list[dict[str, Any]] = []
        for job in list(self.jobs):
            try:
                found = job.poll(self.tokenizer)
            except BaseException:
                self.jobs.remove(job)
                raise
            results += found
            if found and found[-1]["eos"]:
                self.jobs.remove(job)
        return results

    def generate(
        self,
        prompt: Any,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        seed: int | None = None,
        gen_settings: Settings | list[Settings] | None = None,
        token_healing: bool = False,
        encode_special_tokens: bool = False,
        decode_special_tokens: bool = False,
        stop_conditions: list[int | str] | None = None,
        add_bos: bool = False,
        abort_event: threading.Event | None = None,
        completion_only: bool = False,
        filters: list[Any] | None = None,
        filter_prefer_eos: bool = False,
        return_last_results: bool = False,
        embeddings: Any = None,
        banned_strings: list[str] | None = None,
        **unknown: Any,
    ) -> Any:
        """Continue one prompt or several: texts, or pairs of texts for guidance.

        Returns:
            Prompt and answer as text, the answer alone with completion_only; a list for a list. With return_last_results also the last
            result of each job.
        """
        if unknown:
            raise OptionError(f"generate: unknown keyword {shown(next(iter(unknown)))}")
        prompts = prompt if isinstance(prompt, list) else [prompt]
        each = filters if filters and isinstance(filters[0], (list, type(None))) else [filters] * len(prompts)
        settings = gen_settings if isinstance(gen_settings, list) else [gen_settings] * len(prompts)
        if len(each) != len(prompts) or len(settings) != len(prompts):
            raise OptionError(f"generate: {len(prompts)} prompts, {len(settings)} settings, {len(each)} filters; expected one for each")
        seeds = random.Random(seed)
        jobs = []
        for i, (one, own, filtered) in enumerate(zip(prompts, settings, each)):
            texts = one if isinstance(one, tuple) else (one,)
            ids = [self.tokenizer.encode(text, add_bos=add_bos, encode_special_tokens=encode_special_tokens) for text in texts]
            jobs.append(
                ExLlamaV2DynamicJob(
                    ids,
                    max_new_tokens,
                    min_new_tokens,
                    gen_settings=own,
                    seed=None if seed is None else seeds.getrandbits(32),
                    stop_conditions=stop_conditions,
                    filters=filtered,
                    token_healing=token_healing,
                    banned_strings=banned_strings,
                    identifier=i,
                    embeddings=embeddings,
                )
            )
        self.enqueue(jobs)
        last: list[dict[str, Any]] = [{} for _ in jobs]
        try:
            while any(job in self.jobs for job in jobs):
                if abort_event is not None and abort_event.is_set():
                    break
                for result in self.poll():
                    if result["job"] in jobs:
                        last[result["identifier"]] = result
                time.sleep(POLL_S)
        finally:
            for job in jobs:
                self.cancel(job)
        starts = [one[0] if isinstance(one, tuple) else one for one in prompts]
        texts = [job.text if completion_only else start + job.text for job, start in zip(jobs, starts)]
        answer = texts if isinstance(prompt, list) else texts[0]
        return (answer, last if isinstance(prompt, list) else last[0]) if return_last_results else answer

    def generate_text(self, prompt: Any, max_new_tokens: int = 50, **options: Any) -> Any:
        """`generate`, as older write-ups call it: ends at the end of the text."""
        options.setdefault("stop_conditions", [self.tokenizer.eos_token_id])
        return self.generate(prompt, max_new_tokens, **options)


class ExLlamaV2BaseGenerator(Documented):
    """`generate_simple` over the same jobs.

    Args:
        model, cache, tokenizer: of exllamav2's kinds.
    """

    def __init__(self, model: ExLlamaV2, cache: ExLlamaV2CacheBase, tokenizer: ExLlamaV2Tokenizer, **options: Any) -> None:
        self._jobs = ExLlamaV2DynamicGenerator(model, cache, tokenizer, **options)
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.sequence_ids: Tensor | None = None
        self.abort_event: threading.Event | None = None

    def full(self) -> bool:
        """Whether the stream has as many tokens as the model can take."""
        return self.sequence_ids is not None and self.sequence_ids.shape[-1] >= self.model.config.max_seq_len

    @property
    def llm(self) -> Any:
        """The model that answers."""
        return self._jobs.llm

    def warmup(self) -> None:
        """Run one short job."""
        self._jobs.warmup()

    def generate_simple(
        self,
        prompt: str | list[str],
        gen_settings: Settings,
        num_tokens: int,
        seed: int | None = None,
        token_healing: bool = False,
        encode_special_tokens: bool = False,
        decode_special_tokens: bool = False,
        loras: Any = None,
        stop_token: int | None = -1,
        add_bos: bool = False,
        abort_event: threading.Event | None = None,
        input_embeddings: Tensor | None = None,
        completion_only: bool = False,
        filters: list[Any] | None = None,
        filter_prefer_eos: bool = False,
    ) -> str | list[str]:
        """Continue one text or several. stop_token: -1 = the end of the text, None = none."""
        self._jobs.set_loras(loras)
        end = self.tokenizer.eos_token_id if stop_token == -1 else stop_token
        ends: list[int | str] = [] if end is None else [end]
        return self._jobs.generate(
            prompt, num_tokens, seed=seed, gen_settings=gen_settings, token_healing=token_healing, add_bos=add_bos, filters=filters,
            encode_special_tokens=encode_special_tokens, stop_conditions=ends, abort_event=abort_event, completion_only=completion_only,
            embeddings=input_embeddings,
        )  # fmt: skip

    def generate_text(self, prompt: str, max_new_tokens: int = 50, **options: Any) -> Any:
        """As older write-ups call it."""
        return self._jobs.generate_text(prompt, max_new_tokens, **options)


class ExLlamaV2StreamingGenerator(ExLlamaV2BaseGenerator):
    """One stream at a time: `begin_stream_ex`, then `stream_ex` until "eos".

    Args:
        model, cache, tokenizer: of exllamav2's kinds. draft_model, draft_cache, num_speculative_tokens: see the dynamic generator.

    Attributes:
        speculative_ngram: may be set: tokens are proposed from the text itself.
        speculative_ngram_min, speculative_ngram_max, speculative_ngram_max_inf, speculative_ngram_threshold, speculative_prob_threshold:
            may be set and are ignored: the engine decides how many tokens pay.
        settings, filters, banned_strings, return_probabilities, return_top_tokens, return_logits: of the last stream.
        stop_tokens, stop_strings: as `set_stop_conditions` was given them.
    """

    absent: ClassVar = table(
        loop="strings_to_utf32 ban_checkpoint banned_strings_utf32_buffer banned_strings_utf32_offsets blocked_position blocked_tokens"
        " current_blocked_tokens first_token future_logits future_tokens heal_next_token held_logits held_pprobs held_probs held_ptokens"
        " held_text held_tokens indexed_embeddings input_mask max_fallback_tokens ngram ngram_preloaded no_logits no_pprobs no_probs"
        " no_ptokens no_tokens position_offsets remaining_tokens reuse_logits"
        " stop_strings_utf32_buffer"
        " stop_strings_utf32_offsets tail_decode_tokens",
        results="accepted_draft_tokens total_draft_tokens total_tokens",
    )
    speculative_ngram_min, speculative_ngram_max, speculative_ngram_max_inf, speculative_ngram_threshold = 1, 5, 3, 1
    speculative_prob_threshold = 0.25

    def __init__(
        self,
        model: ExLlamaV2,
        cache: ExLlamaV2CacheBase,
        tokenizer: ExLlamaV2Tokenizer,
        draft_model: ExLlamaV2 | None = None,
        draft_cache: ExLlamaV2CacheBase | None = None,
        num_speculative_tokens: int = 5,
    ) -> None:
        super().__init__(model, cache, tokenizer, draft_model=draft_model, draft_cache=draft_cache, num_draft_tokens=num_speculative_tokens)
        self.draft_model, self.draft_cache, self.num_speculative_tokens = draft_model, draft_cache, num_speculative_tokens
        self._stops: list[int | str] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._job: ExLlamaV2DynamicJob | None = None
        self._results: list[dict[str, Any]] = []
        self.settings: Settings | None = None
        self.filters: list[Any] = []
        self.banned_strings: list[str] = []
        self.filter_prefer_eos = self.decode_special_tokens = self.return_probabilities = self.return_logits = False
        self.return_top_tokens = 0

    def set_stop_conditions(self, stop_conditions: Sequence[int | str] | set[int | str]) -> None:
        """What ends a stream."""
        self._stops = list(stop_conditions)

    @property
    def stop_tokens(self) -> set[int]:
        """Ids that end a stream."""
        return {stop for stop in self._stops if isinstance(stop, int)}

    @property
    def stop_strings(self) -> set[str]:
        """Texts that end a stream."""
        return {stop for stop in self._stops if isinstance(stop, str)}

    @property
    def active_loras(self) -> list[ExLlamaV2Lora]:
        """Adapters of the stream."""
        return self._jobs.current_loras

    @property
    def speculative_ngram(self) -> bool:
        """Whether tokens are proposed from the text itself; counts for the next stream."""
        speculation = self._jobs.speculation
        return isinstance(speculation, dict) and speculation["kind"] == "ngram"

    @speculative_ngram.setter
    def speculative_ngram(self, value: bool) -> None:
        if value and self.draft_model is not None:
            raise OptionError("speculative_ngram: a draft model is set as well; leave one out")
        if self.draft_model is None:
            self._jobs.speculation = {"kind": "ngram", "max_tokens": min(self.num_speculative_tokens, 7)} if value else "off"

    def ngram_preload(self, input_ids: Tensor) -> None:
        """Nothing: drafts come from the text and from earlier requests, and never change the answer."""

    def __setattr__(self, name: str, value: Any) -> None:
        if (why := self.absent.get(name)) is not None:
            raise NotOffered(f"{type(self).__name__}.{name} cannot be set here: {why}")
        super().__setattr__(name, value)

    def begin_stream_ex(
        self,
        input_ids: Tensor,
        gen_settings: Settings,
        token_healing: bool = False,
        loras: Any = None,
        input_mask: Tensor | None = None,
        position_offsets: Tensor | None = None,
        return_probabilities: bool = False,
        return_top_tokens: int = 0,
        return_logits: bool = False,
        abort_event: threading.Event | None = None,
        input_embeddings: Tensor | None = None,
        decode_special_tokens: bool = False,
        banned_strings: list[str] | None = None,
        filters: list[Any] | None = None,
        filter_prefer_eos: bool = False,
        **unknown: Any,
    ) -> None:
        """Begin a stream; one that runs is ended. input_mask, position_offsets, input_embeddings and unknown keywords: refused."""
        for name, value in {
            "input_mask": input_mask,
            "position_offsets": position_offsets,
            "input_embeddings": input_embeddings,
            **unknown,
        }.items():
            if value is not None:
                raise OptionError(f"begin_stream_ex: {name} is not taken here; leave it out")
        self._jobs.set_loras(loras)
        if self._job is not None:
            self._jobs.cancel(self._job)
        self.sequence_ids = input_ids.clone()
        room = self._jobs.llm.context - input_ids.shape[-1]
        self._job = ExLlamaV2DynamicJob(
            input_ids, max(1, room), gen_settings=gen_settings, stop_conditions=self._stops, token_healing=token_healing,
            return_probs=return_probabilities, return_top_tokens=return_top_tokens, return_logits=return_logits,
            banned_strings=banned_strings, filters=filters,
        )  # fmt: skip
        self._results = []
        self.settings, self.filters, self.filter_prefer_eos = gen_settings, filters or [], filter_prefer_eos
        self.banned_strings, self.decode_special_tokens, self.abort_event = banned_strings or [], decode_special_tokens, abort_event
        self.return_probabilities, self.return_top_tokens, self.return_logits = return_probabilities, return_top_tokens, return_logits
        self._jobs.enqueue(self._job)

    def begin_stream(
        self, input_ids: Tensor, gen_settings: Settings, token_healing: bool = False, loras: Any = None, **options: Any
    ) -> None:
        """`begin_stream_ex`."""
        self.begin_stream_ex(input_ids, gen_settings, token_healing, loras, **options)

    def stream_ex(self, ban_tokens: list[int] | None = None, **_: Any) -> dict[str, Any]:
        """The next piece: chunk (text), eos, chunk_token_ids int64 `(1, n)`; probs, top_tokens, top_probs, suppressed_text if asked for.

        Raises:
            OptionError: ban_tokens, which would change a request that runs; set them before with `Settings.disallow_tokens`.
        """
        if ban_tokens:
            raise OptionError("stream_ex: ban_tokens is not taken while a stream runs; use Settings.disallow_tokens before it")
        assert self._job is not None, "begin_stream_ex first"
        while not self._results:
            self._results = [one for one in self._jobs.iterate() if one["job"] is self._job and one["stage"] == "streaming"]
            if not self._results and not self._jobs.jobs:
                return {"chunk": "", "eos": True, "chunk_token_ids": torch.empty(1, 0, dtype=torch.int64)}
        result = self._results.pop(0)
        ids = result.get("token_ids", torch.empty(1, 0, dtype=torch.int64))
        if self.sequence_ids is not None:
            self.sequence_ids = torch.cat([self.sequence_ids, ids], -1)
        renamed = {"token_probs": "probs", "top_k_tokens": "top_tokens", "top_k_probs": "top_probs"}
        more = {new: result[old] for old, new in renamed.items() if old in result}
        same = {name: result[name] for name in ("suppressed_text", "suppressed_tokens", "logits") if name in result}
        return {"chunk": result.get("text", ""), "eos": result["eos"], "chunk_token_ids": ids, **more, **same}

    def reset_sd_stats(self) -> None:
        """Nothing: every request has counts of its own."""

    def get_sd_stats(self) -> Any:
        """Refuse.

        Raises:
            OptionError: always: the counts are in the last result of a dynamic job.
        """
        raise OptionError("get_sd_stats: read accepted_draft_tokens and rejected_draft_tokens of a dynamic job's last result")

    def stream(self, **options: Any) -> tuple[str, bool, Tensor]:
        """The next piece as chunk, eos, token ids."""
        found = self.stream_ex(**options)
        return found["chunk"], found["eos"], found["chunk_token_ids"]


class ExLlamaV2DynamicGeneratorAsync(Documented):
    """The dynamic generator for event loops.

    Args:
        options: of `ExLlamaV2DynamicGenerator`.

    Attributes:
        generator: the dynamic one.
        jobs: its jobs -> those of event loops.
    """

    absent: ClassVar = table(loop="condition iteration_task")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.generator = ExLlamaV2DynamicGenerator(*arguments, **options)
        self._made: dict[ExLlamaV2DynamicJob, ExLlamaV2DynamicJobAsync] = {}

    @property
    def jobs(self) -> dict[ExLlamaV2DynamicJob, ExLlamaV2DynamicJobAsync]:
        """Jobs that have not ended."""
        self._made = {job: self._made[job] for job in self.generator.jobs if job in self._made}
        return dict(self._made)

    def enqueue(self, job: ExLlamaV2DynamicJobAsync) -> None:
        """Queue a job; one that was made with this generator is queued already."""
        if job.job in self.jobs:
            return
        self.generator.enqueue(job.job)
        self._made[job.job] = job

    async def close(self) -> None:
        """End all jobs."""
        self.generator.clear_queue()

    async def cancel(self, job: ExLlamaV2DynamicJobAsync) -> None:
        """End a job."""
        await job.cancel()


class ExLlamaV2DynamicJobAsync(Documented):
    """A job that is iterated: `async for result in job`.

    Args:
        generator: the async one. options: of `ExLlamaV2DynamicJob`.
    """

    absent: ClassVar = table(loop="queue put_result")

    def __init__(self, generator: ExLlamaV2DynamicGeneratorAsync, *arguments: Any, **options: Any) -> None:
        self.generator, self._generator = generator, generator.generator
        self.job, self.cancelled = ExLlamaV2DynamicJob(*arguments, **options), False
        generator.enqueue(self)

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        try:
            while self.job in self._generator.jobs:
                found = self.job.poll(self._generator.tokenizer)
                for result in found:
                    yield {**result, "job": self}
                if found and found[-1]["eos"]:
                    return
                await asyncio.sleep(POLL_S)
        finally:
            self._generator.cancel(self.job)

    async def cancel(self) -> None:
        """End it; its pages are free again."""
        self.cancelled = True
        self._generator.cancel(self.job)

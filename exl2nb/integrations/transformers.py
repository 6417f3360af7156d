"""Transformers: a loaded model as a `PreTrainedModel` with `generate()`, its cache on our pages. Transformers chooses the tokens."""

# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false
# Transformers' signatures differ from one version to the next.

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exl2nb.core.errors import ContextOverflow, MissingDependency, OptionError
from exl2nb.core.options import check_flag, shown

try:
    from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache
    from transformers.generation import logits_process
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
    from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ImportError as error:
    raise MissingDependency(f"exl2nb.integrations.transformers needs Transformers ({error}); pip install 'transformers>=5'") from error

from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import PAGE_SIZE
from exl2nb.integrations.hf_quantizer import Exl2Linear
from exl2nb.io.hf_config import read_config
from exl2nb.model.batch import Batch, SequenceSlice
from exl2nb.sampling.params import SamplingParams

if TYPE_CHECKING:
    from exl2nb.llm.llm import LLM
    from exl2nb.sampling.replay import Draw

__all__ = ["CACHE", "Exl2ForCausalLM", "Exl2Linear", "PagedCache"]
# what Transformers calls the cache: "past_key_values" until 5.x, "cache" since
CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
FORWARD_CHUNK_TOKENS = 2048  # tokens of one forward step: other requests of the model run between two of them
# of from_pretrained: what has one meaning here, and is accepted where it is that one
_FIXED_OPTIONS: dict[str, tuple[Any, ...]] = {
    "trust_remote_code": (False, None),
    "dtype": ("auto", None),
    "torch_dtype": ("auto", None),
    "low_cpu_mem_usage": (True, False, None),
    "use_safetensors": (True, None),
    "attn_implementation": ("auto", None),
    "quantization_config": (None,),
}


@dataclass
class _Row:
    """Pages and tokens of one sequence."""

    pages: list[int]
    length: int = 0


class PagedCache(Cache):
    """Keys and values of several sequences in pages of their own pool, which grows; equal beginnings share pages.

    Made by `Exl2ForCausalLM`; may be given to it again to go on, cropped, and reordered.

    Args:
        llm: the model. mode: of the KV cache, as in `exl2nb.load`.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, llm: LLM, mode: str) -> None:
        super().__init__(layers=[])
        self._model, self._mode = llm.model, mode
        self.rows: list[_Row] = []
        self._real = torch.ones(0, 0, dtype=torch.bool)  # which of the tokens are no padding, (sequences, tokens)
        self.pool: KVCache | None = None
        self._users: list[int] = []  # of each page

    # ---- what Transformers asks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens so far, padding included."""
        return self._real.shape[1]

    @property
    def is_linear(self) -> list[bool]:
        """No layer is a linear-attention layer."""
        return [False] * self._model.config.num_layers

    @property
    def is_initialized(self) -> bool:
        """Whether it holds anything."""
        return bool(self.rows)

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1: it grows."""
        return -1

    def crop(self, max_length: int) -> None:
        """Drop the last tokens: as many as a negative number says, or down to a positive one."""
        kept = self._real.shape[1] + max_length if max_length <= 0 else min(max_length, self._real.shape[1])
        gone = self._real[:, max(kept, 0) :].sum(1).tolist()
        self._real = self._real[:, : max(kept, 0)]
        for row, count in zip(self.rows, gone):
            row.length -= count
            needed = -(-row.length // PAGE_SIZE)
            self._drop(row.pages[needed:])
            del row.pages[needed:]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence `beam_idx[i]` was; pages are shared, not copied."""
        self._take(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times."""
        self._take([i for i in range(len(self.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some of the sequences."""
        self._take(indices.tolist())

    def reset(self) -> None:
        """Empty, without a number of sequences."""
        self._take([])
        self._real = self._real[:, :0]

    def __len__(self) -> int:
        return self._model.config.num_layers

    def __repr__(self) -> str:
        used = sum(count > 0 for count in self._users)
        return f"PagedCache({len(self.rows)} sequences, {self.get_seq_length()} tokens, {used} of {len(self._users)} pages, {self._mode})"

    # ---- what the model asks

    def append(self, real: Tensor) -> None:
        """Make room for one more piece of every sequence. real: bool `(B, T)`, False for padding.

        Raises:
            OptionError: the cache holds another number of sequences.
        """
        if not self.rows:
            self.rows = [_Row([]) for _ in range(real.shape[0])]
            self._real = torch.ones(real.shape[0], 0, dtype=torch.bool)
        if len(self.rows) != real.shape[0]:
            raise OptionError(f"the cache holds {len(self.rows)} sequences, the input {real.shape[0]}; expected the same number")
        self._real = torch.cat([self._real, real], 1)
        for row, count in zip(self.rows, real.sum(1).tolist()):
            first = row.length // PAGE_SIZE
            for at in range(first, len(row.pages)):  # the page that is written on must be this sequence's own
                if self._users[row.pages[at]] > 1:
                    mine = self._page()
                    assert self.pool is not None
                    self.pool.copy_page(row.pages[at], mine)
                    self._drop([row.pages[at]])
                    row.pages[at] = mine
            while len(row.pages) * PAGE_SIZE < row.length + count:
                row.pages.append(self._page())

    def _page(self) -> int:
        free = next((page for page, users in enumerate(self._users) if not users), None)
        if free is None:
            free = len(self._users)
            spec = self._model.cache_spec(max(4, 2 * free) * PAGE_SIZE, mode=self._mode)
            grown = self._model.new_cache(spec)
            if self.pool is not None:
                for new, old in zip((*grown.k, *grown.v), (*self.pool.k, *self.pool.v)):
                    new[:free].copy_(old)
            self.pool, self._users = grown, self._users + [0] * (spec.num_pages - free)
        self._users[free] = 1
        return free

    def _drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._users[page] -= 1

    def _take(self, indices: list[int]) -> None:
        taken = [_Row(list(self.rows[i].pages), self.rows[i].length) for i in indices]
        for row in taken:
            for page in row.pages:
                self._users[page] += 1
        for row in self.rows:
            self._drop(row.pages)
        self.rows, self._real = taken, self._real[indices]


class Exl2ForCausalLM(PreTrainedModel, GenerationMixin):
    """A loaded model for everything in Transformers that generates: `generate()`, pipelines, streamers, logits processors, assistants.

    A request that the engine can run whole goes to it (`_sample`); otherwise Transformers draws the tokens, one forward step each.

    Args:
        llm: a loaded model, which stays its owner's. cache: mode of the KV cache; None = that of `llm`.
        torch_random: draw with torch's random numbers alone, which gives the tokens of Transformers' own model after the same
        `torch.manual_seed`, and is slower.

    Example:
        >>> import exl2nb as ex, torch
        >>> with ex.demo(progress=None) as llm:
        ...     model = Exl2ForCausalLM(llm)
        ...     ids = torch.tensor([llm.tokenizer.encode("It was")])
        ...     text = llm.tokenizer.decode(model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist())
        ...     text == llm.generate("It was", max_tokens=6, temperature=0).text
        True
    """

    config_class = PreTrainedConfig
    main_input_name = "input_ids"
    _is_stateful = False
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_cache_class = True

    def __init__(self, llm: LLM, *, cache: str | None = None, torch_random: bool = False) -> None:
        config: Any = _config_of(llm)
        super().__init__(config)
        check_flag("torch_random", torch_random)
        self._torch_random = torch_random
        self.llm, self._mode, self._own = llm, cache or llm.engine.spec.mode, False
        self._made_cache: PagedCache | None = None  # of the running `generate`, which its caller never sees
        path = llm.path / "generation_config.json"
        self.generation_config = (
            GenerationConfig.from_pretrained(llm.path) if path.is_file() else GenerationConfig.from_model_config(config)
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], *model_args: Any, **kwargs: Any) -> Exl2ForCausalLM:  # type: ignore[override]
        """Load a directory or hub id.

        Args:
            pretrained_model_name_or_path: as `exl2nb.load` takes it.
            model_args: none.
            kwargs: options of `exl2nb.load`; torch_random, as of the class; device_map ("auto", "cpu", "cuda:0") for its `device`. dtype,
                trust_remote_code and the like are accepted where they ask for what is done anyway.

        Raises:
            OptionError: an option that is not known, or asks for something else. Otherwise as `exl2nb.load`.
        """
        import exl2nb

        if model_args:
            raise OptionError(f"from_pretrained: got {shown(model_args[0])} after the path; expected keywords only")
        for name, allowed in _FIXED_OPTIONS.items():
            if name in kwargs and (value := kwargs.pop(name)) not in allowed:
                raise OptionError(f"from_pretrained: {name} is {shown(value)}; a quantised model is read as it is: leave it out")
        if (place := kwargs.pop("device_map", None)) is not None:
            if not isinstance(place, str):
                raise OptionError(
                    f"from_pretrained: device_map is {shown(place)}; expected 'auto', 'cpu' or 'cuda:N': a model is on one device"
                )
            kwargs["device"] = place
        torch_random = kwargs.pop("torch_random", False)
        check_flag("torch_random", torch_random)  # before the model is read
        options: dict[str, Any] = {"progress": None, **kwargs}
        model = cls(exl2nb.load(pretrained_model_name_or_path, **options), torch_random=torch_random)
        model._own = True
        return model

    def close(self) -> None:
        """Give the memory of a model back that `from_pretrained` loaded."""
        if self._own:
            self.llm.close()

    # ---- what Transformers asks

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return torch.device(self.llm.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        return torch.float32

    def to(self, *args: Any, **kwargs: Any) -> Exl2ForCausalLM:  # type: ignore[override]
        """Refuse to move: a packed model stays where it was loaded. Its own device and any dtype are fine."""
        place = kwargs.get("device", next((arg for arg in args if isinstance(arg, (str, int, torch.device))), None))
        if place is not None:
            wanted = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
            if wanted.type != self.device.type or (wanted.index or 0) != (self.device.index or 0):
                raise OptionError(f"to: the model is on {self.device} and cannot be moved to {wanted}; load it there with device=")
        return self

    @classmethod
    def can_generate(cls) -> bool:
        """Yes."""
        return True

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        """Refuse: the files are those that were loaded.

        Raises:
            OptionError: always.
        """
        raise OptionError(f"save_pretrained: the model's files are in {self.llm.path}; copy them, or convert with exl2nb.convert")

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        given, self._made_cache = model_kwargs.get(CACHE), None
        if generation_config.cache_implementation is not None:
            raise OptionError(
                f"generate: cache_implementation is {generation_config.cache_implementation!r}; the cache is paged: leave it out, choose "
                "its bits with cache= when loading"
            )
        if given is None and generation_config.use_cache is not False:
            model_kwargs[CACHE] = self._made_cache = PagedCache(self.llm, self._mode)

    def load_custom_generate(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a way to generate that lies in a repository is a stranger's code.

        Raises:
            OptionError: always.
        """
        raise OptionError("generate: custom_generate names a repository, whose code would be run; expected a function, or leave it out")

    def _get_deprecated_gen_repo(self, generation_mode: Any, *args: Any, **kwargs: Any) -> None:
        if "/" in GENERATION_MODES_MAPPING.get(generation_mode, ""):
            raise OptionError(
                f"generate: {generation_mode.value} is no part of this Transformers; it has become code in a repository, which is not "
                "run here: use sampling or beams"
            )

    def _sample(
        self, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the request in the engine where that draws from the same distribution; else step by step, as Transformers does.

        Random numbers are the engine's, with a seed of torch's, if its sampler has all processors; otherwise torch's.
        """
        streamer, mine = kwargs.get("streamer"), self._made_cache
        self._made_cache = None
        plain = {"synced_gpus", "streamer", "attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep", CACHE}
        known = (
            mine is not None
            and kwargs.get(CACHE) is mine
            and not args
            and all(name in plain or value is None or value is False for name, value in kwargs.items())
        )
        real = _real_tokens(input_ids, kwargs.get("attention_mask"), 0)
        limit = stopping_criteria.max_length
        ours = (
            known
            and limit is not None
            and not generation_config.return_dict_in_generate
            and not generation_config.is_assistant
            and self._mode == self.llm.engine.spec.mode
            and all(type(one) in (MaxLengthCriteria, EosTokenCriteria) for one in stopping_criteria)
            and int(real.sum(1).min()) > 0
            and int(real.sum(1).max()) + limit - input_ids.shape[1] <= self.llm.context
            and 0 <= int(input_ids.min()) <= int(input_ids.max()) < self.llm.config.vocab_size
        )
        ends = [one.eos_token_id.flatten().tolist() for one in stopping_criteria if isinstance(one, EosTokenCriteria)]
        stop = sorted({i for some in ends for i in some if i < self.llm.config.vocab_size})
        random, length, settings = generation_config.do_sample, input_ids.shape[1], None
        if limit is not None and not (random and self._torch_random) and (bool(real.all()) or not _counts_padding(logits_processor)):
            settings = _settings_of(logits_processor, stop, self.llm.config.vocab_size, length, limit, sample=random)
        if settings is None and (len(input_ids) > 1 or not all(_is_plain(one) for one in logits_processor)):
            ours = False  # Transformers draws a batch at once, and a processor of the caller's may call the model
        if not ours or limit is None:
            return super()._sample(input_ids, logits_processor, stopping_criteria, generation_config, *args, **kwargs)  # pyright: ignore
        options: dict[str, Any] = {"stop": stop, "ignore_eos": True}
        if settings is None:
            options |= {"post_sampling": Drawing(input_ids, logits_processor, sample=random), "speculation": "off", "temperature": 0}
        else:
            options |= settings
        seeds = torch.randint(2**62, (len(input_ids),)).tolist() if settings is not None and random else [None] * len(input_ids)
        rows = [ids[kept].tolist() for ids, kept in zip(input_ids.cpu(), real)]
        made = self._run_whole(rows, seeds, limit - length, options, streamer)
        longest, pad = max(map(len, made)), generation_config._pad_token_tensor
        answers = input_ids.new_full((len(made), longest), 0 if pad is None else int(pad))
        for row, ids in zip(answers, made):
            row[: len(ids)] = input_ids.new_tensor(ids)
        return torch.cat([input_ids, answers], 1)

    def _run_whole(
        self, rows: list[list[int]], seeds: Sequence[int | None], count: int, options: dict[str, Any], streamer: Any
    ) -> list[list[int]]:
        """The new tokens of each row, what ended it included."""
        handles = []
        try:
            for row, seed in zip(rows, seeds):
                handles.append(self.llm.stream(row, max_tokens=count, seed=seed, **options))
            if streamer is not None:  # Transformers has streamers for one sequence only
                for chunk in handles[0]:
                    for token in chunk.tokens:
                        streamer.put(torch.tensor([token.id]))
            done = [handle.result() for handle in handles]
        finally:
            for handle in handles:
                handle.cancel()
        made = [[token.id for token in one.tokens] + ([one.stopped_by] if isinstance(one.stopped_by, int) else []) for one in done]
        if streamer is not None:
            if isinstance(done[0].stopped_by, int):
                streamer.put(torch.tensor([done[0].stopped_by]))
            streamer.end()
        return made

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The tokens that are not in the cache yet."""
        cache = kwargs.get(CACHE)
        past = 0 if cache is None else cache.get_seq_length()
        if next_sequence_length is not None:
            input_ids = input_ids[:, -next_sequence_length:]
        elif past and not (attention_mask is not None and attention_mask.shape[1] == past + input_ids.shape[1]):
            input_ids = input_ids[:, past:]
        passed = ("use_cache", "logits_to_keep", "output_hidden_states", "output_attentions")
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            CACHE: cache,
            **{name: kwargs[name] for name in passed if name in kwargs},
        }

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """One step of every sequence.

        Args:
            input_ids: int64 `(B, T)`.
            attention_mask: `(B, tokens so far + T)`, 0 for padding, which may stand left or right; None = no padding.
            labels: int64 `(B, T)`, -100 = not counted, nor what follows padding: adds the mean cross entropy as `loss`, without a gradient.
            use_cache: False = no cache is returned.
            output_hidden_states: adds f32 `(B, T, H)` after the embedding and after each layer, the last one after the last norm.
            return_dict: False = a tuple.
            logits_to_keep: so many of the last positions, or their indices; 0 = all.
            position_ids, cache_position: ignored: they follow from the mask and the cache.
            output_attentions, inputs_embeds: refused.
            cache, past_key_values: one name or the other, by the version of Transformers: what an earlier step returned.

        Returns:
            Logits f32 `(B, positions, V)`; those of padding are 0.

        Raises:
            OptionError: what is refused, or unknown. ContextOverflow: longer than the model's context. EngineClosed: closed.
        """
        kwargs.pop("cache_position", None)
        cache = past_key_values if cache is None else cache
        for name, value in (("output_attentions", output_attentions), ("inputs_embeds", inputs_embeds)):
            if value is not None and value is not False:
                raise OptionError(
                    f"forward: {name} was given; the engine neither keeps attention weights nor reads embeddings: leave it out"
                )
        if unknown := [name for name, value in kwargs.items() if value is not None]:
            raise OptionError(f"forward: unknown keyword {unknown[0]!r}; expected those of a decoder of Transformers")
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or not input_ids.numel():
            raise OptionError("forward: input_ids is missing or not (sequences, tokens); expected a tensor of token ids")
        if cache is not None and not isinstance(cache, PagedCache):
            raise OptionError(f"forward: the cache is a {type(cache).__name__}; expected the PagedCache that this model returned, or None")
        cache = PagedCache(self.llm, self._mode) if cache is None else cache
        real = _real_tokens(input_ids, attention_mask, cache.get_seq_length())
        T, vocab = input_ids.shape[1], self.llm.config.vocab_size
        kept = torch.arange(T) if isinstance(logits_to_keep, int) and logits_to_keep == 0 else _kept(logits_to_keep, T)
        logits, hidden = self._run(input_ids.cpu(), real, cache, int(kept.min()), bool(output_hidden_states))
        logits = logits[:, (kept - int(kept.min())).to(logits.device)]
        loss = None
        if labels is not None:
            if len(kept) != T:
                raise OptionError("forward: labels need all logits; leave logits_to_keep out")
            wanted = labels[:, 1:].cpu().masked_fill(~real[:, :-1], -100).reshape(-1).to(logits.device)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, vocab), wanted, ignore_index=-100)
        answer: dict[str, Any] = {"loss": loss, "logits": logits, CACHE: None if use_cache is False else cache, "hidden_states": hidden}
        output = CausalLMOutputWithPast(**answer)
        return output if return_dict is not False else output.to_tuple()

    # ---- inside

    def _run(self, ids: Tensor, real: Tensor, cache: PagedCache, first: int, hidden: bool) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Logits `(B, T - first, V)` of the columns from `first` on, and hidden states of all."""
        (B, T), model = ids.shape, self.llm.engine.shared_model
        longest = max((row.length for row in cache.rows), default=0) + int(real.sum(1).max())
        if longest > self.llm.model.context:
            raise ContextOverflow(
                f"sequence of {longest} tokens; the model was loaded for {self.llm.model.context}: shorten it, or load with context="
            )
        if int(ids.min()) < 0 or int(ids.max()) >= self.llm.config.vocab_size:
            raise OptionError(
                f"forward: input_ids holds ids outside 0 to {self.llm.config.vocab_size - 1}; was it encoded for another model?"
            )
        logits = torch.zeros(B, T - first, self.llm.config.vocab_size, device=self.device)
        states: dict[str, Tensor] = {}
        piece = max(1, FORWARD_CHUNK_TOKENS // B)
        for start in range(0, T, piece):
            end = min(start + piece, T)
            here = real[:, start:end]
            cache.append(here)
            spans, places = [], []
            for row in range(B):
                columns = here[row].nonzero()[:, 0] + start
                if not len(columns):
                    continue
                state, wanted = cache.rows[row], "all" if end > first else "none"
                if wanted == "all" and columns[-1] >= first and (len(columns) < 2 or columns[-2] < first):
                    wanted = "last"
                spans.append(SequenceSlice(ids=ids[row, columns].tolist(), start=state.length, pages=state.pages, logit_rows=wanted))
                places.append((row, columns, columns[-1:] if wanted == "last" else columns if wanted == "all" else columns[:0]))
                state.length += len(columns)
            if not spans:
                continue
            assert cache.pool is not None
            on_gpu = hidden and self.device.type != "cpu"
            batch = Batch.build(spans, device=self.llm.model.device if on_gpu else "cpu")
            seen: dict[str, Tensor] = {}

            def observe(name: str, value: Tensor, seen: dict[str, Tensor] = seen) -> None:
                if name == "embedding" or name.endswith(".output"):
                    seen[name] = value.detach().float().clone()

            found = model.forward_by_ops(batch, cache.pool, observe) if hidden else model.forward(batch, cache.pool)
            rows, columns = _indices([(row, rest) for row, _, rest in places])
            inside = columns >= first
            logits[rows[inside].to(self.device), columns[inside].to(self.device) - first] = found[inside.to(found.device)].float()
            if hidden:
                rows, columns = _indices([(row, all_) for row, all_, _ in places])
                for name, value in seen.items():
                    if name not in states:
                        states[name] = torch.zeros(B, T, value.shape[-1], device=self.device)
                    states[name][rows.to(self.device), columns.to(self.device)] = value
        if not hidden:
            return logits, None
        *before, last = states.values()
        return logits, (*before, self.llm.model.final_norm(last))


def _is_plain(processor: Any) -> bool:
    """Whether a logits processor is one of Transformers' own that reads nothing but ids and scores."""
    return type(processor).__module__ == logits_process.__name__ and not hasattr(processor, "model")


# Transformers' processors that our sampler has, in the order in which both apply them: what each is in our settings. Their arguments are a
# processor and the length of the prompt.
_OPTIONS_OF_PROCESSOR: dict[type, Callable[[Any, int], dict[str, Any]]] = {
    logits_process.RepetitionPenaltyLogitsProcessor: lambda one, _: {"repetition_penalty": one.penalty},
    logits_process.MinLengthLogitsProcessor: lambda one, length: {"min_tokens": max(0, one.min_length - length)},
    logits_process.MinNewTokensLengthLogitsProcessor: lambda one, _: {"min_tokens": one.min_new_tokens},
    logits_process.SuppressTokensLogitsProcessor: lambda one, _: {"banned_tokens": one.suppress_tokens.tolist()},
    logits_process.TemperatureLogitsWarper: lambda one, _: {"temperature": one.temperature},
    logits_process.TopKLogitsWarper: lambda one, _: {"top_k": one.top_k},
    logits_process.TopPLogitsWarper: lambda one, _: {"top_p": one.top_p},
    logits_process.MinPLogitsWarper: lambda one, _: {"min_p": one.min_p},
    logits_process.TypicalLogitsWarper: lambda one, _: {"typical_p": one.mass},
}


def _settings_of(processors: Any, stop: list[int], vocab_size: int, length: int, limit: int, *, sample: bool) -> dict[str, Any] | None:
    """The sampling settings that give the distribution of these processors; None where ours cannot.

    Args:
        stop: ids that end the text. length: tokens of the prompt. limit: most tokens of prompt and text.
    """
    places = [list(_OPTIONS_OF_PROCESSOR).index(type(one)) if type(one) in _OPTIONS_OF_PROCESSOR else -1 for one in processors]
    if -1 in places or places != sorted(set(places)):  # not ours, or in an order of the caller's
        return None
    found: dict[str, Any] = {"temperature": 1.0}
    for one in processors:
        ends = getattr(one, "eos_token_id", None)
        if getattr(one, "min_tokens_to_keep", 1) != 1 or getattr(one, "filter_value", -torch.inf) != -torch.inf:
            return None
        if getattr(one, "prompt_ignore_length", None) is not None or (ends is not None and sorted(set(ends.flatten().tolist())) != stop):
            return None
        least = found.get("min_tokens", 0)
        found |= _OPTIONS_OF_PROCESSOR[type(one)](one, length)
        if "min_tokens" in found:
            found["min_tokens"] = min(max(least, found["min_tokens"]), limit - length)
    if not sample:
        found["temperature"] = 0
    try:
        SamplingParams(**found).check_vocabulary(vocab_size)
    except OptionError:  # out of our range, not of Transformers'
        return None
    return found


def _counts_padding(processors: Any) -> bool:
    """Whether a processor counts the tokens before, of which padding is a part for Transformers, and not for us."""
    return any(isinstance(one, logits_process.RepetitionPenaltyLogitsProcessor) for one in processors)


class Drawing:
    """Draws as Transformers does, inside the engine's step: its processors, torch's random numbers."""

    def __init__(self, ids: Tensor, processors: Any, *, sample: bool) -> None:
        self._ids, self._processors, self._sample = ids.cpu(), processors, sample

    def __call__(self, draw: Draw) -> int:
        logits = torch.as_tensor(draw.logits)[None].clone()
        logits[:, draw.columns :] = -torch.inf
        scores = self._processors(self._ids, logits)
        token = torch.multinomial(scores.softmax(-1), num_samples=1) if self._sample else scores.argmax(-1, keepdim=True)
        self._ids = torch.cat([self._ids, token], 1)
        return int(token)


def _indices(parts: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """Rows and columns of tokens that lie side by side in a batch."""
    rows = torch.cat([torch.full_like(columns, row) for row, columns in parts])
    return rows, torch.cat([columns for _, columns in parts])


def _real_tokens(input_ids: Tensor, mask: Tensor | None, past: int) -> Tensor:
    """Bool `(B, T)` on the host: which of the new tokens are no padding."""
    B, T = input_ids.shape
    if mask is None:
        return torch.ones(B, T, dtype=torch.bool)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[0] != B or mask.shape[1] not in (T, past + T):
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise OptionError(f"forward: attention_mask is {found}; expected (sequences, tokens) of 0 and 1, here ({B}, {past + T})")
    return mask[:, -T:].bool().cpu()


def _kept(wanted: int | Tensor, T: int) -> Tensor:
    return torch.arange(max(0, T - wanted), T) if isinstance(wanted, int) else torch.arange(T)[wanted.cpu()]


def _config_of(llm: LLM) -> Any:
    """The model's own config class, without the quantisation that Transformers would set up; a plain one for classes it does not know."""
    try:
        config = AutoConfig.from_pretrained(llm.path, trust_remote_code=False)
    except (ValueError, OSError, ImportError):
        config = PreTrainedConfig(**{name: value for name, value in read_config(llm.path).items() if name != "quantization_config"})
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    config._attn_implementation = "eager"
    return config

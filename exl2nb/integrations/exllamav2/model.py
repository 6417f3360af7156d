"""Config, model, caches, tokenizer: they note what is asked for, and one `exl2nb.load` does it when model and cache are known."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl2nb.core.errors import EngineClosed, OptionError
from exl2nb.core.options import shown
from exl2nb.core.progress import SilentSink, Sink
from exl2nb.io import hub
from exl2nb.model.loader import read_model_config
from exl2nb.model.lora import read_lora
from exl2nb.tokenizer.tokenizer import Tokenizer

MULTIPLE = 256  # tokens of a page
IGNORED = (
    "max_input_len", "max_attention_size", "max_output_len", "max_batch_size", "max_dq_size", "no_flash_attn", "no_xformers", "no_sdpa",
    "no_graphs", "fasttensors",
)  # fmt: skip


class ExLlamaV2Config:
    """What a model is, and how it is to be loaded.

    Args:
        model_dir: directory or hub id; or None, and set `model_dir` and call `prepare`.

    Attributes:
        max_seq_len: tokens of prompt and answer; from config.json, may be set. scale_pos_emb, scale_alpha_value, rotary_embedding_base: of
        RoPE, may be set. vocab_size, hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, bos_token_id,
        eos_token_id: of the model. Those in IGNORED may be set and mean nothing here.

    Raises:
        OptionError: on setting an attribute that is none of these.
    """

    model_dir: Any
    max_seq_len: Any
    scale_pos_emb: float
    scale_alpha_value: float
    rotary_embedding_base: Any
    vocab_size: Any
    bos_token_id: int | None
    eos_token_id: int | None

    def __init__(self, model_dir: str | None = None) -> None:
        self.__dict__.update(
            model_dir=model_dir, max_seq_len=None, scale_pos_emb=1.0, scale_alpha_value=1.0, rotary_embedding_base=None, max_input_len=2048,
            max_attention_size=2048**2, max_output_len=None, max_batch_size=1, max_dq_size=512 * 1024**2, no_flash_attn=False,
            no_xformers=False, no_sdpa=False, no_graphs=False, fasttensors=False, vocab_size=None, hidden_size=None, num_hidden_layers=None,
            num_attention_heads=None, num_key_value_heads=None, head_dim=None, bos_token_id=None, eos_token_id=None, load_in_q4=False,
        )  # fmt: skip
        self._theta: float | None = None
        if model_dir is not None:
            self.prepare()

    def prepare(self, no_tensors: bool = False) -> None:
        """Read config.json and the tokenizer's special tokens."""
        if self.model_dir is None:
            raise OptionError("ExLlamaV2Config: model_dir is not set; set it before prepare()")
        folder = hub.resolve(self.model_dir)
        config, tokenizer = read_model_config(folder), Tokenizer.load(folder)
        self.__dict__.update(
            max_seq_len=config.max_position_embeddings, vocab_size=config.vocab_size, hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim, rotary_embedding_base=config.rope.theta, bos_token_id=tokenizer.bos_id,
            eos_token_id=min(tokenizer.eos_ids, default=None), architecture=config.architecture,
        )  # fmt: skip
        self._theta = config.rope.theta

    def arch_compat_overrides(self, quiet: bool = False, warn_only: bool = False) -> None:
        """Nothing: what an architecture needs is done anyway."""

    def set_low_mem(self) -> None:
        """Nothing: chunks are small already."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__ and name not in ("_theta",):
            known = ", ".join(key for key in self.__dict__ if not key.startswith("_"))
            raise OptionError(f"ExLlamaV2Config: no attribute {name!r}; known: {known}")
        if name == "load_in_q4" and value:
            raise OptionError("ExLlamaV2Config: load_in_q4 quantises while loading; convert the model with `exl2nb convert` instead")
        self.__dict__[name] = value

    def load_options(self) -> dict[str, Any]:
        """For `exl2nb.load`."""
        found: dict[str, Any] = {"context": self.max_seq_len}
        if self.scale_pos_emb != 1.0:
            found["rope_scale"] = self.scale_pos_emb
        if self.scale_alpha_value != 1.0:
            found["rope_alpha"] = self.scale_alpha_value
        if self.rotary_embedding_base != self._theta:
            found["rope_theta"] = self.rotary_embedding_base
        return found


class ExLlamaV2:
    """A model. It is loaded when its cache is known: by `load_autosplit`, or by the first generator.

    Args:
        config: prepared. lazy_load: ignored.
    """

    def __init__(self, config: ExLlamaV2Config, lazy_load: bool = False) -> None:
        self.config, self.loaded = config, False
        self.llm: Any = None
        self._key: tuple[Any, ...] = ()

    def load(
        self,
        gpu_split: Sequence[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: Callable[[int, int], Any] | None = None,
        callback_gen: Callable[[int, int], Any] | None = None,
        progress: bool = False,
    ) -> None:
        """Note that the model is to be loaded; it is, with the first cache.

        Raises:
            OptionError: gpu_split names more than one device.
        """
        if gpu_split is not None and sum(1 for share in gpu_split if share) > 1:
            raise OptionError(f"load: gpu_split is {shown(gpu_split)}; a model is on one device: leave it out")
        for done in (0, 1):
            for call in (callback, callback_gen):
                if call is not None:
                    call(done, 1)

    def load_autosplit(
        self,
        cache: ExLlamaV2CacheBase,
        reserve_vram: int | Sequence[int] | None = None,
        last_id_only: bool = False,
        callback: Callable[[int, int], Any] | None = None,
        callback_gen: Callable[[int, int], Any] | None = None,
        progress: bool = False,
    ) -> None:
        """Load model and cache; reserve_vram and last_id_only are ignored."""

        def told(event: Any) -> None:
            for call in (callback, callback_gen):
                if call is not None and event.stage == "load" and event.total:
                    call(int(event.done), int(event.total))

        self.open(cache, told if callback or callback_gen else None, progress=progress)

    def load_tp(self, *_: Any, **__: Any) -> None:
        """Refuse.

        Raises:
            OptionError: always: a model is on one device.
        """
        raise OptionError("load_tp: tensor parallelism is not offered here; use load_autosplit, and device= of exl2nb.load for another GPU")

    def open(self, cache: ExLlamaV2CacheBase, sink: Sink | None = None, *, progress: bool = False) -> Any:
        """The `LLM` with this cache; a cache of another size or mode loads the model anew."""
        tokens = cache.max_seq_len * cache.batch_size
        key = (cache.mode, tokens, tuple(self.config.load_options().items()))
        if self.llm is None or self._key != key or self.llm.engine.closed:
            self.unload()
            import exl2nb

            options = {"cache": cache.mode, "cache_tokens": tokens, **self.config.load_options()}
            options["context"] = min(options["context"], cache.max_seq_len)
            shown_as: Any = "auto" if progress and sink is None else sink or SilentSink()
            self.llm = exl2nb.load(self.config.model_dir, progress=shown_as, max_sequences=64, vision=False, **options)
            self._key, self.loaded = key, True
        return self.llm

    def unload(self) -> None:
        """Give the memory back."""
        if self.llm is not None:
            self.llm.close()
        self.llm, self.loaded = None, False

    def forward(
        self, input_ids: Tensor, cache: ExLlamaV2CacheBase | None = None, *_: Any, last_id_only: bool = False, **kwargs: Any
    ) -> Tensor:
        """Logits f32 `(B, T, V)` of rows of ids, each from an empty context.

        Raises:
            OptionError: a cache or another argument: going on with a cache is what the generators are for. EngineClosed: not loaded yet.
        """
        if cache is not None or kwargs:
            raise OptionError(
                f"forward: {'cache' if cache is not None else next(iter(kwargs))} is not taken here; use a generator, or "
                "exl2nb.integrations.transformers.Exl2ForCausalLM, whose forward keeps a cache"
            )
        if self.llm is None:
            raise EngineClosed("the model is not loaded; call load_autosplit(cache), or make a generator")
        from exl2nb.eval.logits import logits

        found = logits(self.llm.engine.shared_model, input_ids.cpu())
        return found[:, -1:] if last_id_only else found

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "llm", None) is not None and not ending():  # at the end of the interpreter nothing is left to close it with
            self.llm.close()


class ExLlamaV2CacheBase:
    """How keys and values are to be kept; the memory is taken with the model.

    Args:
        model: its model. max_seq_len: tokens, rounded up to pages; -1 = the config's. batch_size: times so many; sequences share them all.
        copy_from, lazy, num_key_value_heads, fixed_device: ignored.
    """

    mode = "fp16"

    def __init__(
        self, model: ExLlamaV2, batch_size: int = 1, max_seq_len: int = -1, copy_from: Any = None, lazy: bool = False, **_: Any
    ) -> None:
        wanted = model.config.max_seq_len if max_seq_len in (-1, None) else max_seq_len
        self.model, self.batch_size = model, int(batch_size)
        self.max_seq_len = -(-int(wanted) // MULTIPLE) * MULTIPLE

    def footprint(self) -> list[int]:
        """Bytes on each device: of one."""
        return [self.model.open(self).cache_bytes]

    def reset(self) -> None:
        """Forget what is cached."""
        if self.model.llm is not None:
            self.model.llm.cache.clear()


class ExLlamaV2Cache(ExLlamaV2CacheBase):
    """fp16."""


class ExLlamaV2Cache_8bit(ExLlamaV2CacheBase):  # noqa: N801 - exllamav2's name
    """fp8."""

    mode = "fp8"


class ExLlamaV2Cache_Q4(ExLlamaV2CacheBase):  # noqa: N801
    """q4."""

    mode = "q4"


class ExLlamaV2Cache_Q6(ExLlamaV2CacheBase):  # noqa: N801
    """q6."""

    mode = "q6"


class ExLlamaV2Cache_Q8(ExLlamaV2CacheBase):  # noqa: N801
    """q8."""

    mode = "q8"


class ExLlamaV2Cache_TP(ExLlamaV2CacheBase):  # noqa: N801
    """Refused: a model is on one device."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise OptionError("ExLlamaV2Cache_TP: tensor parallelism is not offered here; use ExLlamaV2Cache")


class ExLlamaV2Lora:
    """An adapter in PEFT's format: directory and weight. A generator loads it when it is set (`set_loras`)."""

    _numbers = itertools.count()

    def __init__(self, model: ExLlamaV2, directory: str, lora_scaling: float = 1.0) -> None:
        self.model, self.directory, self.lora_scaling = model, directory, lora_scaling
        self.name = f"exllamav2-{next(self._numbers)}"

    @staticmethod
    def from_directory(model: ExLlamaV2, directory: str, lora_scaling: float = 1.0) -> ExLlamaV2Lora:
        """Check the adapter against the model's config.

        Raises:
            ModelNotFound, FormatError, ConfigError: it cannot be used with this model; says why.
        """
        read_lora(Path(directory), read_model_config(hub.resolve(model.config.model_dir)))
        return ExLlamaV2Lora(model, directory, lora_scaling)

    def unload(self) -> None:
        """Nothing: it is dropped when another is set."""


class _Vocabulary:
    """What exllamav2 has as a tokenizer's `tokenizer`; lm-format-enforcer reads it."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner

    def vocab_size(self) -> int:
        """Tokens it knows."""
        return self._inner.vocab_size

    def id_to_piece(self, idx: int) -> str:
        """The text of a token."""
        return self._inner.piece(idx)


class ExLlamaV2Tokenizer:
    """Text to LongTensors `(1, n)` and back.

    Args:
        config: prepared. lazy_init, force_json, force_spm: ignored.
    """

    def __init__(self, config: ExLlamaV2Config, lazy_init: bool = True, force_json: bool = False, force_spm: bool = False) -> None:
        self.config, self.inner = config, Tokenizer.load(hub.resolve(config.model_dir))
        roles = self.inner.special_tokens
        self.bos_token, self.eos_token = roles.get("bos_token"), roles.get("eos_token")
        self.unk_token, self.pad_token = roles.get("unk_token"), roles.get("pad_token")
        self.bos_token_id, self.eos_token_id = config.bos_token_id, config.eos_token_id
        pad = self.pad_token and self.inner.token_id(self.pad_token)
        self.pad_token_id = pad if isinstance(pad, int) else (self.eos_token_id or 0)
        self.unk_token_id = self.inner.token_id(self.unk_token) if self.unk_token else None
        self.actual_vocab_size = self.inner.vocab_size
        self.tokenizer = _Vocabulary(self.inner)
        self.extended_id_to_piece = {i: self.inner.piece(i) for i in sorted(self.inner.skipped_ids)}
        self._pieces: list[str] | None = None

    def get_vocab_size(self) -> int:
        """Tokens it knows."""
        return self.actual_vocab_size

    def num_tokens(self, text: str) -> int:
        """Tokens of a text, without BOS."""
        return len(self.inner.encode(text, add_special=False))

    def encode(
        self,
        text: str | list[str],
        add_bos: bool = False,
        add_eos: bool = False,
        encode_special_tokens: bool = False,
        return_offsets: bool = False,
        embeddings: Any = None,
    ) -> Any:
        """Ids int64 `(1, n)`; of a list `(B, n)`, padded on the left, and with return_offsets a tensor of minus the padding of each.

        embeddings: pictures, whose aliases stand in the text; special tokens are parsed then.

        Raises:
            OptionError: an alias is missing from a text.
        """
        rows = []
        for one in [text] if isinstance(text, str) else text:
            if embeddings:
                from exl2nb.integrations.exllamav2.vision import encode_with

                ids = encode_with(self.inner, one, embeddings)
            else:
                ids = self.inner.encode(one, add_special=False, parse_special=encode_special_tokens)
            if add_bos and self.bos_token_id is not None:
                ids.insert(0, self.bos_token_id)
            if add_eos and self.eos_token_id is not None:
                ids.append(self.eos_token_id)
            rows.append(ids)
        longest = max(map(len, rows))
        made = torch.tensor([[self.pad_token_id] * (longest - len(row)) + row for row in rows], dtype=torch.int64)
        if isinstance(text, str) or not return_offsets:
            return made
        return made, torch.tensor([[len(row) - longest] for row in rows], dtype=torch.int32)

    def decode(self, ids: Tensor | list[Tensor], decode_special_tokens: bool = False) -> str | list[str]:
        """Text of ids `(n,)`; of `(B, n)` or a list of tensors, a list of texts."""
        if isinstance(ids, list):
            return [str(self.decode(one.view(-1), decode_special_tokens)) for one in ids]
        if ids.dim() > 1:
            return [str(self.decode(row, decode_special_tokens)) for row in ids]
        return self.inner.decode([i for i in ids.tolist() if i != self.pad_token_id], skip_special=not decode_special_tokens)

    def single_id(self, token: str) -> int:
        """The id of a token by its text; exllamav2's fallback, the pad token, where there is none."""
        found = self.inner.token_id(token)
        return self.pad_token_id if found is None else found

    def single_token(self, token_id: int) -> Tensor:
        """The id as int64 `(1, 1)`."""
        return torch.tensor([[token_id]], dtype=torch.int64)

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """The text of every token; special ones have none unless they are asked for."""
        if self._pieces is None:
            self._pieces = [self.inner.piece(i) for i in range(self.actual_vocab_size)]
        if include_special_tokens:
            return list(self._pieces)
        return ["" if i in self.inner.skipped_ids else piece for i, piece in enumerate(self._pieces)]


class Timer:
    """Seconds of a `with` block, in `interval`."""

    def __enter__(self) -> Timer:
        self.start_time = time.time()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_time = time.time()
        self.interval = self.end_time - self.start_time

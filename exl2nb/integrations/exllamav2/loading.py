"""Config, model, caches, tokenizer: they note what is asked for, and one `exl2nb.load` does it when model and cache are known."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from exl2nb.core.errors import EngineClosed, OptionError, TokenizerError
from exl2nb.core.options import shown
from exl2nb.core.progress import SilentSink, Sink
from exl2nb.integrations.exllamav2.absent import Documented, NotOffered, table
from exl2nb.io import hub
from exl2nb.io.hf_config import read_config, read_json
from exl2nb.io.safetensors import SafetensorsFile
from exl2nb.model.config import ModelConfig
from exl2nb.model.loader import read_model_config
from exl2nb.model.lora import ADAPTER_SETTINGS_FILE, ADAPTER_WEIGHTS_FILE, read_lora
from exl2nb.tokenizer.tokenizer import Tokenizer

CACHE_MULTIPLE_TOKENS = 256  # tokens of a page
IGNORED_FIELDS = (
    "max_input_len", "max_attention_size", "max_output_len", "max_batch_size", "max_dq_size", "no_flash_attn", "no_xformers", "no_sdpa",
    "no_graphs", "fasttensors",
)  # fmt: skip


SETTABLE_FIELDS = (
    "model_dir", "max_seq_len", "scale_pos_emb", "scale_alpha_value", "rotary_embedding_base", "bos_token_id", "eos_token_id",
    "pad_token_id", "load_in_q4", "_theta", *IGNORED_FIELDS,
)  # fmt: skip
# Attributes that `prepare` reads from config.json as they stand there, with their defaults.
FROM_FILE: dict[str, Any] = {
    "initializer_range": 0.02, "query_pre_attn_scalar": None, "attention_multiplier": None, "norm_head": None, "sliding_window": 0,
    "sliding_window_pattern": 1, "partial_rotary_factor": 1.0, "pad_token_id": None,
}  # fmt: skip
# Attributes that describe the scaling of RoPE, with the keys of rope_scaling in config.json.
FROM_ROPE = {
    "llama3": {
        "l3_rope_factor": "factor", "l3_rope_low_freq_factor": "low_freq_factor", "l3_rope_high_freq_factor": "high_freq_factor",
        "l3_rope_original_max_position_embeddings": "original_max_position_embeddings",
    },
    "yarn": {"yarn_rope_factor": "factor", "yarn_rope_original_max_position_embeddings": "original_max_position_embeddings"},
    "su": {"scale_long_factor": "long_factor", "scale_short_factor": "short_factor"},
}  # fmt: skip


class ExLlamaV2Config(Documented):
    """What a model is, and how it is to be loaded.

    Args:
        model_dir: directory or hub id; or None, and set `model_dir` and call `prepare`.

    Attributes:
        max_seq_len: tokens of prompt and answer; from config.json, may be set.
        scale_pos_emb, scale_alpha_value, rotary_embedding_base: of RoPE, may be set.
        bos_token_id, eos_token_id, pad_token_id: may be set.
        vocab_size, hidden_size, and the other attributes of exllamav2: of the model, after `prepare`. Setting another value is refused.

    Those in IGNORED_FIELDS may be set and mean nothing here.

    Raises:
        OptionError: on setting an attribute that is none of these, or that only describes the model.
    """

    absent: ClassVar = table(
        tables="arch checkpoint_fused_mlp checkpoint_offset_qzeros",
        layers="pos_id_index rotary_embedding_base_alt scale_pos_emb_alt",
        vision="multimodal_projector_bias vision_feature_layer vision_fullatt_block_indexes vision_head_dim vision_hidden_act"
        " vision_hidden_size vision_image_mean vision_image_std vision_intermediate_size vision_max_pixels vision_max_size"
        " vision_merger_intermediate_size vision_min_pixels vision_mm_tokens_per_image vision_model_type vision_num_attention_heads"
        " vision_num_channels vision_num_key_value_groups vision_num_key_value_heads vision_num_layers vision_patch_size vision_resample"
        " vision_rescale_factor vision_rope_theta vision_size vision_spatial_merge_size vision_spatial_patch_size"
        " vision_temporal_patch_size vision_window_size",
    )

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
            architecture=None, intermediate_size=None, num_key_value_groups=None, num_experts=None, num_experts_per_token=None,
            norm_eps=None, logit_scale=1.0, scale_emb=1.0, scale_depth=1.0, use_qk_norm=False, attn_logit_softcapping=None,
            final_logit_softcapping=None, original_max_seq_len=None, generation_config=None, model_config=None, tokenizer_path=None,
            tensor_files=[], tensor_file_map={}, alt_rope_method=None, mrope_section=None, **FROM_FILE,
            **{name: None for names in FROM_ROPE.values() for name in names},
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
            eos_token_id=min(tokenizer.eos_ids, default=None), **_facts(folder, config),
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
        if name not in SETTABLE_FIELDS and value != self.__dict__[name]:
            raise OptionError(
                f"ExLlamaV2Config: {name} is set to {shown(value)}, but it only describes the model: {shown(self.__dict__[name])}; "
                "change config.json instead"
            )
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


def _facts(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """The attributes that only describe a model."""
    whole = read_config(folder)
    raw = {**whole, **(whole.get("text_config") or {})}
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = str(scaling.get("rope_type", scaling.get("type", "")))
    kind = "su" if kind == "longrope" else kind
    files = sorted(str(path) for path in folder.glob("*.safetensors"))
    ends = read_json(folder / "generation_config.json").get("eos_token_id") if (folder / "generation_config.json").is_file() else None
    return {
        **{name: raw[name] if raw.get(name) is not None else default for name, default in FROM_FILE.items()},
        **{name: scaling.get(key) for method, names in FROM_ROPE.items() if method == kind for name, key in names.items()},
        "architecture": config.architecture,
        "intermediate_size": config.intermediate_size,
        "num_key_value_groups": config.num_heads // config.num_kv_heads,
        "num_experts": None if config.moe is None else config.moe.num_experts,
        "num_experts_per_token": None if config.moe is None else config.moe.top_k,
        "norm_eps": config.norm_eps,
        "logit_scale": config.logit_scale,
        "scale_emb": config.embed_scale,
        "scale_depth": config.residual_scale,
        "use_qk_norm": bool(config.qk_norm),
        "attn_logit_softcapping": config.attention_softcap or None,
        "final_logit_softcapping": config.logit_softcap or None,
        "original_max_seq_len": scaling.get("original_max_position_embeddings") or config.max_position_embeddings,
        "generation_config": {"eos_token_id": ends if isinstance(ends, list) or ends is None else [ends]},
        "model_config": str(folder / "config.json"),
        "tokenizer_path": str(folder / "tokenizer.json"),
        "tensor_files": files,
        "tensor_file_map": _tensor_map(files),
        "alt_rope_method": kind if kind in FROM_ROPE else None,
        "mrope_section": scaling.get("mrope_section"),
    }


def _tensor_map(files: Sequence[str]) -> dict[str, str]:
    """Name of each tensor -> its file."""
    found = {}
    for path in files:
        with SafetensorsFile(Path(path)) as file:
            found |= dict.fromkeys(file.names(), path)
    return found


class ExLlamaV2(Documented):
    """A model. It is loaded when its cache is known: by `load_autosplit`, or by the first generator.

    Args:
        config: prepared.
        lazy_load: ignored.
        archparams: refused, since architectures are read from config.json.
    """

    absent: ClassVar = table(
        layers="archparams modules modules_dict get_modules head_layer_idx last_kv_layer_idx",
        devices="set_device_map cache_map set_cache_map get_cache_devices create_device_context drop_device_context free_device_context"
        " get_device_context device_context",
        parallel="load_tp_gen tp_context",
        forward="forward_chunk",
    )

    def __init__(self, config: ExLlamaV2Config, lazy_load: bool = False, archparams: Any = None) -> None:
        if archparams is not None:
            raise OptionError("ExLlamaV2: archparams is not taken here; the architecture is read from config.json")
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

    def load_gen(self, *arguments: Any, callback_gen: Callable[[int, int], Any] | None = None, **options: Any) -> Iterator[Any]:
        """`load`, as a generator of what callback_gen gives."""
        self.load(*arguments, **options)
        if callback_gen is not None:
            yield from callback_gen(1, 1)

    def load_autosplit_gen(
        self, cache: ExLlamaV2CacheBase, *arguments: Any, callback_gen: Callable[[int, int], Any] | None = None, **options: Any
    ) -> Iterator[Any]:
        """`load_autosplit`, as a generator of what callback_gen gives."""
        if callback_gen is not None:
            yield from callback_gen(0, 1)
        self.load_autosplit(cache, *arguments, **options)
        if callback_gen is not None:
            yield from callback_gen(1, 1)

    def is_quant(self) -> bool:
        """Whether the checkpoint is quantised."""
        return read_model_config(hub.resolve(self.config.model_dir)).quant_method is not None

    def update_loras(self) -> None:
        """Nothing: a generator loads the adapters that are set."""

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
        from exl2nb.eval.rows import logits

        found = logits(self.llm.engine.shared_model, input_ids.cpu())
        return found[:, -1:] if last_id_only else found

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "llm", None) is not None and not ending():  # at the end of the interpreter nothing is left to close it with
            self.llm.close()


class ExLlamaV2CacheBase(Documented):
    """How keys and values are to be kept; the memory is taken with the model.

    Args:
        model: its model. max_seq_len: tokens, rounded up to pages; -1 = the config's. batch_size: times so many; sequences share them all.
        copy_from, lazy, num_key_value_heads, fixed_device: ignored.

    Attributes:
        num_hidden_layers, num_key_value_heads, head_dim: of the model.
        dtype: of values that are read; the packed modes store fewer bits.
    """

    mode = "fp16"
    dtype = torch.float16
    fixed_device = None
    has_scales = False
    absent: ClassVar = table(
        states="key_states value_states key_scales value_scales create_state_tensors update_cache_tensors roll_left get_kv_state"
        " store_kv_state copy_states all_tensors clone shape_basic shape_wk shape_wv shape_s q_block weights_per_element_k"
        " weights_per_element_v",
        devices="touch_device",
    )

    def __init__(
        self, model: ExLlamaV2, batch_size: int = 1, max_seq_len: int = -1, copy_from: Any = None, lazy: bool = False, **_: Any
    ) -> None:
        wanted = model.config.max_seq_len if max_seq_len in (-1, None) else max_seq_len
        self.model, self.batch_size = model, int(batch_size)
        self.max_seq_len = -(-int(wanted) // CACHE_MULTIPLE_TOKENS) * CACHE_MULTIPLE_TOKENS
        self.num_hidden_layers, self.head_dim = model.config.num_hidden_layers, model.config.head_dim
        self.num_key_value_heads = model.config.num_key_value_heads

    @property
    def current_seq_len(self) -> int:
        """Always 0: pages belong to sequences, and every call of a generator gives its whole prompt. May be set to 0."""
        return 0

    @current_seq_len.setter
    def current_seq_len(self, value: int) -> None:
        if value:
            raise NotOffered(
                f"{type(self).__name__}.current_seq_len is set to {shown(value)}; only 0 is taken: a generator reuses equal beginnings "
                "of prompts by itself"
            )

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

    mode, wbits, has_scales = "q4", 4, True


class ExLlamaV2Cache_Q6(ExLlamaV2CacheBase):  # noqa: N801
    """q6."""

    mode, wbits, has_scales = "q6", 6, True


class ExLlamaV2Cache_Q8(ExLlamaV2CacheBase):  # noqa: N801
    """q8."""

    mode, wbits, has_scales = "q8", 8, True


class ExLlamaV2Cache_TP(ExLlamaV2CacheBase):  # noqa: N801
    """Refused: a model is on one device."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise OptionError("ExLlamaV2Cache_TP: tensor parallelism is not offered here; use ExLlamaV2Cache")


class ExLlamaV2Lora(Documented):
    """An adapter in PEFT's format: directory and weight. A generator loads it when it is set (`set_loras`).

    Args:
        model: its model.
        lora_config_path: adapter_config.json.
        lora_path: adapter_model.safetensors in the same directory.
        lora_scaling: weight.

    Attributes:
        lora_r, lora_alpha, target_modules: as in adapter_config.json.
    """

    absent: ClassVar = table(tensors="tensors embed_tokens lm_head bias_ignored")
    _numbers = itertools.count()

    def __init__(self, model: ExLlamaV2, lora_config_path: str, lora_path: str, lora_scaling: float = 1.0) -> None:
        settings, weights = Path(lora_config_path), Path(lora_path)
        if settings.parent != weights.parent or (settings.name, weights.name) != (ADAPTER_SETTINGS_FILE, ADAPTER_WEIGHTS_FILE):
            raise OptionError(
                f"ExLlamaV2Lora: found {settings} and {weights}; "
                f"expected {ADAPTER_SETTINGS_FILE} and {ADAPTER_WEIGHTS_FILE} of one directory"
            )
        self.model, self.config, self.lora_scaling = model, model.config, lora_scaling
        self.directory, self.lora_config_path, self.lora_path = str(settings.parent), str(settings), str(weights)
        self.name = f"exllamav2-{next(self._numbers)}"
        raw = read_json(settings)
        self.lora_r, self.lora_alpha, self.target_modules = raw.get("r"), raw.get("lora_alpha"), raw.get("target_modules")

    @staticmethod
    def from_directory(model: ExLlamaV2, directory: str, lora_scaling: float = 1.0) -> ExLlamaV2Lora:
        """Check the adapter against the model's config.

        Raises:
            ModelNotFound, FormatError, ConfigError: it cannot be used with this model; says why.
        """
        read_lora(Path(directory), read_model_config(hub.resolve(model.config.model_dir)))
        return ExLlamaV2Lora(model, str(Path(directory, ADAPTER_SETTINGS_FILE)), str(Path(directory, ADAPTER_WEIGHTS_FILE)), lora_scaling)

    def unload(self) -> None:
        """Nothing: it is dropped when another is set."""


class _TokenizerModel:
    """What exllamav2 has as a tokenizer's `tokenizer` and `tokenizer_model`; lm-format-enforcer reads it."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner

    def vocab_size(self) -> int:
        """Tokens it knows."""
        return self._inner.vocab_size

    def id_to_piece(self, idx: int) -> str:
        """The text of a token."""
        return self._inner.piece(idx)

    def piece_to_id(self, text: str) -> int | None:
        """The id of a token by its text, None where there is none."""
        return self._inner.token_id(text)

    def enumerate_tokens(self) -> Iterator[tuple[int, str]]:
        """Every id with its text."""
        return ((i, self._inner.piece(i)) for i in range(self._inner.vocab_size))

    def encode(self, text: str | Sequence[str]) -> list[int]:
        """Ids of a text, without BOS; texts of special tokens are plain text."""
        return self._inner.encode(text if isinstance(text, str) else "".join(text), add_special=False, parse_special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens have none."""
        return self._inner.decode(list(ids), skip_special=True)

    def unk_token(self) -> str | None:
        """Text of the token for what is not known."""
        return self._inner.special_tokens.get("unk_token")

    def unk_id(self) -> int | None:
        """Id of the token for what is not known."""
        return None if (text := self.unk_token()) is None else self._inner.token_id(text)

    def pad_token(self) -> None:
        """None, as in exllamav2: the tokenizer of the config has it."""

    bos_token = eos_token = pad_id = bos_id = eos_id = pad_token

    def piece_to_ord(self, piece: str) -> int:
        """The byte that a piece stands for: of `<0x0A>`, and of one character up to 255; else -1."""
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return int(piece[3:5], 16)
            except ValueError:
                return -1
        return ord(piece) if len(piece) == 1 and ord(piece) < 256 else -1

    def id_to_ord(self, idx: int) -> int:
        """The same of a token's piece."""
        return self.piece_to_ord(self.id_to_piece(idx))

    def space_char(self) -> str:
        """A space: pieces are plain text here."""
        return " "

    def newline_char(self) -> str:
        """A line break: pieces are plain text here."""
        return "\n"

    def clean_special_chars(self, p: str) -> str:
        """The piece itself: it is plain text already."""
        return p


class ExLlamaV2Tokenizer(Documented):
    """Text to LongTensors `(1, n)` and back.

    Args:
        config: prepared.
        lazy_init, force_json: ignored.
        force_spm: refused, as by exllamav2.

    Attributes:
        newline_token_id, space_token_id: the last id of a line break and of a space; None where the tokenizer has none.
        extended_piece_to_id, extended_id_to_piece: special tokens.
        unspecial_piece_to_id, unspecial_id_to_piece: empty: added tokens decode to their texts here.
        tokenizer_config_dict: content of tokenizer_config.json, or None.
    """

    class Trie:
        """Characters -> Trie in `children`; ids of the pieces that end here in `leaf`."""

        def __init__(self, children: dict[str, Any] | None = None, leaf: list[int] | None = None) -> None:
            self.children: dict[str, ExLlamaV2Tokenizer.Trie] = {} if children is None else children
            self.leaf: list[int] = [] if leaf is None else leaf

    def __init__(self, config: ExLlamaV2Config, lazy_init: bool = True, force_json: bool = False, force_spm: bool = False) -> None:
        if force_spm:
            raise OptionError("ExLlamaV2Tokenizer: force_spm is not taken, as by exllamav2; leave it out")
        folder = hub.resolve(config.model_dir)
        self.config, self.inner = config, Tokenizer.load(folder)
        roles = self.inner.special_tokens
        self.bos_token, self.eos_token = roles.get("bos_token"), roles.get("eos_token")
        self.unk_token, self.pad_token = roles.get("unk_token"), roles.get("pad_token")
        self.bos_token_id, self.eos_token_id = config.bos_token_id, config.eos_token_id
        pad = self.pad_token and self.inner.token_id(self.pad_token)
        self.pad_token_id = pad if isinstance(pad, int) else (self.eos_token_id or 0)
        self.unk_token_id = self.inner.token_id(self.unk_token) if self.unk_token else None
        self.actual_vocab_size = self.inner.vocab_size
        self.tokenizer = self.tokenizer_model = _TokenizerModel(self.inner)
        self.extended_id_to_piece = {i: self.inner.piece(i) for i in sorted(self.inner.skipped_ids)}
        self.extended_piece_to_id = {piece: i for i, piece in self.extended_id_to_piece.items()}
        self.unspecial_piece_to_id: dict[str, int] = {}
        self.unspecial_id_to_piece: dict[int, str] = {}
        self.special_delimiters = self.unspecial_delimiters = None
        self.newline_token, self.space_token = "\n", " "
        self.newline_token_id, self.space_token_id = (self._last_id(text) for text in (self.newline_token, self.space_token))
        settings = folder / "tokenizer_config.json"
        self.tokenizer_config_dict = json.loads(settings.read_text("utf-8")) if settings.is_file() else None
        self.tokenized_str_cache: dict[str, Tensor] = {}
        self.max_cached_strings = 100
        self.id_to_ord: list[int] | None = None
        self.id_to_piece: list[str] | None = None
        self.id_to_piece_with_special: list[str] | None = None
        self.piece_to_id: dict[str, int] | None = None
        self.prefix_to_ids: dict[str, list[int]] | None = None
        self.prefix_id_to_ids: dict[int, list[int]] | None = None
        self.char_trie: ExLlamaV2Tokenizer.Trie | None = None
        self.char_trie_ci: ExLlamaV2Tokenizer.Trie | None = None
        self._pieces: list[str] | None = None

    def _last_id(self, text: str) -> int | None:
        try:
            return self.tokenizer.encode(text)[-1]
        except (TokenizerError, IndexError):
            return None

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
        """Ids int64 `(1, n)`; of a list `(B, n)`, padded on the left, and with return_offsets minus the padding of each, int32 `(B,)`.

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
        return (made, torch.tensor([len(row) - longest for row in rows], dtype=torch.int32)) if return_offsets else made

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
            self.id_to_piece_with_special = list(self._pieces)
            return self.id_to_piece_with_special
        self.id_to_piece = ["" if i in self.inner.skipped_ids else piece for i, piece in enumerate(self._pieces)]
        return self.id_to_piece

    def get_id_to_ord_list(self) -> list[int]:
        """The byte of every token that stands for one, -1 for the others."""
        if self.id_to_ord is None:
            self.id_to_ord = [self.tokenizer.piece_to_ord(piece) for piece in self.get_id_to_piece_list(True)]
        return self.id_to_ord

    def get_piece_to_id_dict(self) -> dict[str, int]:
        """The id of each text; of tokens with one text the last."""
        if self.piece_to_id is None:
            self.piece_to_id = {piece: i for i, piece in enumerate(self.get_id_to_piece_list())}
        return self.piece_to_id

    def get_prefix_to_ids_dict(self) -> dict[str, list[int]]:
        """The text of each token -> ids of all tokens that begin with it, itself among them."""
        if self.prefix_to_ids is None:
            ids = {piece: i for piece, i in self.get_piece_to_id_dict().items() if piece}
            found: dict[str, list[int]] = {piece: [] for piece in ids}
            for piece, i in ids.items():
                for end in range(1, len(piece) + 1):
                    if piece[:end] in found:
                        found[piece[:end]].append(i)
            self.prefix_to_ids = {piece: sorted(those) for piece, those in found.items()}
        return self.prefix_to_ids

    def get_prefix_id_to_ids_dict(self) -> dict[int, list[int]]:
        """The same by id, for every id of the vocabulary."""
        if self.prefix_id_to_ids is None:
            ids, found = self.get_piece_to_id_dict(), self.get_prefix_to_ids_dict()
            self.prefix_id_to_ids = {i: [i] for i in range(self.config.vocab_size)} | {ids[piece]: those for piece, those in found.items()}
        return self.prefix_id_to_ids

    def get_char_trie(self) -> ExLlamaV2Tokenizer.Trie:
        """All pieces, character by character."""
        if self.char_trie is None:
            self.char_trie = self._trie(self.get_id_to_piece_list())
        return self.char_trie

    def get_char_trie_ci(self) -> ExLlamaV2Tokenizer.Trie:
        """The same in lower case."""
        if self.char_trie_ci is None:
            self.char_trie_ci = self._trie([piece.lower() for piece in self.get_id_to_piece_list()])
        return self.char_trie_ci

    def _trie(self, pieces: Sequence[str]) -> ExLlamaV2Tokenizer.Trie:
        root = self.Trie()
        for i, piece in enumerate(pieces):
            here = root
            for character in piece:
                here = here.children.setdefault(character, self.Trie())
            if piece:
                here.leaf.append(i)
        return root

    def encode_special(self, text: str) -> list[int]:
        """Ids of a text, in which texts of special tokens are these tokens."""
        return self.inner.encode(text, add_special=False)

    def encode_unspecial(self, text: str) -> list[int]:
        """Ids of a text, in which texts of special tokens are plain text."""
        return self.tokenizer.encode(text)

    def encode_special_or_unspecial(self, text: str, special: bool, embeddings: Any = None) -> list[int]:
        """One of the two."""
        return self.encode(text, encode_special_tokens=special, embeddings=embeddings)[0].tolist()

    def decode_unspecial(self, seq: Sequence[int]) -> str:
        """Text of ids; special tokens have none."""
        return self.tokenizer.decode(seq)

    def decode_(self, seq: Sequence[int], decode_special_tokens: bool) -> str:
        """Text of ids."""
        return str(self.decode(torch.tensor(list(seq), dtype=torch.int64), decode_special_tokens))

    def padding_mask(self, ids: Tensor) -> Tensor:
        """f16 of the shape of ids: -inf at padding, 0 elsewhere."""
        return torch.zeros(ids.shape, dtype=torch.float16).masked_fill(ids.cpu() == self.pad_token_id, -torch.inf).to(ids.device)

    def cached_encode_str(self, text: str) -> Tensor:
        """`encode`, remembered for the last texts."""
        if text not in self.tokenized_str_cache:
            while len(self.tokenized_str_cache) >= self.max_cached_strings:
                del self.tokenized_str_cache[next(iter(self.tokenized_str_cache))]
            self.tokenized_str_cache[text] = self.encode(text)
        return self.tokenized_str_cache[text]


class Timer:
    """Seconds of a `with` block, in `interval`."""

    def __enter__(self) -> Timer:
        self.start_time = time.time()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_time = time.time()
        self.interval = self.end_time - self.start_time

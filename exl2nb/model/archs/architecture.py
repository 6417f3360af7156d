"""The architecture table: what an entry declares, and how a config.json becomes a ModelConfig through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from exl2nb.core.errors import ConfigError, UnknownArchitecture
from exl2nb.core.options import Registry
from exl2nb.model.config import ACTIVATION_NAMES, SIZE_LIMITS, Files, ModelConfig, Names
from exl2nb.model.config_fields import (
    REQUIRED_FIELD,
    ROPE_KEYS,
    ROPE_OBJECTS,
    Fields,
    Keys,
    check_keys,
    check_rope_keys,
    known_words,
    rope_settings,
)
from exl2nb.model.rope import MAX_CONTEXT, RopeConfig
from exl2nb.quant.gptq_format import GptqSpec

Flag = bool | str
Windows = Callable[[Fields, int], tuple[int, ...]]
Features = Callable[[Fields, Mapping[str, int]], Mapping[str, Any]]


def no_window(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Every layer sees everything before it."""
    return (0,) * num_layers


def sliding_windows(fields: Fields, slides: tuple[bool, ...]) -> tuple[int, ...]:
    """`sliding_window` on the layers that slide, 0 (all positions) on the others."""
    window = fields.integer("sliding_window", low=1, high=MAX_CONTEXT, default=0)
    return tuple(window if slide else 0 for slide in slides)


def pattern_slides(fields: Fields, num_layers: int, default: int) -> tuple[bool, ...]:
    """Which layers slide: `layer_types`, or all but every `sliding_window_pattern`-th."""
    every = fields.integer("sliding_window_pattern", low=1, high=1 << 20, default=default)
    private = fields.raw.get("_sliding_window_pattern")
    if fields.raw.get("layer_types") is None and private not in (None, every):
        # Transformers writes this key beside layer_types and does not read it
        raise fields.refuse("_sliding_window_pattern", private, f"{every}, or layer_types beside it")
    return layer_kinds(fields, num_layers, lambda i: (i + 1) % every != 0)


def layer_kinds(fields: Fields, num_layers: int, slides: Callable[[int], bool]) -> tuple[bool, ...]:
    """Which layers slide: what `layer_types` says, and `slides(layer)` where it is absent."""
    kinds, known = fields.raw.get("layer_types"), ("full_attention", "sliding_attention")
    if kinds is None:
        return tuple(slides(i) for i in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise fields.refuse("layer_types", kinds, f"a list of {num_layers} names out of {', '.join(known)}")
    return tuple(kind == known[1] for kind in kinds)


def no_features(fields: Fields, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """Nothing beyond what the table says."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture.

    model_type: as in config.json. qkv_bias, o_bias, mlp_bias: True, False, or the config key that says so
    (absent = false). windows: `(fields, num_layers)` -> window of each layer. defaults: values Transformers assumes for absent keys; sizes
    that are not listed must be present. names: module keys; files: how checkpoints differ from them. fixed: fields of ModelConfig that are
    the same for every model of this kind; read: `(fields, sizes)` -> those that the config decides. keys: our name of a config key -> the
    one this architecture uses, dots where it is nested. eps_key, activation_key: of the norms, of the MLP. text_key: the decoder's config
    is nested under it, or, with `flat`, at the top. partial_rotary: `partial_rotary_factor` may be below 1. inner_multiple:
    intermediate_size over hidden_size where the config has none.

    The rest says what is known about the keys of config.json, see `exl2nb.model.config_fields`. Keys that the other fields name are added
    to it.
    reads: keys that `windows` and `read` use, as words. neutral: keys that are not implemented, with their harmless values. ignored: keys
    that never change a result, as words. nested: keys that hold an object. rope_keys: keys of a set of RoPE parameters. outer: keys beside
    `text_key` that the vision encoder reads or that do not matter, as words. inner_types: `model_type` values of the nested decoder.
    """

    model_type: str
    qkv_bias: Flag = False
    o_bias: Flag = False
    mlp_bias: Flag = False
    windows: Windows = no_window
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Names = field(default_factory=Names)
    files: Files = field(default_factory=Files)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    read: Features = no_features
    keys: Mapping[str, str] = field(default_factory=dict)
    eps_key: str = "rms_norm_eps"
    eps: float = 1e-6
    activation_key: str = "hidden_act"
    text_key: str = ""
    flat: bool = False
    partial_rotary: bool = False
    inner_multiple: int = 0
    reads: str = ""
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: str = ""
    nested: Mapping[str, Keys] = field(default_factory=dict)
    rope_keys: Keys = ROPE_KEYS
    outer: str = ""
    inner_types: tuple[str, ...] = ()

    def known_keys(self) -> Keys:
        """What is known about the keys of the decoder's object in config.json."""
        flags = [flag for flag in (self.qkv_bias, self.o_bias, self.mlp_bias) if isinstance(flag, str)]
        rope = () if self.fixed.get("learned_positions") else ROPE_CONFIG_KEYS
        theirs = [path for path in self.keys.values() if "." not in path]
        used = {
            *(key for key, _, _ in SIZE_LIMITS.values()),
            *self.keys,
            *theirs,
            *flags,
            *rope,
            *SHARED_KEYS,
            self.eps_key,
            self.activation_key,
        }
        return Keys(
            used=frozenset(used) | known_words(self.reads),
            neutral={**NEUTRAL_KEYS, **self.neutral},
            ignored=known_words(self.ignored),
            nested=self.nested,
        )

    def outer_keys(self) -> Keys:
        """What is known about the keys beside the decoder's object, for a class that nests its decoder."""
        return Keys(used=known_words(self.outer) | {self.text_key, "vision_config", *SHARED_KEYS}, neutral=NEUTRAL_KEYS)

    def check(self, name: str, raw: Mapping[str, Any], where: str) -> None:
        """Refuse a config.json with a key that changes the result and is not implemented.

        Args:
            name: The class name, for messages.
            raw: The parsed file.
            where: The file, for messages.

        Raises:
            ConfigError: The message names the key, its value, the supported values, and what to do.
            UnknownArchitecture: The nested decoder is of a type that this class does not support.
        """
        outer, decoder = Fields(raw, where), self.known_keys()
        nested = outer.child(self.text_key) if self.text_key else None
        inner = nested or outer
        if nested is not None:
            self._check_inner_type(name, nested)
            repeated = self._repeated(decoder, raw, nested.raw)
            check_keys(outer, replace(self.outer_keys(), used=self.outer_keys().used | repeated), name)
        elif self.text_key:
            decoder = replace(decoder, used=decoder.used | self.outer_keys().used)
        check_keys(inner, decoder, name)
        if not self.fixed.get("learned_positions"):
            check_rope_keys(inner, self.rope_keys, name)

    def _repeated(self, decoder: Keys, raw: Mapping[str, Any], inner: Mapping[str, Any]) -> frozenset[str]:
        """Keys of the decoder that stand outside of its object as well and say the same there, which some files have."""
        effective = {self.eps_key: self.eps, self.activation_key: "silu", **self.defaults, **inner}
        same = {key for key in decoder.used if key in raw and key in effective and raw[key] == effective[key]}
        return frozenset(same | set(ROPE_OBJECTS if rope_settings(raw) == rope_settings(inner) else ()))

    def _check_inner_type(self, name: str, inner: Fields) -> None:
        kind = inner.raw.get("model_type")
        if kind is not None and self.inner_types and kind not in self.inner_types:
            raise UnknownArchitecture(
                f"{inner.where}: model_type is {str(kind)[:40]!r}; expected {' or '.join(self.inner_types)}, the decoders that exl2nb "
                f"supports in {name}. Run this model with Transformers"
            )

    def config(self, name: str, raw: Mapping[str, Any], where: str) -> ModelConfig:
        """Read and check `raw` as this architecture; `name` is the class name it was found under."""
        self.check(name, raw, where)
        fields = self._fields(raw, where)
        sizes = {attribute: _read_size(fields, attribute) for attribute in SIZE_LIMITS if attribute not in ("num_kv_heads", "head_dim")}
        sizes["num_kv_heads"] = _read_size(fields, "num_kv_heads", default=sizes["num_heads"])
        sizes["head_dim"] = _read_size(fields, "head_dim", default=None) or _head_dim(fields, sizes)
        quantization = fields.child("quantization_config")
        method = quantization.text("quant_method", default=None) if quantization else None
        features = dict(self.read(fields, sizes))
        max_positions = sizes["max_position_embeddings"]
        if "rope" not in features:
            features["rope"] = RopeConfig.read(fields, head_dim=sizes["head_dim"], max_positions=max_positions, partial=self.partial_rotary)
        values = {
            "architecture": name,
            **sizes,
            "norm_eps": fields.number(self.eps_key, low=0.0, high=1.0, default=self.eps),
            "windows": self.windows(fields, sizes["num_layers"]),
            "attention_scale": sizes["head_dim"] ** -0.5,
            "qkv_bias": _read_flag(fields, self.qkv_bias),
            "o_bias": _read_flag(fields, self.o_bias),
            "mlp_bias": _read_flag(fields, self.mlp_bias),
            "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
            "activation": _activation(fields, self.activation_key),
            "quant_method": method,
            "gptq": GptqSpec.read(quantization.raw, quantization.where) if quantization and method == "gptq" else None,
            "names": self.names,
            "files": self.files,
            **self.fixed,
            **features,
        }
        try:
            config = ModelConfig(**values)
        except ConfigError as error:  # sizes that do not fit each other: the config knows no file
            raise ConfigError(f"{where}: {error}") from None
        _check_layer_types(fields, config)
        return config

    def _fields(self, raw: Mapping[str, Any], where: str) -> Fields:
        """The decoder's keys under our names, defaults filled in."""
        outer = Fields(raw, where)
        inner = (outer.child(self.text_key) if self.text_key else outer) or (outer if self.flat else None)
        if inner is None:
            raise ConfigError(f"{where}: key {self.text_key!r} is missing; this architecture needs it")
        shared = {key: raw[key] for key in ("quantization_config", "tie_word_embeddings") if raw.get(key) is not None}
        own = {**inner.raw, **shared}
        found = {**self.defaults, **own}
        for ours, theirs in self.keys.items():
            value = _value_at(found, theirs)
            if value is not None and ours not in own:
                found[ours] = value
        if self.inner_multiple and found.get("intermediate_size") is None and type(found.get("hidden_size")) is int:
            found["intermediate_size"] = self.inner_multiple * found["hidden_size"]
        return Fields(found, inner.where)


# keys that an architecture reads itself, and those of the rotation
SHARED_KEYS = ("tie_word_embeddings", "quantization_config")
ROPE_CONFIG_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "layer_types",
)
# keys of Transformers' base class that would make another model of any decoder
NEUTRAL_KEYS: Mapping[str, tuple[Any, ...]] = {"is_encoder_decoder": (False,), "add_cross_attention": (False,)}


@dataclass(frozen=True, kw_only=True)
class Wrapped(Architecture):
    """An architecture with several possible decoders, chosen by the `model_type` in `text_config`.

    Attributes:
        decoders: The architecture of each `model_type`.
        default_decoder: The `model_type` that Transformers assumes if the key is absent.
    """

    decoders: Mapping[str, Architecture] = field(default_factory=dict)
    default_decoder: str = ""

    def config(self, name: str, raw: Mapping[str, Any], where: str) -> ModelConfig:
        """Read and check `raw` as the decoder that it names.

        Raises:
            ConfigError: There is no `text_config`.
            UnknownArchitecture: The decoder is of a type that this class does not support.
        """
        text = raw.get("text_config")
        if not isinstance(text, Mapping) or not text:
            raise ConfigError(f"{where}: key 'text_config' is missing; this architecture needs it")
        kind = text.get("model_type") or self.default_decoder
        if not isinstance(kind, str) or kind not in self.decoders:
            raise UnknownArchitecture(
                f"{where}: text_config.model_type is {str(kind)[:40]!r}; expected one of {', '.join(sorted(self.decoders))}, the decoders "
                f"that exl2nb supports in {name}. Run this model with Transformers"
            )
        return self.decoders[kind].config(name, raw, where)


ARCHS: Registry[Architecture] = Registry("architecture", UnknownArchitecture)


def _check_layer_types(fields: Fields, config: ModelConfig) -> None:
    """Refuse `layer_types` that disagree with the windows of the layers, which also catches architectures that do not read the key."""
    kinds = fields.raw.get("layer_types")
    expected = ["sliding_attention" if window else "full_attention" for window in config.windows]
    if kinds is not None and kinds != expected:
        raise fields.refuse("layer_types", kinds, f"{', '.join(expected[:8])}{' ...' if len(expected) > 8 else ''}, as the windows say")


def _value_at(found: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None where a part of it is absent."""
    value: Any = found
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _read_size(fields: Fields, attribute: str, default: Any = REQUIRED_FIELD) -> int:
    key, low, high = SIZE_LIMITS[attribute]
    return fields.integer(key, low=low, high=high, default=default)


def as_inner_decoder(text: Architecture, *more: tuple[str, str], **changes: Any) -> Architecture:
    """`text` as the decoder of a multimodal class, whose vision tower and projector are left alone.

    Names are those of ExLlamaV2's files; checkpoints put `language_model` after `model`, and the head at the top.

    Args:
        text: the decoder's architecture. more: further renames. changes: fields of the result that differ from the text model's.
    """
    names = replace(
        text.names,
        embed="language_model.model.embed_tokens",
        layer="language_model.model.layers.{}",
        norm="language_model.model.norm",
        head="language_model.lm_head",
    )
    renames = (
        ("model.language_model.", "language_model.model."),
        ("language_model.lm_head.", "lm_head."),
        ("lm_head.", "language_model.lm_head."),
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        *more,
    )
    files = Files(renames=renames, passed=("vision_tower.*", "multi_modal_projector.*"))
    return replace(text, text_key="text_config", names=names, files=files, **changes)


def _head_dim(fields: Fields, sizes: Mapping[str, int]) -> int:
    hidden, heads = sizes["hidden_size"], sizes["num_heads"]
    if hidden % heads:
        raise fields.refuse("hidden_size", hidden, f"a multiple of num_attention_heads {heads}, or an explicit head_dim")
    return hidden // heads


def _activation(fields: Fields, key: str) -> str:
    name = fields.text(key, default="silu")
    if name not in ACTIVATION_NAMES:
        raise fields.refuse(key, name, f"one of {', '.join(sorted(ACTIVATION_NAMES))}")
    return ACTIVATION_NAMES[name]


def _read_flag(fields: Fields, flag: Flag) -> bool:
    return fields.flag(flag, default=False) if isinstance(flag, str) else flag


def parse_config(raw: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """Turn the content of a config.json into a checked ModelConfig.

    Args:
        raw: the parsed file. `architectures` must hold exactly one name.
        where: the file, for messages.

    Raises:
        ConfigError: a value that cannot be used; names key, value and what was expected.
        UnknownArchitecture: the name has no entry; the message lists the known ones.
    """
    fields = Fields(raw, where)
    names = fields.raw.get("architectures")
    if not isinstance(names, (list, tuple)) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.refuse("architectures", names, 'a list of exactly one name, such as ["LlamaForCausalLM"]')
    try:
        architecture = ARCHS[names[0]]
    except UnknownArchitecture as error:
        own = "; the code named in its auto_map is never run" if raw.get("auto_map") else ""
        other = (
            "; ex.convert makes EXL2 of any model that Transformers knows, which its AutoModelForCausalLM reads after "
            "`import exl2nb.integrations.transformers`"
        )
        raise UnknownArchitecture(f"{where}: {error}{own}{other}") from None
    return architecture.config(names[0], raw, where)

"""The architecture table: what an entry declares, and how a config.json becomes a ModelConfig through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from exl2nb.core.errors import ConfigError, UnknownArchitecture
from exl2nb.core.registry import Registry
from exl2nb.model.config import ACTIVATIONS, LIMITS, ModelConfig
from exl2nb.model.fields import REQUIRED, Fields
from exl2nb.model.names import Names
from exl2nb.model.rope import RopeConfig

Flag = bool | str
Windows = Callable[[Fields, int], tuple[int, ...]]


def no_window(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Every layer sees everything before it."""
    return (0,) * num_layers


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture.

    model_type: as in config.json, and the name of the file. qkv_bias, o_bias, mlp_bias: True, False, or the config key that says so
    (absent = false). windows: `(fields, num_layers)` -> window of each layer. defaults: values Transformers assumes for absent keys; sizes
    that are not listed must be present. names: module keys.
    """

    model_type: str
    qkv_bias: Flag = False
    o_bias: Flag = False
    mlp_bias: Flag = False
    windows: Windows = no_window
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Names = field(default_factory=Names)

    def config(self, name: str, raw: Mapping[str, Any], where: str) -> ModelConfig:
        """Read and check `raw` as this architecture; `name` is the class name it was found under."""
        fields = Fields({**self.defaults, **raw}, where)
        sizes = {attribute: _size(fields, attribute) for attribute in LIMITS if attribute not in ("num_kv_heads", "head_dim")}
        sizes["num_kv_heads"] = _size(fields, "num_kv_heads", default=sizes["num_heads"])
        sizes["head_dim"] = _size(fields, "head_dim", default=None) or _head_dim(fields, sizes)
        quantization = fields.child("quantization_config")
        values = {
            "architecture": name,
            **sizes,
            "norm_eps": fields.number("rms_norm_eps", low=0.0, high=1.0, default=1e-6),
            "rope": RopeConfig.read(fields, head_dim=sizes["head_dim"], max_positions=sizes["max_position_embeddings"]),
            "windows": self.windows(fields, sizes["num_layers"]),
            "attention_scale": sizes["head_dim"] ** -0.5,
            "qkv_bias": _flag(fields, self.qkv_bias),
            "o_bias": _flag(fields, self.o_bias),
            "mlp_bias": _flag(fields, self.mlp_bias),
            "tie_word_embeddings": fields.flag("tie_word_embeddings", default=False),
            "activation": _activation(fields),
            "quant_method": quantization.text("quant_method") if quantization else None,
            "names": self.names,
        }
        try:
            return ModelConfig(**values)
        except ConfigError as error:  # sizes that do not fit each other: the config knows no file
            raise ConfigError(f"{where}: {error}") from None


ARCHS: Registry[Architecture] = Registry("architecture", UnknownArchitecture)


def _size(fields: Fields, attribute: str, default: Any = REQUIRED) -> int:
    key, low, high = LIMITS[attribute]
    return fields.integer(key, low=low, high=high, default=default)


def _head_dim(fields: Fields, sizes: Mapping[str, int]) -> int:
    hidden, heads = sizes["hidden_size"], sizes["num_heads"]
    if hidden % heads:
        raise fields.refuse("hidden_size", hidden, f"a multiple of num_attention_heads {heads}, or an explicit head_dim")
    return hidden // heads


def _activation(fields: Fields) -> str:
    name = fields.text("hidden_act", default="silu")
    if name not in ACTIVATIONS:
        raise fields.refuse("hidden_act", name, f"one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def _flag(fields: Fields, flag: Flag) -> bool:
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
        raise UnknownArchitecture(f"{where}: {error}") from None
    return architecture.config(names[0], raw, where)

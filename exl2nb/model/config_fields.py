"""Strict reading of a config.json: a key of the wrong type, out of range, missing or not implemented is a ConfigError that names it.

A config.json carries many keys that this library does not read. Most of them are harmless: token ids, dropout rates, notes of other tools.
A few change what the model computes. Such a key must not be dropped silently, because the model would then load and give wrong logits.

`check_keys` applies these rules to each key of an object, in this order:

1. A key whose value is null counts as absent.
2. A key in `Keys.used` is read, and its reader checks the value.
3. A key in `Keys.neutral` is not implemented. The values listed there are harmless and every other value is refused.
4. A key in `Keys.ignored`, in IRRELEVANT_KEYS, or with a word of IRRELEVANT_WORDS in its name never changes logits.
5. Any other key is unknown. It is refused if its name has a word that suggests arithmetic (SUSPICIOUS_WORDS) and its value switches
   something on. Otherwise it is ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from exl2nb.core.errors import ConfigError

REQUIRED_FIELD: Any = object()


class Fields:
    """One JSON object with checked access.

    Every getter takes the key and a `default`; without a default the key must be present. `null` counts as absent.

    Args:
        raw: the parsed object; anything but a mapping is refused.
        where: the file (and path inside it) for messages.

    Raises:
        ConfigError: the value has the wrong type, is outside `low`..`high`, or is missing.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where}: is a {type(raw).__name__}; expected a JSON object")
        self.raw, self.where = raw, where

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is not None:
            return value
        if default is REQUIRED_FIELD:
            raise ConfigError(f"{self.where}: key {key!r} is missing; this architecture needs it")
        return None

    def refuse(self, key: str, value: object, expected: str) -> ConfigError:
        """The error for a value that cannot be used (raise what this returns)."""
        return ConfigError(f"{self.where}: {key} is {shorten_value(value)}; expected {expected}")

    def integer(self, key: str, *, low: int, high: int, default: Any = REQUIRED_FIELD) -> Any:
        """An int in `low`..`high`."""
        value = self._get(key, default)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, *, low: float, high: float, default: Any = REQUIRED_FIELD) -> Any:
        """A finite number in `low`..`high`, as float."""
        value = self._get(key, default)
        if value is None:
            return default
        # the comparison stays in integers for an int that is too large for a float
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or not low <= value <= high:
            raise self.refuse(key, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, *, default: Any = REQUIRED_FIELD) -> Any:
        """True or false."""
        value = self._get(key, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true or false")
        return value

    def text(self, key: str, *, default: Any = REQUIRED_FIELD) -> Any:
        """A string."""
        value = self._get(key, default)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(key, value, "a string")
        return value

    def child(self, key: str) -> Fields | None:
        """A nested object, or None where the key is absent, null or empty."""
        value = self.raw.get(key)
        return Fields(value, f"{self.where}: {key}") if value is not None and value != {} else None


def shorten_value(value: object) -> str:
    """The value as a message shows it: at most 80 characters."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return f"an integer of {value.bit_length()} bits"  # repr of a huge int may itself raise
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def known_words(text: str) -> frozenset[str]:
    """The keys that a text names, separated by spaces."""
    return frozenset(text.split())


# Keys that Transformers' base class or its generation settings write into config.json. None of them changes the logits.
IRRELEVANT_KEYS = known_words(
    """
    _name_or_path architectures auto_map model_type transformers_version torch_dtype dtype torchscript use_bfloat16 return_dict
    output_attentions output_hidden_states use_cache cache_implementation chunk_size_feed_forward id2label label2id num_labels
    finetuning_task problem_type tokenizer_class prefix pruned_heads tf_legacy_loss task_specific_params is_decoder is_composition
    tie_encoder_decoder cross_attention_hidden_size initializer_range initializer_factor gradient_checkpointing pretraining_tp
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens max_window_layers model_max_length max_sequence_length
    attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal attention_softmax_in_fp32
    scale_attention_softmax_in_fp32 softmax_in_fp32 reorder_and_upcast_attn fused_bias_fc layer_norm_in_fp32 residual_in_fp32
    output_router_logits router_aux_loss_coef router_jitter_noise aux_loss_alpha unsloth_fixed unsloth_version
    num_logits_to_keep logits_to_keep
    """
)
# A name with one of these words is about training, the tokenizer or the choice of a kernel.
IRRELEVANT_WORDS = known_words("dropout pdrop loss token tokens tokenizer implementation flash fused kernel init initializer version")
# A name with a word that begins like one of these suggests that the key changes the arithmetic.
SUSPICIOUS_WORDS = re.compile(
    r"scal|multipl|soft|clip|clamp|temperature|logit|theta(?![a-z])|norm|rms|bias(?![a-z])|act(?![a-z])|activ|swiglu|gated|gating|residual|"
    r"rope|mrope|rotary|yarn|ntk|logn|alibi|position_embedding_type|window|sliding|swa(?![a-z])|sink|qk|attn|attention|bidirectional|causal|"
    r"sparse|layer_types|mup(?![a-z])|route|scoring|topk|loop|zero_centered"
)
_FACTOR_KEY = re.compile(r"scal|multipl|factor|ratio|pct|temperature|rope|rotary")
# Groups of keys that name the same setting. If the one that the reader uses is present, the others are leftovers of other tools.
_SAME_SETTING = (
    ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    ("hidden_act", "hidden_activation", "activation_function"),
    ("sliding_window", "sliding_window_size"),
)
ROPE_OBJECTS = ("rope_scaling", "rope_parameters")
ROPE_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What is known about the keys of one JSON object.

    Attributes:
        used: Keys that are read.
        neutral: Keys that are not implemented, each with the values at which it is harmless.
        ignored: Keys that never change a result.
        nested: Keys that hold an object, each with what is known about that object.
    """

    used: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    nested: Mapping[str, Keys] = field(default_factory=dict)

    def known(self, key: str) -> bool:
        """Whether rule 2, 3 or 4 decides about a key, so that the guess of rule 5 is not needed."""
        return key in self.used or key in self.neutral or key in self.nested or key in self.ignored or _is_irrelevant(key)


ROPE_KEYS = Keys(
    used=known_words(
        "rope_type type rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast beta_slow "
        "attention_factor mscale mscale_all_dim truncate short_factor long_factor partial_rotary_factor mrope_section"
    ),
    neutral={"mrope_interleaved": (False,), "llama_4_scaling_beta": (0,)},
    ignored=frozenset(("finetuned", "max_position_embeddings")),
)


def check_keys(fields: Fields, keys: Keys, owner: str) -> None:
    """Refuse the first key that changes the result and is not implemented.

    Args:
        fields: The object as it is in config.json.
        keys: What is known about its keys.
        owner: The architecture or class, for the message.

    Raises:
        ConfigError: The message names the key, its value, the supported values, and what to do.
    """
    for key, value in fields.raw.items():
        if value is None or not isinstance(key, str):
            continue
        if key in keys.nested:
            if isinstance(value, Mapping):
                check_keys(Fields(value, f"{fields.where}: {key}"), keys.nested[key], owner)
        elif key in keys.used:
            continue
        elif key in keys.neutral:
            if not any(_equal(value, harmless) for harmless in keys.neutral[key]):
                raise _unsupported_error(fields, key, value, " or ".join([*(json.dumps(v) for v in keys.neutral[key]), "null"]), owner)
        elif not keys.known(key) and _is_suspicious(fields.raw, keys, key, value):
            raise _unknown_error(fields, key, value, owner)


def check_rope_keys(fields: Fields, keys: Keys, owner: str) -> None:
    """Refuse an unknown key inside `rope_scaling` or `rope_parameters`, where every key is about arithmetic.

    Args:
        fields: The object that holds them.
        keys: What is known about the keys of a set of RoPE parameters.
        owner: The architecture, for the message.

    Raises:
        ConfigError: As `check_keys`; also if `factor` is set and no RoPE type says what it means.
    """
    for name in ROPE_OBJECTS:
        found = fields.raw.get(name)
        if not isinstance(found, Mapping):
            continue
        where = f"{fields.where}: {name}"
        layered = [key for key in ROPE_LAYERS if isinstance(found.get(key), Mapping)]
        sets = [(f"{where}: {key}", found[key]) for key in layered] or [(where, found)]
        for place, own in sets:
            check_keys(Fields(own, place), keys, owner)
            for key, value in own.items():
                if not keys.known(key) and not _is_off(value):
                    raise _unknown_error(Fields(own, place), key, value, owner)
            if own.get("factor") not in (None, 1) and own.get("rope_type") is None and own.get("type") is None:
                raise Fields(own, place).refuse(
                    "rope_type", None, f"a RoPE type beside factor {shorten_value(own['factor'])}, such as linear or yarn"
                )


def rope_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling that an object asks for, in one spelling, to compare two objects. The base period is a key of its own."""
    found = next((raw[name] for name in ROPE_OBJECTS if isinstance(raw.get(name), Mapping)), {})
    kind = found.get("rope_type") or found.get("type") or "default"
    rest = {key: value for key, value in found.items() if key not in ("rope_type", "type", "rope_theta") and value is not None}
    return {**rest, "rope_type": "default" if kind == "mrope" else kind}


def _is_irrelevant(key: str) -> bool:
    return key in IRRELEVANT_KEYS or not IRRELEVANT_WORDS.isdisjoint(re.split(r"[_.]", key.lower()))


def _is_suspicious(raw: Mapping[str, Any], keys: Keys, key: str, value: object) -> bool:
    words = key.lower()
    if not any(SUSPICIOUS_WORDS.match(words, start) for start in _word_starts(words)) or _is_off(value):
        return False
    if type(value) in (int, float) and value == (1 if _FACTOR_KEY.search(words) else 0):
        return False
    if key == "sliding_window" and raw.get("use_sliding_window") is False:
        return False
    return not any(key in group and _any_present(raw, keys, group) for group in _SAME_SETTING)


def _word_starts(words: str) -> Iterable[int]:
    """Where the words of a key begin."""
    return (match.start() for match in re.finditer(r"(?<![a-z0-9])[a-z0-9]", words))


def _any_present(raw: Mapping[str, Any], keys: Keys, group: tuple[str, ...]) -> bool:
    return any(other in keys.used and raw.get(other) is not None for other in group)


def _is_off(value: object) -> bool:
    return value is None or value is False or value in ("", [], {}, ())


def _equal(value: object, harmless: object) -> bool:
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)


def _unsupported_error(fields: Fields, key: str, value: object, expected: str, owner: str) -> ConfigError:
    return ConfigError(
        f"{fields.where}: {key} is {shorten_value(value)}; expected {expected}. This key changes the model's output and exl2nb does not "
        f"implement it for {owner}. Run this model with Transformers, or use a checkpoint without the key"
    )


def _unknown_error(fields: Fields, key: str, value: object, owner: str) -> ConfigError:
    return ConfigError(
        f"{fields.where}: {key} is {shorten_value(value)}; expected no such key. "
        f"exl2nb does not know it for {owner}, and its name suggests "
        "that it changes the model's output. If the model does not need it, remove it from config.json; otherwise run this model with "
        "Transformers"
    )

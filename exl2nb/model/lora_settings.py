"""Options of PEFT's adapter_config.json: which are followed, which change nothing, and which are refused.

PEFT gives some adapters another meaning by an option alone. An option that is not followed would give wrong answers without an error.
Each option is followed, or known to change nothing once the adapter is trained, or refused with its name. The list is that of PEFT 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from exl2nb.core.errors import FormatError
from exl2nb.model.config_fields import Fields

# Entries of alpha_pattern and rank_pattern, those of them with wildcards, and characters of one. Each wildcard is tried on each module.
MAX_PATTERNS, MAX_WILDCARDS, MAX_PATTERN = 4096, 64, 200
# Options that change what the weights mean, and that are not supported.
REFUSED_SETTINGS = (
    "layer_replication", "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "use_qalora", "use_bdlora",
    "velora_config", "arrow_config", "monteclora_config", "kasa_config",
)  # fmt: skip
# Options that look like methods and change nothing here: they are about training, or about the choice of the first values.
WITHOUT_EFFECT = ("eva_config", "corda_config", "loftq_config", "lora_ga_config", "megatron_config", "runtime_config")
FOLLOWED_SETTINGS = ("use_dora", "use_rslora")
# Values of init_lora_weights that leave the base model as it is.
PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
# Values that subtract the first product from the base model, or replace it: the adapter fits only that changed model.
CHANGED_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
_MODULE_PATTERN = re.compile(r"\^?((?:[\w-]|\\?\.|\.\*|\\d\+|\\d)+)\$?")
_PATTERN_PIECE = re.compile(r"(?:\.\*)+|\\d\+?|\\?\.|[\w-]+")


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """One adapted module of a file.

    Args:
        layer: index, -1 outside the layers.
        rank: of lora_A, None where it is missing.
        magnitude: it has a magnitude vector (DoRA).
        bias: its lora_B has a bias.
        embedding: it is the embedding.
    """

    layer: int
    rank: int | None
    magnitude: bool
    bias: bool
    embedding: bool


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Tensors of an adapter's file, and the model that they are for.

    Args:
        file: path, for messages.
        modules: names of the model's modules; True where a linear has a bias.
        adapted: modules with a product, by their names in the file.
        vectors: names of norms and biases that replace the model's.
        tied: the model's head uses the embedding's matrix.
    """

    file: str
    modules: Mapping[str, bool]
    adapted: Mapping[str, Adapted]
    vectors: frozenset[str]
    tied: bool


def check_supported(settings: Fields) -> None:
    """Refuse methods and options that are not supported.

    Raises:
        FormatError: names the option. ConfigError: peft_type is missing, or a flag is no flag.
    """
    kind = settings.text("peft_type")
    if kind != "LORA":
        raise FormatError(f"{settings.where}: peft_type is {kind[:40]!r}; expected LORA: other methods are not supported")
    unknown = (
        name
        for name, value in settings.raw.items()
        if (name.startswith("use_") and value is True) or (name.endswith("_config") and isinstance(value, dict) and value)
    )
    for name in (*REFUSED_SETTINGS, *(name for name in unknown if name not in WITHOUT_EFFECT + FOLLOWED_SETTINGS)):
        if settings.raw.get(name):
            raise FormatError(f"{settings.where}: {name} is set; adapters that use it are not supported")
    start = settings.raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in PLAIN_INITS:
        known = next((name for name in CHANGED_BASE if start.lower().startswith(name)), None)
        why = "changes the base model" if known else "is not known"
        raise FormatError(
            f"{settings.where}: init_lora_weights is {start[:40]!r}, which {why}; expected true: save the adapter again with "
            "save_pretrained(path_initial_model_for_weight_conversion=...), or set it to true if it is used with its own base model"
        )
    if settings.raw.get("bias") not in (None, "none", "all", "lora_only"):
        raise FormatError(f"{settings.where}: bias is {str(settings.raw['bias'])[:40]!r}; expected none, all or lora_only")


def check_agreement(settings: Fields, contents: Contents) -> None:
    """Compare the settings with the tensors of the file.

    Raises:
        FormatError: the settings need tensors that are missing, or rule out tensors that are there.
    """
    _check_variants(settings, contents)
    _check_ranks(settings, contents)
    _check_targets(settings, contents)
    for name in _name_list(settings.raw.get("modules_to_save")):
        whole = [module for module in contents.modules if f".{name}." in f".{module}."]
        saved = {vector.rpartition(".")[0] for vector in contents.vectors} | set(contents.adapted)
        if whole and not any(f".{name}." in f".{module}." for module in saved):
            raise FormatError(f"{contents.file}: modules_to_save names {name[:80]!r}, but the file has no tensor of it")
    biased = [module for module, has_bias in contents.modules.items() if has_bias]
    if settings.raw.get("bias") == "lora_only":
        biased = [module for module in biased if any(name.endswith(module) for name in contents.adapted)]
    if settings.raw.get("bias") in ("all", "lora_only") and biased and not any(f"{module}.bias" in contents.vectors for module in biased):
        raise FormatError(f"{contents.file}: bias is {settings.raw['bias']!r}, but the file has no bias of {biased[0]!r}")
    if settings.raw.get("ensure_weight_tying") and contents.tied and any(one.embedding for one in contents.adapted.values()):
        raise FormatError(
            f"{settings.where}: ensure_weight_tying is set for an adapter of the embedding; one adapter for the embedding and the head "
            "is not supported"
        )


def _check_variants(settings: Fields, contents: Contents) -> None:
    """use_dora needs a magnitude vector of each module, and lora_bias a bias of each lora_B; without them there is none."""
    for option, what in (("use_dora", "lora_magnitude_vector"), ("lora_bias", "bias of lora_B")):
        wanted = settings.flag(option, default=False)
        for name, one in contents.adapted.items():
            if wanted != (one.magnitude if option == "use_dora" else one.bias):
                found = "no" if wanted else "a"
                raise FormatError(f"{contents.file}: {option} is {str(wanted).lower()}, but module {name[:120]!r} has {found} {what}")


def _check_ranks(settings: Fields, contents: Contents) -> None:
    if settings.raw.get("r") is None:
        return
    rank_of = _read_pattern_values(settings, "rank_pattern", settings.number("r", low=1, high=1e6))
    for name, one in contents.adapted.items():
        if one.rank is not None and one.rank != rank_of(name):
            raise FormatError(
                f"{contents.file}: module {name[:120]!r} has rank {one.rank}, but r and rank_pattern say {rank_of(name):g}; the scale "
                "of the product depends on it"
            )


def _check_targets(settings: Fields, contents: Contents) -> None:
    """Lists of target_modules, exclude_modules and layers_to_transform; patterns are not evaluated."""
    targets, excluded = settings.raw.get("target_modules"), _name_list(settings.raw.get("exclude_modules"))
    layers = settings.raw.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers if isinstance(layers, list) else []
    for name, one in contents.adapted.items():
        if isinstance(targets, list) and targets and not _is_named(name, _name_list(targets)):
            raise FormatError(f"{contents.file}: module {name[:120]!r} is adapted, but target_modules does not name it")
        if _is_named(name, excluded):
            raise FormatError(f"{contents.file}: module {name[:120]!r} is adapted, but exclude_modules names it")
        if layers and one.layer >= 0 and one.layer not in layers:
            raise FormatError(f"{contents.file}: layer {one.layer} is adapted, but layers_to_transform does not name it")
    for target in _name_list(targets):
        wanted = [name for name in contents.modules if _is_named(name, [target]) and not _is_named(name, excluded)]
        if wanted and not any(_is_named(name, [target]) for name in contents.adapted):
            raise FormatError(f"{contents.file}: target_modules names {target[:80]!r}, but the file has no tensor of it")


def _name_list(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str) and one] if isinstance(value, list) else []


def _is_named(module: str, names: Iterable[str]) -> bool:
    """Whether PEFT takes a module for one of a list: by its whole name or by its end."""
    return any(module == name or module.endswith(f".{name}") for name in names)


def read_scales(settings: Fields) -> Callable[[str, int], float]:
    """Read how each product is scaled; returns the scale of a module by its name and its rank."""
    alpha = settings.number("lora_alpha", low=-1e6, high=1e6)
    chosen = _read_pattern_values(settings, "alpha_pattern", alpha)
    squared = settings.flag("use_rslora", default=False)

    def scale(module: str, rank: int) -> float:
        return chosen(module) / (rank**0.5 if squared else rank)

    return scale


def _read_pattern_values(settings: Fields, field: str, default: float) -> Callable[[str], float]:
    """Read `alpha_pattern` or `rank_pattern`; returns the number of a module by its name."""
    patterns = settings.raw.get(field) or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise settings.refuse(field, type(patterns).__name__, f"an object of at most {MAX_PATTERNS} entries")
    names: dict[str, tuple[int, float]] = {}  # the end of a module's name -> number of its entry, value: the first entry counts
    wildcards: list[tuple[int, float, re.Pattern[str]]] = []
    for number, (text, value) in enumerate(patterns.items()):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= 1e6:
            raise settings.refuse(field, value, "numbers")
        found = _parse_pattern(text, field, settings)
        if isinstance(found, str):
            names.setdefault(found, (number, float(value)))
        elif len(wildcards) == MAX_WILDCARDS:
            raise settings.refuse(field, "more", f"at most {MAX_WILDCARDS} entries with wildcards")
        else:
            wildcards.append((number, float(value), found))

    def chosen(module: str) -> float:
        parts = module.split(".")
        fitting = [names[end] for end in (".".join(parts[i:]) for i in range(len(parts))) if end in names]
        fitting += [(number, value) for number, value, pattern in wildcards if pattern.fullmatch(module)]
        return min(fitting, default=(0, default))[1]

    return chosen


def _parse_pattern(text: str, field: str, settings: Fields) -> str | re.Pattern[str]:
    """A key of alpha_pattern or rank_pattern: the end of a name, or a pattern for whole names, in which . without * means itself.

    Only what cannot take more than a few hundred steps on the name of a module is let through: names, wildcards and digits.
    """
    found = _MODULE_PATTERN.fullmatch(text) if len(text) <= MAX_PATTERN else None
    if found is None or text.count(".*") + text.count("+") > 3:
        raise settings.refuse(field, text, "names of modules, in which .* and \\d+ may stand at most three times")
    pieces = [".*" if piece.startswith(".*") else piece for piece in _PATTERN_PIECE.findall(found[1])]
    if not any(piece == ".*" or piece.startswith(r"\d") for piece in pieces):
        return "".join(piece.removeprefix("\\") for piece in pieces)
    return re.compile(r"(?:.*\.)?" + "".join(r"\." if piece == "." else piece for piece in pieces))

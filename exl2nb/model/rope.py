"""Rotary position embedding: the frequency tables of every scaling type, computed as Transformers computes them.

Each type is one function `(rope, context) -> (inverse frequencies, attention factor)` in the table ROPE_TYPES, and the keys it needs are
read and checked in `RopeConfig.read`. All arithmetic is fp32 in the order Transformers uses: at position 100 000 one ulp of a frequency is
already a visible angle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exl2nb.core.errors import ConfigError, OptionError
from exl2nb.core.options import Registry, check_range, shown
from exl2nb.model.config_fields import REQUIRED_FIELD, Fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from exl2nb.model.config import ModelConfig

MAX_CONTEXT = 1 << 24  # longest context of a config; the tables grow with use

# keys of a model's own RoPE parameters that hold for any scaling
KEPT_KEYS = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta")

Frequencies = tuple[Tensor, float]
ROPE_TYPES: Registry[Callable[[RopeConfig, int], Frequencies]] = Registry("RoPE type", ConfigError)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Parameters of one RoPE.

    type: key of ROPE_TYPES. theta: base period. rotary_dim: leading entries of a head that rotate (even). max_positions: the config's
    max_position_embeddings. original_positions: context before scaling. scale: positions are divided by it, on top of the type. The rest
    belongs to single types; None = not given.
    """

    type: str = "default"
    theta: float = 10000.0
    rotary_dim: int
    max_positions: int
    original_positions: int
    scale: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @classmethod
    def read(cls, fields: Fields, *, head_dim: int, max_positions: int, partial: bool = False) -> RopeConfig:
        """Read the old style (`rope_scaling`, `rope_theta`) and the new one (`rope_parameters`).

        `rope_scaling` takes precedence, as in Transformers.

        Args:
            max_positions: longest context of the model.
            partial: the architecture may rotate a part of each head only (`partial_rotary_factor`).

        Raises:
            ConfigError: an unknown type, a key of the type missing or out of range, partial rotation where it is not known.
        """
        own = fields.child("rope_scaling") or fields.child("rope_parameters") or Fields({}, fields.where)
        nested = next((key for key, value in own.raw.items() if isinstance(value, dict)), None)
        if nested is not None:
            raise own.refuse(nested, own.raw[nested], "one set of RoPE parameters for all layers")
        kind = own.text("rope_type", default=None) or own.text("type", default="default")
        kind = "longrope" if kind == "su" else "default" if kind == "mrope" and "mrope_section" in own.raw else kind
        if kind not in ROPE_TYPES:
            raise own.refuse("rope_type", kind, f"one of {', '.join(ROPE_TYPES)}")
        rotary_dim = _rotary_dim(own if "partial_rotary_factor" in own.raw else fields, head_dim) if partial else head_dim
        for source in () if partial else (own, fields):
            if source.number("partial_rotary_factor", low=0.0, high=1.0, default=1.0) != 1.0:
                raise source.refuse("partial_rotary_factor", source.raw["partial_rotary_factor"], "1.0 for this architecture")
        theta = own.number("rope_theta", low=1.0 + 1e-6, high=1e15, default=None)
        scaled = kind not in ("default", "longrope")
        original = {"low": 1, "high": MAX_CONTEXT}
        values = {
            "theta": theta or fields.number("rope_theta", low=1.0 + 1e-6, high=1e15, default=10000.0),
            "original_positions": fields.integer("original_max_position_embeddings", **original, default=None)
            or own.integer("original_max_position_embeddings", **original, default=max_positions),
        }
        if scaled:
            nullable = kind == "yarn" and "factor" in own.raw  # an explicit null means the ratio of the two contexts
            factor = own.number("factor", low=1.0, high=1e6, default=None if nullable else REQUIRED_FIELD)
            values["factor"] = factor if factor is not None else max_positions / values["original_positions"]
        if kind == "llama3":
            values["low_freq_factor"] = own.number("low_freq_factor", low=1e-3, high=1e6)
            values["high_freq_factor"] = own.number("high_freq_factor", low=1e-3, high=1e6)
            if values["high_freq_factor"] <= values["low_freq_factor"]:
                raise own.refuse("high_freq_factor", values["high_freq_factor"], f"more than low_freq_factor {values['low_freq_factor']:g}")
        if kind == "yarn":
            values |= _read_yarn(own)
        if kind == "longrope":
            values |= _read_longrope(own, rotary_dim, max_positions / values["original_positions"])
        return cls(type=kind, rotary_dim=rotary_dim, max_positions=max_positions, **values)


def _rotary_dim(source: Fields, head_dim: int) -> int:
    share = source.number("partial_rotary_factor", low=0.0, high=1.0, default=1.0)
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or rotary_dim < 2:
        raise source.refuse("partial_rotary_factor", share, f"a share of head_dim {head_dim} that is an even number of dimensions")
    return rotary_dim


def _read_longrope(own: Fields, rotary_dim: int, ratio: float) -> dict[str, object]:
    values: dict[str, object] = {
        "attention_factor": own.number("attention_factor", low=0.0, high=1e3, default=None),
        "factor": own.number("factor", low=1.0, high=1e6, default=None) or ratio,
    }
    for key in ("short_factor", "long_factor"):
        found = own.raw.get(key)
        right = isinstance(found, list) and len(found) == rotary_dim // 2
        if not right or not all(type(v) in (int, float) and 0 < v < 1e6 for v in found or ()):
            raise own.refuse(key, found, f"a list of {rotary_dim // 2} positive numbers, one per rotated pair")
        values[key] = tuple(float(v) for v in found or ())
    return values


def _read_yarn(own: Fields) -> dict[str, object]:
    fast = own.number("beta_fast", low=0.0, high=1e6, default=0.0) or 32.0
    slow = own.number("beta_slow", low=0.0, high=1e6, default=0.0) or 1.0
    if fast < slow:
        raise own.refuse("beta_fast", fast, f"at least beta_slow {slow:g}")
    return {
        "beta_fast": fast,
        "beta_slow": slow,
        "attention_factor": own.number("attention_factor", low=0.0, high=1e3, default=None),
        "mscale": own.number("mscale", low=0.0, high=1e3, default=None),
        "mscale_all_dim": own.number("mscale_all_dim", low=0.0, high=1e3, default=None),
        "truncate": own.flag("truncate", default=True),
    }


def _inverse_frequencies(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


@ROPE_TYPES.register("default")
def _default_frequencies(rope: RopeConfig, context: int) -> Frequencies:
    return _inverse_frequencies(rope.theta, rope.rotary_dim), 1.0


@ROPE_TYPES.register("linear")
def _linear_frequencies(rope: RopeConfig, context: int) -> Frequencies:
    return _inverse_frequencies(rope.theta, rope.rotary_dim) / rope.factor, 1.0


@ROPE_TYPES.register("dynamic")
def _dynamic_frequencies(rope: RopeConfig, context: int) -> Frequencies:
    """NTK: the base grows with the context beyond max_positions.

    Transformers recomputes it whenever a longer sequence arrives, so keys already cached carry an older base. Here the base is fixed for
    the context the model was loaded with: what Transformers gives when the whole context is run at once.
    """
    dim, positions = rope.rotary_dim, max(context, rope.max_positions)
    stretch = rope.factor * positions / rope.max_positions - (rope.factor - 1)
    return _inverse_frequencies(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0


@ROPE_TYPES.register("llama3")
def _llama3_frequencies(rope: RopeConfig, context: int) -> Frequencies:
    """Short wavelengths stay, long ones are stretched by `factor`, those between are interpolated."""
    inverse = _inverse_frequencies(rope.theta, rope.rotary_dim)
    original, low, high = rope.original_positions, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / rope.factor + smooth * inverse
    stretched = torch.where(wavelength > original / low, inverse / rope.factor, inverse)
    middle = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(middle, between, stretched), 1.0


@ROPE_TYPES.register("yarn")
def _yarn_frequencies(rope: RopeConfig, context: int) -> Frequencies:
    """Peng et al., 2023: interpolate slow frequencies, keep fast ones, ramp between; cos and sin grow by the attention factor."""
    dim, theta = rope.rotary_dim, rope.theta

    def boundary(rotations: float) -> float:
        return (dim * math.log(rope.original_positions / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = boundary(rope.beta_fast), boundary(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) if high != low else 0.001)
    keep = 1 - ramp.clamp(0, 1)
    periods = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    inverse = (1.0 / (rope.factor * periods)) * (1 - keep) + (1.0 / periods) * keep
    return inverse, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


@ROPE_TYPES.register("longrope")
def _longrope_frequencies(rope: RopeConfig, context: int) -> Frequencies:
    """Ding et al., 2024: one factor per frequency, from the long list beyond the original context.

    Which list it is depends on how long the sequence is, so a model has the tables of both (see `rope_switch`).
    """
    factors = rope.long_factor if context > rope.original_positions else rope.short_factor
    periods = rope.theta ** (torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim)
    grown = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_positions)) if rope.factor > 1 else 1.0
    inverse = 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods)
    return inverse, rope.attention_factor if rope.attention_factor is not None else grown


def rope_frequencies(rope: RopeConfig, *, context: int | None = None) -> Frequencies:
    """Inverse frequencies f32 `(rotary_dim/2,)` and the factor on cos and sin.

    Args:
        context: tokens the model is loaded with (used by "dynamic" only); None = max_positions.
    """
    inverse, factor = ROPE_TYPES[rope.type](rope, context if context is not None else rope.max_positions)
    return (inverse, factor) if rope.scale == 1.0 else (inverse / rope.scale, factor)


def rope_switch(config: ModelConfig, context: int) -> int | None:
    """Longest sequence that takes the short factors; None where all sequences of a model loaded for `context` rotate alike."""
    rope = config.rope
    switches = rope.type == "longrope" and context > rope.original_positions and rope.short_factor != rope.long_factor
    return rope.original_positions if switches else None


def both_tables(config: ModelConfig, max_pos: int, switch: int, *, kind: str) -> tuple[Tensor, Tensor]:
    """The tables for sequences up to `switch` tokens and for longer ones, row by row: position p of a short sequence is row 2 p, of a
    long one 2 p + 1.
    """
    short, long = (rope_tables(config, max_pos, context=context, kind=kind) for context in (switch, switch + 1))
    cos, sin = (torch.stack(pair, 1).flatten(0, 1) for pair in zip(short, long))
    return cos, sin


def rope_tables(config: ModelConfig, max_pos: int, *, context: int | None = None, kind: str = "main") -> tuple[Tensor, Tensor]:
    """The cos and sin tables for positions 0..max_pos-1.

    Args:
        kind: "main" (`config.rope`), "local" (`config.local_rope`) or "none" (tables without columns).
        max_pos: rows of the tables.
        context: tokens the model is loaded with; decides the base of dynamic NTK. None = max_position_embeddings.

    Returns:
        cos, sin: f32 `(max_pos, rotary_dim/2)`, already times the attention factor. Entry j rotates the pair (j, j + rotary_dim/2).

    Cost: max_pos * rotary_dim * 4 bytes for both.
    """
    if kind == "none":
        return torch.empty(max_pos, 0), torch.empty(max_pos, 0)
    rope = config.local_rope if kind == "local" else config.rope
    assert rope is not None, kind
    inverse, factor = rope_frequencies(rope, context=context)
    angles = torch.arange(max_pos, dtype=torch.float32)[:, None] * inverse
    return angles.cos() * factor, angles.sin() * factor


# ---- what a caller changes


@dataclass(frozen=True, kw_only=True)
class RopeOverride:
    """Changes to a model's RoPE, for sequences longer than those it was trained on. Layers with a local RoPE of their own keep it.

    scale: positions are divided by it (linear interpolation). theta: the base period. alpha: the base grows by alpha ** (d / (d - 2)) for d
    rotated dimensions (NTK-aware scaling). scaling: the object `rope_scaling` of a config.json in place of the model's own, such as
    {"rope_type": "yarn", "factor": 4.0}; None = not changed.

    Raises:
        OptionError: a value out of range, or no object.
    """

    scale: float | None = None
    theta: float | None = None
    alpha: float | None = None
    scaling: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, low, high in (("scale", 1e-3, 1e6), ("theta", 1.001, 1e15), ("alpha", 1.0, 1e6)):
            if (value := getattr(self, name)) is not None:
                check_range(f"rope_{name}", value, low, high)
        if self.scaling is not None and not isinstance(self.scaling, Mapping):
            example = "{'rope_type': 'yarn', 'factor': 4.0}"
            raise OptionError(f"rope_scaling is {shown(self.scaling)}; expected a dict as config.json has it, such as {example}")

    def __bool__(self) -> bool:
        return any(value is not None for value in (self.scale, self.theta, self.alpha, self.scaling))

    def raw(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A model's config.json with `scaling` in it.

        Raises:
            OptionError: the model has several sets of RoPE parameters.
        """
        if self.scaling is None:
            return dict(config)
        if isinstance(config.get("text_config"), Mapping):
            return {**config, "text_config": self.raw(config["text_config"])}
        own = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if any(isinstance(value, Mapping) for value in own.values()):
            raise OptionError("rope_scaling: the model has RoPE parameters for several kinds of layers; use rope_scale or rope_alpha")
        # the factor of the queries counts positions from the model's own original context
        more = ("original_max_position_embeddings",) if own.get("llama_4_scaling_beta") else ()
        kept = {key: own[key] for key in (*KEPT_KEYS, *more) if key in own}
        return {**config, "rope_scaling": {**kept, **self.scaling}}

    def apply(self, config: ModelConfig) -> ModelConfig:
        """A model's config with the rest of the changes; `max_position_embeddings` becomes what it then reaches.

        Raises:
            OptionError: the model has no RoPE.
        """
        if not self:
            return config
        if all(config.rope_kind(layer) != "main" for layer in range(config.num_layers)) or config.learned_positions:
            raise OptionError(f"rope options were given; {config.architecture} has no RoPE they could change: leave them out")
        rope, dim = config.rope, config.rope.rotary_dim
        alpha = 1.0 if self.alpha is None else self.alpha
        theta = (self.theta or rope.theta) * (alpha ** (dim / (dim - 2)) if dim > 2 else alpha)
        changed = replace(config, rope=replace(rope, theta=theta, scale=self.scale or 1.0))
        reach = int(min(config.context_limit or MAX_CONTEXT, trained_context(config) * max(1.0, self.scale or 1.0) * alpha))
        return replace(changed, max_position_embeddings=reach)


def trained_context(config: ModelConfig) -> int:
    """Tokens up to which a model's positions are known to work: what its config says, or what its RoPE scaling stretches that to."""
    rope = config.rope
    stretched = rope.original_positions * rope.factor if rope.type in ("linear", "llama3", "yarn") else 0
    return min(config.context_limit or MAX_CONTEXT, max(config.max_position_embeddings, int(stretched)))

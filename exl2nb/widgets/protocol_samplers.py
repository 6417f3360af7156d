"""The samplers that Playground folds away: one list for the traits, the keywords and the controls of the page. A part of `protocol`."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from exl2nb.sampling.params import INTEGERS, RANGES, SamplingParams


class Sampler(NamedTuple):
    """A control. least, most, step: of its slider, step 0 = a switch. low, high: what may be typed. neutral: where it does nothing."""

    name: str
    label: str
    hint: str
    least: float
    most: float
    step: float
    low: float
    high: float
    neutral: float | bool


class SamplerValues(TypedDict):
    """The folded samplers, fields of `SamplingParams`."""

    typical_p: float
    tfs: float
    top_a: float
    skew: float
    min_tokens: int
    presence_penalty: float
    frequency_penalty: float
    penalty_range: int
    penalty_decay: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_range: int
    dry_max_ngram: int
    xtc_probability: float
    xtc_threshold: float
    smoothing_factor: float
    smoothing_curve: float
    min_temp: float
    max_temp: float
    temp_exponent: float
    temperature_last: bool
    mirostat: bool
    mirostat_tau: float
    mirostat_eta: float


def _sampler(name: str, label: str, hint: str, least: float = 0, most: float = 1, step: float = 0) -> Sampler:
    low, high = {**RANGES, **INTEGERS}.get(name, (0, 1))
    return Sampler(name, label, hint, least, most, step, low, high, getattr(SamplingParams, name))


SAMPLERS = (
    _sampler("typical_p", "Typical-p", "1 is off", 0.05, 1, 0.05),
    _sampler("tfs", "Tail-free", "1 is off", 0.05, 1, 0.05),
    _sampler("top_a", "Top-a", "0 is off", 0, 1, 0.01),
    _sampler("skew", "Skew", "0 is off; above it: less likely tokens", -3, 3, 0.1),
    _sampler("min_tokens", "Min tokens", "the text cannot end before", 0, 512, 1),
    _sampler("presence_penalty", "Presence penalty", "0 is off", -2, 2, 0.1),
    _sampler("frequency_penalty", "Frequency penalty", "0 is off", -2, 2, 0.1),
    _sampler("penalty_range", "Penalty range", "tokens looked back; 0 is all", 0, 4096, 1),
    _sampler("penalty_decay", "Penalty decay", "tokens over which it fades; needs a range", 0, 4096, 1),
    _sampler("dry_multiplier", "DRY multiplier", "against repeats; 0 is off", 0, 5, 0.1),
    _sampler("dry_base", "DRY base", "growth with the length of a repeat", 1, 4, 0.05),
    _sampler("dry_allowed_length", "DRY allowed length", "repeats that cost nothing", 1, 20, 1),
    _sampler("dry_range", "DRY range", "tokens looked back; 0 is all", 0, 4096, 1),
    _sampler("dry_max_ngram", "DRY longest repeat", "looked for, in tokens", 1, 100, 1),
    _sampler("xtc_probability", "XTC probability", "leaves out the obvious; 0 is off", 0, 1, 0.05),
    _sampler("xtc_threshold", "XTC threshold", "how likely is obvious", 0, 0.5, 0.01),
    _sampler("smoothing_factor", "Smoothing factor", "0 is off", 0, 10, 0.1),
    _sampler("smoothing_curve", "Smoothing curve", "1 is plain", 1, 3, 0.1),
    _sampler("min_temp", "Lowest temperature", "where the model is sure", 0, 4, 0.05),
    _sampler("max_temp", "Highest temperature", "by entropy, with temperature 1; 0 is off", 0, 4, 0.05),
    _sampler("temp_exponent", "Temperature exponent", "of the entropy", 0.1, 5, 0.1),
    _sampler("temperature_last", "Temperature last", "after the cuts"),
    _sampler("mirostat", "Mirostat", "holds the surprise of the text"),
    _sampler("mirostat_tau", "Mirostat tau", "surprise in bits", 0, 10, 0.1),
    _sampler("mirostat_eta", "Mirostat eta", "how fast it steers", 0, 1, 0.01),
)
DEFAULTS = {one.name: one.neutral for one in SAMPLERS}

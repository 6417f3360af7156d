"""exllamav2's sampler settings, and what they are as options of `llm.generate`."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from exl2nb.core.errors import OptionError
from exl2nb.integrations.exllamav2.absent import Documented, refuse, table
from exl2nb.integrations.exllamav2.loading import ExLlamaV2Tokenizer


@dataclass
class ExLlamaV2PostSamplingResult:
    """What exllamav2 hands to a hook; for annotations, since `Settings.post_sampling_hooks` is refused."""

    sampled_token: Tensor | None = None
    sampled_prob: Tensor | None = None
    candidate_tokens: Tensor | None = None
    candidate_probs: Tensor | None = None
    logits: Tensor | None = None
    feed_filters: bool = True


ExLlamaV2PostSamplingHook = Callable[[ExLlamaV2PostSamplingResult], None]


def _refused(name: str) -> Any:
    def call(*_: Any, **__: Any) -> None:
        refuse(f"ExLlamaV2Sampler.{name}", "sampling")

    call.__doc__ = "Refuse.\n\nRaises:\n    NotOffered: always; says what to use instead."
    return staticmethod(call)


class ExLlamaV2Sampler:
    """Holds `Settings`; sampling itself is the engine's."""

    sample = _refused("sample")
    apply_dry = _refused("apply_dry")
    get_dry_default_sequence_breaker_tokens = _refused("get_dry_default_sequence_breaker_tokens")
    get_default_xtc_mask_tokens = _refused("get_default_xtc_mask_tokens")
    get_xtc_mask_tensor = _refused("get_xtc_mask_tensor")

    @dataclass
    class Settings(Documented):
        """The settings by their old names and defaults."""

        absent: ClassVar = table(loop="ngram_trie ngram_index ngram_history")
        token_repetition_penalty: float = 1.025
        token_repetition_range: int = -1
        token_repetition_decay: int = 0
        token_frequency_penalty: float = 0.0
        token_presence_penalty: float = 0.0
        temperature: float = 0.8
        smoothing_factor: float = 0.0
        min_temp: float = 0.0
        max_temp: float = 0.0
        temp_exponent: float = 1.0
        top_k: int = 50
        top_p: float = 0.8
        top_a: float = 0.0
        min_p: float = 0.0
        tfs: float = 0.0
        typical: float = 0.0
        skew: float = 0.0
        temperature_last: bool = False
        mirostat: bool = False
        mirostat_tau: float = 1.5
        mirostat_eta: float = 0.1
        mirostat_mu: float | None = None
        token_bias: Tensor | None = None
        cfg_scale: float | None = None
        post_sampling_hooks: list[Any] = field(default_factory=list)
        dry_allowed_length: int = 2
        dry_base: float = 1.75
        dry_multiplier: float = 0.0
        dry_sequence_breakers: set[int] | None = None
        dry_range: int = 0
        dry_max_ngram: int = 20
        xtc_probability: float = 0.0
        xtc_threshold: float = 0.1
        xtc_ignore_tokens: frozenset[int] | None = None

        @staticmethod
        def greedy(**kwargs: Any) -> ExLlamaV2Sampler.Settings:
            """Always the most probable token."""
            return ExLlamaV2Sampler.Settings(**{"temperature": 1.0, "token_repetition_penalty": 1.0, "top_p": 0.0, "top_k": 1, **kwargs})

        def clone(self) -> ExLlamaV2Sampler.Settings:
            """A copy."""
            return copy(self)

        def greedy_clone(self) -> ExLlamaV2Sampler.Settings:
            """A copy that takes the most probable token."""
            made = copy(self)
            made.top_k, made.top_p, made.token_bias = 1, 0.0, None
            return made

        def disallow_tokens(self, tokenizer: ExLlamaV2Tokenizer, tokens: list[int]) -> None:
            """Never draw these."""
            if self.token_bias is None:
                self.token_bias = torch.zeros(tokenizer.config.vocab_size)
            self.token_bias[tokens] = -torch.inf

        def allow_tokens(self, tokenizer: ExLlamaV2Tokenizer, tokens: list[int | str]) -> None:
            """Draw no other than these, ids or texts of single tokens."""
            if self.token_bias is None:
                self.token_bias = torch.full((tokenizer.config.vocab_size,), -torch.inf)
            for token in tokens:
                self.token_bias[tokenizer.single_id(token) if isinstance(token, str) else token] = 0.0

        def options(self, vocab_size: int) -> dict[str, Any]:
            """As options of `llm.generate`; cfg_scale is the caller's.

            Raises:
                OptionError: post_sampling_hooks, which see another object here.
            """
            if self.post_sampling_hooks:
                raise OptionError("Settings: post_sampling_hooks is not taken here; use post_sampling of llm.generate")
            made: dict[str, Any] = {
                "repetition_penalty": self.token_repetition_penalty,
                "frequency_penalty": self.token_frequency_penalty,
                "presence_penalty": self.token_presence_penalty,
                "penalty_prompt": bool(self.token_frequency_penalty or self.token_presence_penalty),
                "penalty_range": max(0, self.token_repetition_range),
                "penalty_decay": self.token_repetition_decay if self.token_repetition_range > 0 else 0,
                "dry_multiplier": self.dry_multiplier,
                **_bias(self.token_bias, vocab_size),
            }
            if self.dry_multiplier:
                made |= {"dry_base": self.dry_base, "dry_allowed_length": self.dry_allowed_length, "dry_range": self.dry_range}
                made["dry_max_ngram"] = self.dry_max_ngram
                if self.dry_sequence_breakers is not None:
                    made["dry_breakers"] = sorted(self.dry_sequence_breakers)
            if self.top_k == 1 or self.temperature < 0.01:
                return {**made, "temperature": 0}
            dynamic = self.max_temp > self.min_temp
            made |= {
                "temperature": 1.0 if dynamic else self.temperature,
                "smoothing_factor": self.smoothing_factor,
                "top_k": max(0, self.top_k),
                "top_p": self.top_p if 0 < self.top_p < 1 else 1.0,
                "top_a": self.top_a,
                "min_p": self.min_p,
                "tfs": self.tfs if 0 < self.tfs < 1 else 1.0,
                "typical_p": self.typical if 0 < self.typical < 1 else 1.0,
                "skew": self.skew,
                "temperature_last": self.temperature_last,
            }
            if dynamic:
                made |= {"min_temp": self.min_temp, "max_temp": self.max_temp, "temp_exponent": self.temp_exponent}
            if self.mirostat:
                made |= {"mirostat": True, "mirostat_tau": self.mirostat_tau, "mirostat_eta": self.mirostat_eta}
            if self.xtc_probability:
                made |= {"xtc_probability": self.xtc_probability, "xtc_threshold": self.xtc_threshold}
                if self.xtc_ignore_tokens is not None:
                    made["xtc_ignore"] = sorted(self.xtc_ignore_tokens)
            return made


def _bias(bias: Tensor | None, vocab_size: int) -> dict[str, Any]:
    if bias is None:
        return {}
    row = bias.detach().float().cpu().view(-1)[:vocab_size]
    out = (row == -torch.inf).nonzero()[:, 0].tolist()
    added = {int(i): float(row[i]) for i in row.nonzero()[:, 0] if row[i] > -torch.inf}
    made: dict[str, Any] = {"logit_bias": added} if added else {}
    if 2 * len(out) > vocab_size:
        made["allowed_tokens"] = (row > -torch.inf).nonzero()[:, 0].tolist()
    elif out:
        made["banned_tokens"] = out
    return made

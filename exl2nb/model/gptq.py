"""GPTQ matrices of a model: whole ones, and columns of a fused one. Knows nothing of their bytes."""

from __future__ import annotations

from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import Linear
from exl2nb.model.store import ModelStore, Store
from exl2nb.quant.gptq import GptqTensors
from exl2nb.quant.gptq_spec import SUFFIXES, GptqSpec, header_problems


def spec_of(config: ModelConfig) -> GptqSpec:
    """The checkpoint's settings; where it has none, those of the oldest files."""
    return config.gptq or GptqSpec()


def read_gptq(config: ModelConfig, store: Store, linear: Linear) -> GptqTensors:
    """The matrix of one linear.

    Raises:
        FormatError: as `GptqTensors.read`.
    """
    whole = store.whole(linear.key) if isinstance(store, ModelStore) else None
    if whole is None:
        return GptqTensors.read(store, linear.key, spec_of(config), in_features=linear.in_features, out_features=linear.out_features)
    sizes = {"in_features": linear.in_features, "out_features": whole.out_features}
    return GptqTensors.read(whole.store, whole.prefix, spec_of(config), **sizes, columns=whole.columns)


def gptq_problems(config: ModelConfig, store: Store, linear: Linear) -> list[str]:
    """Every rule that the headers of one linear's matrix break."""
    whole = store.whole(linear.key) if isinstance(store, ModelStore) else None
    home, prefix, outputs = (store, linear.key, linear.out_features) if whole is None else (whole.store, whole.prefix, whole.out_features)
    if absent := [f"{prefix}.{suffix}" for suffix in SUFFIXES if f"{prefix}.{suffix}" not in home]:
        return [f"tensor {name!r}: found none, expected it beside qweight" for name in absent]
    infos = {suffix: home.info(f"{prefix}.{suffix}") for suffix in (*SUFFIXES, "g_idx") if f"{prefix}.{suffix}" in home}
    return header_problems(infos, prefix, spec_of(config), in_features=linear.in_features, out_features=outputs)

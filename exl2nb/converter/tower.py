"""The tower of a model that sees as EXL2: the linears of its blocks, each rounded to the nearest level. Knows nothing of calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from exl2nb.converter.gptq import quantize
from exl2nb.converter.hessian import Factor
from exl2nb.io.hf_config import read_config
from exl2nb.model.config import ModelConfig
from exl2nb.model.store import ModelStore
from exl2nb.model.vision.encoder import tower_name
from exl2nb.model.vision.families import read_vision
from exl2nb.quant.bits import head_mix


def block_linears(config: ModelConfig, directory: Path) -> frozenset[str]:
    """Names of the linears of a tower's blocks, as `encoder.tower_name` has them; empty where the class has no tower."""
    vision = read_vision(config.architecture, read_config(directory), directory)
    if vision is None:
        return frozenset()
    tower, names = vision.tower, vision.tower.names
    parts = (*names.qkv, names.out, *names.up, names.down)
    return frozenset(f"{names.layer.format(layer)}.{part}" for layer in range(tower.layers) for part in parts)


def quantized_tower(store: ModelStore, linears: frozenset[str], bits: int, check: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a tower with the matrices of `linears` as EXL2; those whose sides are no multiples of 32 stay as they are.

    Args:
        store: of the dense model. linears: of `block_linears`. bits: row of the head's table. check: raises to stop.
    """
    mix, shapes = head_mix(bits), {name: store.info_untouched(name).shape for name in store.untouched()}
    chosen = {
        stem
        for stem in (name.removesuffix(".weight") for name in shapes if name.endswith(".weight"))
        if tower_name(stem) in linears and len(shapes[f"{stem}.weight"]) == 2 and not any(side % 32 for side in shapes[f"{stem}.weight"])
    }
    for name in shapes:
        tensor, (stem, _, suffix) = store.read_untouched(name), name.rpartition(".")
        if stem in chosen and suffix == "weight":
            check()
            inputs = tensor.shape[1]
            alike = Factor(torch.arange(inputs), torch.eye(inputs))  # every input counts alike: codes are the nearest levels
            packed, _ = quantize(tensor.float(), alike, mix.groups(inputs))
            yield from packed.tensors(stem).items()
        else:
            yield name, tensor.half() if stem in chosen else tensor  # the format has biases in fp16

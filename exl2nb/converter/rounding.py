"""From dense weights and factors to EXL2 tensors: one linear, and those of a vision tower. Knows nothing of allocation or files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from exl2nb.converter.descent import descend
from exl2nb.converter.hessian import Coupling, Factor
from exl2nb.io.hf_config import read_config
from exl2nb.model.config import ModelConfig
from exl2nb.model.store import ModelStore
from exl2nb.model.vision.encoder import tower_name
from exl2nb.model.vision.families import read_vision
from exl2nb.ops import gptq_losses, libraries, reconstruct
from exl2nb.ops.gptq import Quantized, gptq_quantize
from exl2nb.quant.bits import head_mix
from exl2nb.quant.exl2 import Exl2Tensors, encode

Groups = Sequence[tuple[int, int]]


def _runs_on(device: torch.device) -> torch.device:
    """Where the kernels run for tensors on `device`: there, or on the CPU where only that was built."""
    return device if device.type == "cuda" and "cuda" in libraries().loaded else torch.device("cpu")


def run_rounding(
    weight: Tensor, factor: Factor, groups: Groups, column_weight: Tensor | None = None, coupling: Coupling | None = None
) -> Quantized:
    """GPTQ on one matrix.

    Args:
        weight: f32 `(N, K)`, the nn.Linear layout.
        factor: order and factor of its input's Hessian.
        groups: (bits, rows) from top to bottom of the stored order.
        column_weight: f32 `(N,)`; None counts all columns alike, or by the coupling.
        coupling: how its outputs belong together; None rounds every column for itself.

    Returns:
        Where the kernels ran: on the GPU for a weight there, if the CUDA library was built.
    """
    return _run_rounding(factor.stored(weight), factor, groups, column_weight, coupling)


def _run_rounding(stored: Tensor, factor: Factor, groups: Groups, column_weight: Tensor | None, coupling: Coupling | None) -> Quantized:
    on = _runs_on(stored.device)
    table = torch.tensor([value for group in groups for value in group], dtype=torch.int32)
    stored, upper = stored.to(on), factor.upper.to(on)
    if coupling is None:
        columns = stored.new_ones(stored.shape[1]) if column_weight is None else column_weight.float().to(on).contiguous()
        return gptq_quantize(stored, upper, columns, table)
    perm, spread, back = coupling.perm.to(on), coupling.spread.to(on), torch.argsort(coupling.perm).to(on)
    columns = spread.square() if column_weight is None else column_weight.float().to(on)[perm].contiguous()
    made = gptq_quantize(stored[:, perm].contiguous(), upper, columns, table, coupling.factor.to(on), spread)
    return Quantized(made.codes[:, back], made.scale_index[:, back], made.scale_max, made.loss[:, back])


def option_losses(weight: Tensor, factor: Factor, options: Sequence[Groups], column_weight: Tensor) -> list[list[float]]:
    """What rounding would cost in each of several ways to cut one matrix into groups.

    Args:
        weight, factor: as of `run_rounding`.
        options: the ways: (bits, rows) from top to bottom.
        column_weight: f64 `(N,)`, what a column's loss counts; the columns of a group share their maximum as if they counted alike.

    Returns:
        Per option the loss of each group.
    """
    on = _runs_on(weight.device)
    stored = factor.stored(weight).to(on)
    found = gptq_losses(stored, factor.upper.to(on), stored.new_ones(stored.shape[1]), options)
    column = column_weight.double().to(on)
    whole = torch.cat([loss.double() @ column for loss in found])
    return [part.tolist() for part in whole.cpu().split([len(groups) for groups in options])]


def quantize_matrix(
    weight: Tensor, factor: Factor, groups: Groups, *, bias: Tensor | None = None, coupling: Coupling | None = None
) -> tuple[Exl2Tensors, float]:
    """Quantise one matrix and pack it; arguments as of `run_rounding`.

    Returns:
        The tensors, on the CPU, and the loss: the sum over columns of `dW^T H dW`, or of `tr(G dW^T H dW)` with a coupling.
    """
    return quantize_stored(factor.stored(weight), factor, groups, bias=bias, coupling=coupling)


def quantize_stored(
    stored: Tensor, factor: Factor, groups: Groups, *, bias: Tensor | None = None, coupling: Coupling | None = None, sweeps: int = 0
) -> tuple[Exl2Tensors, float]:
    """The same of a matrix as `Factor.stored` gives it, so that no other copy need be there.

    sweeps: of coordinate descent afterwards (converter.descent).
    """
    result = _run_rounding(stored, factor, groups, None, coupling)
    on = result.codes.device
    if sweeps:
        result = descend(stored, result, factor, groups, coupling, sweeps)
    parts = result.codes.contiguous(), result.scale_index.contiguous(), result.scale_max
    packed = encode(*parts, groups, factor.perm.to(on), bias=None if bias is None else bias.to(on))
    return _exl2_to_device(packed, torch.device("cpu")), float(result.loss.double().sum())


def dense_weight(packed: Exl2Tensors, out_features: int, device: torch.device | str = "cpu") -> Tensor:
    """What the loader will compute with, in the nn.Linear layout: f32 `(out_features, K)` on `device`, padding dropped."""
    if _runs_on(torch.device(device)).type == "cpu":
        return _transposed_f32(packed.reconstruct(), out_features).to(device)
    there = _exl2_to_device(packed, torch.device(device))
    return _transposed_f32(reconstruct(there.q_weight, there.q_scale, there.q_scale_max, there.q_groups, there.q_invperm), out_features)


def _transposed_f32(made: Tensor, out_features: int) -> Tensor:
    """f16 `(K, N)` as f32 `(out_features, K)`."""
    return torch.empty(out_features, len(made), device=made.device).copy_(made[:, :out_features].T)


def _exl2_to_device(packed: Exl2Tensors, device: torch.device) -> Exl2Tensors:
    moved = {name: tensor.to(device) for field in dataclasses.fields(packed) if (tensor := getattr(packed, name := field.name)) is not None}
    return Exl2Tensors(**moved)


def tower_block_linears(config: ModelConfig, directory: Path) -> frozenset[str]:
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
        store: of the dense model. linears: of `tower_block_linears`. bits: row of the head's table. check: raises to stop.
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
            packed, _ = quantize_matrix(tensor.float(), alike, mix.groups(inputs))
            yield from packed.tensors(stem).items()
        else:
            yield name, tensor.half() if stem in chosen else tensor  # the format has biases in fp16

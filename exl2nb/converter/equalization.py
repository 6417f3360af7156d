"""Cross-layer equalization: channel scalings that leave the dense model's outputs unchanged and make it easier to quantise.

A channel that goes from one matrix to another in proportion may be divided by any number in the first and multiplied by it in the second:
from v to o, from up to down of a gated MLP. Rows of the second matrix that share a scale should be alike in size, and a channel with
large activations needs finer steps. The first matrix has a scale for every output, but those of one group span a factor of 256 only.

Source: data-free quantisation (Nagel et al., 2019); the exponents are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from exl2nb.converter.hessian import row_batches
from exl2nb.converter.weights import DenseWeights
from exl2nb.model import reference
from exl2nb.model.layout import Linear, layer_linears

MEASURED_ROWS = 4  # calibration rows whose activations are measured
ACTIVATION_POWER = 0.25  # of a channel's activation
WEIGHT_POWER = -0.5  # of the size of a channel's row
MAX_CHANNEL_SCALE = 256.0  # no channel is scaled by more than this, or less than its inverse


def equalize(weights: DenseWeights, ids: Tensor, step: Callable[[str], None] = lambda detail: None) -> dict[str, Tensor]:
    """What to multiply tensors with; the model computes the same afterwards.

    Args:
        ids: calibration rows int `(R, S)`, of which MEASURED_ROWS are run through it.
        step: called with a line of text after every layer.

    Returns:
        Tensor name -> factors f32 on the CPU that broadcast to it.
    """
    config, ends = weights.config, weights.ends()
    x = reference.embed(config, ends, ids[:: max(1, len(ids) // MEASURED_ROWS)][:MEASURED_ROWS].to(weights.device))
    del ends
    made: dict[str, Tensor] = {}
    for layer in range(config.num_layers):
        linears, tensors, energy = layer_linears(config, layer), weights.layer(layer, then=layer + 1), dict[str, Tensor]()

        def capture(key: str, value: Tensor, rows: Tensor | None = None, energy: dict[str, Tensor] = energy) -> None:
            energy[key] = energy.get(key, 0) + value.flatten(0, -2).square().sum(0, dtype=torch.float64)

        for part in row_batches(config, x, 0, len(x)):
            x[part] = reference.block(config, layer, tensors, x[part], capture)
        for first, second in _equalized_pairs(config.gated, bool(config.clip_qkv), linears):
            if second.key in energy:  # not an expert that none of these tokens chose
                heads = config.num_kv_heads if first.role == "v" else 1
                scale = _channel_scales(tensors[f"{second.key}.weight"], energy[second.key], heads, first.out_features // heads).cpu()
                made |= _channel_factors(first, second, scale, heads)
        step(f"scales, layer {layer}")
    return made


def _equalized_pairs(gated: bool, clipped: bool, linears: Mapping[str, Linear]) -> list[tuple[Linear, Linear]]:
    """First and second matrices; what is cut to a range, or goes through an activation, is not in proportion."""
    ups = [role for role in linears if gated and role.partition(".")[0].endswith("up")]
    return [*([] if clipped else [(linears["v"], linears["o"])]), *((linears[up], linears[up.replace("up", "down")]) for up in ups)]


def _channel_scales(weight: Tensor, energy: Tensor, heads: int, size: int) -> Tensor:
    """By what the channels of the second matrix f32 `(N, K)` are multiplied: f32 `(heads * size,)`, one for all K that a channel feeds."""
    rows = weight.square().mean(0, dtype=torch.float64)
    logs = (ACTIVATION_POWER * energy.clamp_min(1e-30).log() + WEIGHT_POWER * rows.clamp_min(1e-30).log()) / 2
    logs = torch.where((energy > 0) & (rows > 0), logs, torch.nan).view(heads, -1, size).nanmean(1).flatten()
    logs = (logs - logs.nanmean()).nan_to_num(0.0)
    return logs.exp().clamp(1 / MAX_CHANNEL_SCALE, MAX_CHANNEL_SCALE).float()


def _channel_factors(first: Linear, second: Linear, scale: Tensor, heads: int) -> dict[str, Tensor]:
    spread = scale.view(heads, 1, -1).expand(-1, second.in_features // len(scale), -1).reshape(1, -1)
    made = {f"{first.key}.weight": 1 / scale[:, None], f"{second.key}.weight": spread.contiguous()}
    return {**made, f"{first.key}.bias": 1 / scale} if first.bias else made

"""What GPTQ needs to know of a linear's inputs: weighted second moments, their order and their factor. Knows nothing of bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from exl2nb.core.errors import ConversionError
from exl2nb.model import reference
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import layer_linears

# linears that read the same tensor, filed under the first of them
INPUTS: tuple[tuple[str, ...], ...] = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
DAMPING = 0.03
ROWS_PER_BATCH = 4


def input_of(roles: Iterable[str]) -> dict[str, str]:
    """Role -> name of its input, for the roles that a layer has."""
    present = set(roles)
    groups = [[role for role in group if role in present] for group in INPUTS]
    return {role: group[0] for group in groups for role in group}


@dataclass(frozen=True)
class Factor:
    """Activation order and factor of one input.

    perm: int64 `(K,)`, original row of each stored row, strongest channel first. upper: f32 `(K, K)`, U with inv(H) = U^T U in that order.
    """

    perm: Tensor
    upper: Tensor


class Moments:
    """Sums `x^T diag(weight) x` of the inputs of one layer, in fp64 across batches."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._totals: dict[str, float] = {}

    def add(self, name: str, x: Tensor, weight: Tensor | None = None) -> None:
        """Add tokens x f32 `(..., K)`, each counted `weight` `(tokens,)` times."""
        x = x.detach().flatten(0, -2)
        scaled = x if weight is None else x * weight[:, None]
        moment = (scaled.T @ x).double()
        total = float(x.shape[0] if weight is None else weight.double().sum())
        if name in self._sums:
            self._sums[name] += moment
            self._totals[name] += total
        else:
            self._sums[name], self._totals[name] = moment, total

    def hessians(self) -> dict[str, Tensor]:
        """Name -> f64 `(K, K)`, per unit of weight."""
        return {name: moment / max(self._totals[name], 1e-300) for name, moment in self._sums.items()}


def factorize(hessian: Tensor, *, damping: float = DAMPING, name: str = "input") -> Factor:
    """Order the channels by strength and factor the damped inverse, in fp64.

    Channels without activity cost nothing and keep their place at the end; damping makes the matrix positive.

    Args:
        hessian: f64 `(K, K)`, symmetric.
        damping: added to the diagonal, as a share of its mean.
        name: for the message.

    Raises:
        ConversionError: the matrix holds NaN or infinity, or cannot be factored at any damping.
    """
    if not torch.isfinite(hessian).all():
        raise ConversionError(
            f"{name}: the calibration activations hold NaN or infinity; expected finite ones: does the model run in fp32?"
        )
    diagonal = hessian.diagonal()
    perm = torch.argsort(diagonal, descending=True, stable=True)
    ordered = hessian[perm][:, perm]
    mean = float(diagonal.mean()) or 1.0
    eye = torch.eye(len(perm), dtype=torch.float64)
    for share in (damping, 10 * damping, 1.0):
        lower, failed = torch.linalg.cholesky_ex(ordered + eye * (share * mean))
        if failed:
            continue
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return Factor(perm, upper.float().contiguous())
    raise ConversionError(f"{name}: its Hessian cannot be factored; expected a positive matrix; use more calibration rows")


def layer_hessians(
    config: ModelConfig, layer: int, weights: Mapping[str, Tensor], x: Tensor, token_weights: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Hessians of one layer's inputs on the stream x f32 `(rows, S, H)`: name in INPUTS -> f64 `(K, K)`.

    Args:
        config: the model.
        layer: its index.
        weights: at least this layer's dense tensors.
        x: the residual stream before the layer.
        token_weights: per input, f32 `(rows * S,)`; None counts every token once.
    """
    moments, size = Moments(), x.shape[1]
    table = layer_linears(config, layer)
    first = {table[name].key: name for name in input_of(table).values()}
    for begin in range(0, len(x), ROWS_PER_BATCH):
        batch = x[begin : begin + ROWS_PER_BATCH]

        def capture(key: str, value: Tensor, begin: int = begin) -> None:
            if key in first:
                weight = None if token_weights is None else token_weights[first[key]][begin * size :][: value.shape[0] * size]
                moments.add(first[key], value, weight)

        reference.block(config, layer, weights, batch, capture)
    return moments.hessians()


def advance(config: ModelConfig, layer: int, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The stream after one layer, f32 `(rows, S, H)`, a few rows at a time."""
    return torch.cat([reference.block(config, layer, weights, part) for part in x.split(ROWS_PER_BATCH)])

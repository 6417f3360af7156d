"""What GPTQ needs of a linear's inputs and outputs: weighted second moments, their order and their factors. Knows nothing of bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from exl2nb.converter.streams import Stream
from exl2nb.core.errors import ConversionError
from exl2nb.model import reference
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import role_groups
from exl2nb.ops.bf16x3 import matmul

# linears that read the same tensor, filed under the first of them
SHARED_INPUTS: tuple[tuple[str, ...], ...] = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
HESSIAN_DAMPING = 0.03
COUPLING_DAMPING = 0.2  # demo model, 3 bits, head shared: KL 0.181 at 0.03, 0.167 at 0.1 and at 0.3, 0.180 without coupling
ROWS_PER_BATCH = 4
MAX_SCORE_NUMBERS = 1 << 25  # attention scores at once on a GPU: 128 MiB; 4 rows of 512 tokens for 32 heads
MAX_INNER_NUMBERS = 1 << 25  # numbers of an MLP's widest activation at once on a GPU
MOST_IN_F64 = 8192  # inputs; more than these make matrices of half a GB and more, and some tens of batches lose nothing in fp32
AT_ONCE = 1 << 26  # numbers of a matrix whose target is shifted at a time
SMALLEST_PRODUCT = 192  # columns of a piece of a symmetric product
TOKENS_PER_DIRECTION = 16  # tokens per direction that the sweep uses
MAX_WHOLE_OUTPUTS = 1024  # outputs of a matrix that are all coupled
BLOCK_OUTPUTS = 256  # outputs per coupled block of a larger matrix
Written = TypeVar("Written", bound=Stream)


def role_inputs(roles: Iterable[str]) -> dict[str, str]:
    """Role -> name of its input (the first role that reads it), for the roles that a layer has; every expert has its own."""
    found: dict[str, str] = {}
    for module in role_groups(roles):
        first: dict[int, str] = {}
        for role in module:
            found[role] = first.setdefault(_stage_of_role(role), role)
    return found


def strip_expert(name: str) -> str:
    """A role or input without its expert: all experts of a layer share one weight per token."""
    return name.partition(".")[0]


def _stage_of_role(role: str) -> int:
    stem = role.partition(".")[0].rpartition("_")[2]  # "gate.7" and "shared_gate" are gates
    return next(place for place, group in enumerate(SHARED_INPUTS) if stem in group)


@dataclass(frozen=True)
class Factor:
    """Activation order and factor of one input.

    perm: int64 `(K,)`, original row of each stored row, strongest channel first. upper: f32 `(K, K)`, U with inv(H) = U^T U in that order,
    H damped.
    """

    perm: Tensor
    upper: Tensor

    def stored(self, weight: Tensor, cross: Tensor | None = None, strength: float = 0, further: Tensor | None = None) -> Tensor:
        """A matrix as rounding takes it, f32 `(K, N)`; with `cross` shifted so that its outputs on these inputs approach those
        on the dense model's inputs.

        Args:
            weight: f32 `(N, K)`.
            cross: f64 `(K, K)`, mean of x^T (dense x - x) under the Hessian's weights.
            strength: of the shift, 0 (nothing) to 1 (the least-squares answer).
            further: f64 `(K, N)`, mean of x^T d under the Hessian's weights, for outputs that shall be larger by d.
        """
        made, most = weight.new_empty(weight.shape[1], weight.shape[0]), max(1, AT_ONCE // weight.shape[1])
        wanted = None if cross is None else cross.float()[self.perm]
        for first in range(0, len(weight), most):
            part, columns = slice(first, first + most), weight[first : first + most].T
            made[:, part] = columns[self.perm]
            if wanted is not None:
                shift = matmul(self.upper.T, matmul(self.upper, matmul(wanted, columns)))
                made[:, part] += shift.mul_(strength)
            if further is not None:
                made[:, part] += matmul(self.upper.T, matmul(self.upper, further[:, part].float()[self.perm]))
        return made


@dataclass(frozen=True)
class Coupling:
    """How the outputs of one matrix belong together, after damping, with V^T V the inverse of their mean products of gradients.

    perm: int64 `(N,)`, original column of each processed one, most sensitive first within a block. factor: f32 `(N / B, B, B)`, strictly
    upper, V[m, j] / V[m, m]. spread: f32 `(N,)`, 1 / V[m, m].
    """

    perm: Tensor
    factor: Tensor
    spread: Tensor


def coupled_block(out_features: int) -> int:
    """Columns per block of coupled outputs."""
    return (
        out_features if out_features <= MAX_WHOLE_OUTPUTS else next((b for b in (BLOCK_OUTPUTS, 128, 64, 32) if out_features % b == 0), 1)
    )


def couple_outputs(products: Tensor, *, damping: float = COUPLING_DAMPING) -> Coupling | None:
    """Order and factor the outputs' products of gradients; None where there is nothing to couple.

    Args:
        products: f32 or f64 `(N / B, B, B)`, symmetric.
        damping: added to the diagonal, as a share of its mean.
    """
    blocks, size = products.shape[:2]
    products = products.double()
    diagonal = products.diagonal(dim1=1, dim2=2)
    mean = float(diagonal.mean())
    if size % 16 or not 0 < mean < math.inf:
        return None
    perm = torch.argsort(diagonal, dim=1, descending=True, stable=True)
    index, back = torch.arange(blocks, device=products.device)[:, None, None], perm.flip(1)
    flipped = products[index, back[:, :, None], back[:, None, :]]
    flipped.diagonal(dim1=1, dim2=2).add_(damping * mean)
    lower, failed = torch.linalg.cholesky_ex(flipped)
    if failed.any():
        return None
    upper = _lower_inverse(lower).flip(1, 2)
    diag = upper.diagonal(dim1=1, dim2=2)
    factor = torch.triu(upper / diag[:, :, None], 1).float().contiguous()
    whole = (perm + torch.arange(blocks, device=perm.device)[:, None] * size).flatten()
    return Coupling(whole, factor, (1 / diag).flatten().float().contiguous())


def check_finite(x: Tensor, name: str) -> None:
    """Raise ConversionError for NaN or infinity."""
    if not torch.isfinite(x).all():
        raise ConversionError(f"{name} holds NaN or infinity; expected finite activations: do its weights run in fp32?")


def input_moment(x: Tensor, y: Tensor) -> Tensor:
    """`x^T y` for x and y f32 `(tokens, K)`."""
    return matmul(x.T, y)


def symmetric_moment(x: Tensor, y: Tensor | None = None) -> Tensor:
    """`x^T y` where that is symmetric, x and y f32 `(tokens, K)`, y = x if left out: computed above the diagonal and mirrored."""
    y, size = x if y is None else y, x.shape[1]
    width = max(SMALLEST_PRODUCT, size // 8)
    if x.is_cuda or size <= width:
        return input_moment(x, y)
    out = x.new_empty(size, size)
    for first in range(0, size, width):
        last = min(first + width, size)
        out[first:last, first:] = x[:, first:last].T @ y[:, first:]
        out[last:, first:last] = out[first:last, last:].T
    return out


def stride_of(tokens: int, size: int) -> int:
    """Every how many tokens are enough to know `size` directions; odd, so that no place in a row is left out."""
    return max(1, (tokens // (TOKENS_PER_DIRECTION * size) - 1) | 1)


class Moments:
    """Sums `x^T diag(weight) x` of the inputs of one layer, in fp64 across batches, in fp32 above MOST_IN_F64 inputs."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._totals: dict[str, Tensor] = {}
        self.tokens: dict[str, int] = {}

    def add(self, name: str, x: Tensor, weight: Tensor | None = None) -> None:
        """Add tokens x f32 `(..., K)`, each counted `weight` `(tokens,)` times."""
        x = x.detach().flatten(0, -2)
        self._add(name, symmetric_moment(x) if weight is None else symmetric_moment(x * weight[:, None], x), weight, len(x))

    def add_cross(self, name: str, x: Tensor, other: Tensor, weight: Tensor | None = None) -> None:
        """Add `x^T diag(weight) other` for tokens x, other f32 `(..., K)`."""
        x, other = x.detach().flatten(0, -2), other.detach().flatten(0, -2)
        self._add(name, input_moment(x if weight is None else x * weight[:, None], other), weight, len(x))

    def _add(self, name: str, found: Tensor, weight: Tensor | None, tokens: int) -> None:
        self.tokens[name] = self.tokens.get(name, 0) + tokens
        total = found.new_tensor(tokens, dtype=torch.float64) if weight is None else weight.double().sum()
        if name in self._sums:
            self._sums[name] += found
            self._totals[name] = self._totals[name] + total
        else:
            self._sums[name], self._totals[name] = found.double() if len(found) <= MOST_IN_F64 else found, total

    def hessians(self) -> dict[str, Tensor]:
        """Name -> f64 or f32 `(K, K)`, per unit of weight."""
        for name, found in self._sums.items():  # in place: one may take a GB
            found /= self._totals[name].clamp_min(1e-300)
            self._totals[name] = torch.ones_like(self._totals[name])
        return dict(self._sums)


def factorize(hessian: Tensor, *, damping: float = HESSIAN_DAMPING, name: str = "input") -> Factor:
    """Order the channels by strength and factor the damped inverse, in fp64.

    Channels without activity cost nothing and keep their place at the end; damping makes the matrix positive. With J reversing the order,
    J H J = L L^T makes U = J inv(L) J: one factorisation and one triangular inverse.

    Args:
        hessian: f32 or f64 `(K, K)`, symmetric.
        damping: added to the diagonal, as a share of its mean.

    Raises:
        ConversionError: the matrix holds NaN or infinity, or cannot be factored at any damping.
    """
    if not math.isfinite(float(hessian.sum(dtype=torch.float64))):
        raise ConversionError(
            f"{name}: the calibration activations hold NaN or infinity; expected finite ones: does the model run in fp32?"
        )
    diagonal = hessian.diagonal()
    perm = torch.argsort(diagonal, descending=True, stable=True)
    mean, back = float(diagonal.mean(dtype=torch.float64)) or 1.0, perm.flip(0)
    flipped = torch.empty_like(hessian, dtype=torch.float64)  # at 11008 inputs each of these is 1 GB
    for first in range(0, len(back), 1024):
        flipped[first : first + 1024] = hessian[back[first : first + 1024]][:, back]
    del hessian, diagonal
    added = 0.0
    for share in (damping, 10 * damping, 1.0):
        flipped.diagonal().add_((share - added) * mean)
        added = share
        lower, failed = torch.linalg.cholesky_ex(flipped)
        if not failed:
            del flipped
            inverse = _lower_inverse(lower)
            del lower
            upper = inverse.float()
            del inverse
            return Factor(perm, upper.flip(0, 1).contiguous())
    raise ConversionError(f"{name}: its Hessian cannot be factored; expected a positive matrix; use more calibration rows")


def _lower_inverse(lower: Tensor) -> Tensor:
    """Of a lower triangular f64 matrix, or of many `(..., K, K)`."""
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand(lower.shape).contiguous()
    return torch.linalg.solve_triangular(lower, eye, upper=False, out=eye)


def row_batches(config: ModelConfig, x: Stream, first: int, last: int) -> list[slice]:
    """Rows `first` to `last` of a stream x `(rows, S, H)` cut into what the network runs at once; a GPU: what MAX_SCORE_NUMBERS and
    MAX_INNER_NUMBERS allow.
    """
    rows = gpu_rows(config, x.shape[1]) if x.is_cuda else ROWS_PER_BATCH
    return [slice(start, min(start + rows, last)) for start in range(first, last, rows)]


def gpu_rows(config: ModelConfig, length: int) -> int:
    """Rows of `length` tokens that a GPU runs at once."""
    return max(1, min(MAX_SCORE_NUMBERS // (config.num_heads * length**2), MAX_INNER_NUMBERS // (config.intermediate_size * length)))


def advance_stream(config: ModelConfig, layer: int, weights: Mapping[str, Tensor], x: Stream, made: Written) -> Written:
    """The stream after one layer, written to `made`, f32 `(rows, S, H)`, a few rows at a time."""
    for part in row_batches(config, x, 0, len(x)):
        made[part] = reference.block(config, layer, weights, x[part])
    return made

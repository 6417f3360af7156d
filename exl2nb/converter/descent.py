"""Coordinate descent over what is stored of one matrix, on the loss that GPTQ rounds for. Knows nothing of files or models.

The loss is tr(G E^T H E): E = target - what the loader computes, H the damped Hessian of the inputs, G the damped products of the
outputs' gradients, or the identity. GPTQ chooses a code while the rows below are not rounded, and a scale before it has rounded with it.
Descent goes over the finished matrix again, group by group: scale indices, the largest step, then every code, each at its best with the
others fixed.

G couples columns: changes that are good one at a time may be bad together. Of the changes of a row that gain alone, those are made that
gain at least some share of what the best one gains: the share, of GAIN_SHARES, at which they gain most together, computed exactly. The best
one alone is always a choice, so the loss never rises.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from exl2nb.converter.hessian import AT_ONCE, Coupling, Factor
from exl2nb.ops.bf16x3 import matmul
from exl2nb.ops.gptq import Quantized

GAIN_SHARES = (0.0, 0.1, 0.3, 0.6, 1.0)
SCALE_ROUNDS = 2  # per row and per group, where columns are coupled
MIN_SWEEP_GAIN = 1e-3  # a sweep that gains less, as a share of the loss, is the last one
SCALE_INDICES = 16
MIN_LARGEST_STEP = 2.0**-16
MAX_WEIGHT = 65000.0


def descend(
    stored: Tensor, made: Quantized, factor: Factor, groups: Sequence[tuple[int, int]], coupling: Coupling | None, sweeps: int
) -> Quantized:
    """The matrix after descent.

    Args:
        stored: f32 `(K, N)`, what was rounded (`Factor.stored`).
        made: what GPTQ gave.
        factor, groups, coupling: as of `rounding.quantize_matrix`.
        sweeps: over the whole matrix, at most.

    Returns:
        On the device of `made`; the loss, f32 `(1, 1)`, is that of the whole matrix and never larger than before.

    Cost: per sweep two products `(K, K) x (K, N)`, SCALE_ROUNDS * len(GAIN_SHARES) products `(K, B) x (B, B)` for each block of B coupled
    columns, and some tens of small operations for each of K rows.
    """
    device, columns = made.codes.device, stored.shape[1]
    hessian = torch.cholesky_inverse(factor.upper.to(device).double(), upper=True).float()
    wide = columns if coupling is not None else max(1, AT_ONCE // len(stored))
    if columns <= wide:
        return _run_descent(_Descent(stored.to(device), made, hessian, groups, coupling), sweeps)
    parts = [slice(first, first + wide) for first in range(0, columns, wide)]  # a head's columns share nothing but the largest steps
    pieces = [made._replace(codes=made.codes[:, part], scale_index=made.scale_index[:, part]) for part in parts]
    found = [
        _run_descent(_Descent(stored[:, part].to(device), piece, hessian, groups, None, whole=False), sweeps)
        for part, piece in zip(parts, pieces)
    ]
    codes, index, loss = (torch.cat([getattr(one, name) for one in found], 1) for name in ("codes", "scale_index", "loss"))
    return Quantized(codes, index, made.scale_max, loss.sum(1, keepdim=True))


def _run_descent(descent: _Descent, sweeps: int) -> Quantized:
    loss = descent.loss()
    for _ in range(sweeps):
        before = descent.state()
        descent.sweep()
        found = descent.loss()
        if not found < loss:
            descent.restore(before)
            break
        small, loss = found > (1 - MIN_SWEEP_GAIN) * loss, found
        if small:
            break
    return descent.result(loss)


class _Descent:
    """One matrix on its way, columns in the coupling's order, in blocks of B.

    Args:
        whole: whether these are all columns, so that the largest steps may change.
    """

    def __init__(
        self,
        target: Tensor,
        made: Quantized,
        hessian: Tensor,
        groups: Sequence[tuple[int, int]],
        coupling: Coupling | None,
        *,
        whole: bool = True,
    ) -> None:
        device, ends = target.device, itertools.accumulate(rows for _, rows in groups)
        self._parts = [(bits, slice(end - rows, end)) for (bits, rows), end in zip(groups, ends)]
        self._hessian, self._whole = hessian, whole
        self._order, self._products = torch.arange(target.shape[1], device=device), None
        if coupling is not None:
            self._order = coupling.perm.to(device)
            upper, spread = coupling.factor.to(device).double(), coupling.spread.to(device).double()
            upper.diagonal(dim1=1, dim2=2).fill_(1)
            self._products = torch.cholesky_inverse(upper / spread.view(len(upper), -1, 1), upper=True).float()
        self._diagonal = 1.0 if self._products is None else self._products.diagonal(dim1=1, dim2=2).flatten()
        self._shares = hessian.new_tensor(GAIN_SHARES)[:, None]  # made once: a copy to a GPU for every row would take longer than the row
        self._rounds = 1 if self._products is None else SCALE_ROUNDS
        self._target, self._index, self._scale_max = target[:, self._order], made.scale_index[:, self._order], made.scale_max.float()
        self._codes = made.codes[:, self._order].float()
        for bits, part in self._parts:
            self._codes[part] -= 1 << (bits - 1)

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """A copy of what changes."""
        return self._codes.clone(), self._index.clone(), self._scale_max.clone()

    def restore(self, state: tuple[Tensor, Tensor, Tensor]) -> None:
        """Stand where `state` was taken."""
        self._codes, self._index, self._scale_max = state

    def result(self, loss: float) -> Quantized:
        """As GPTQ gives it."""
        back, codes = torch.argsort(self._order), self._codes.clone()
        for bits, part in self._parts:
            codes[part] += 1 << (bits - 1)
        return Quantized(codes.to(torch.uint8)[:, back], self._index[:, back], self._scale_max.half(), codes.new_full((1, 1), loss))

    def loss(self) -> float:
        """Of the whole matrix."""
        error = self._error()
        return float((self._coupled(error) * matmul(self._hessian, error)).sum(dtype=torch.float64))

    def sweep(self) -> None:
        """Once over all groups."""
        moment = matmul(self._hessian, self._error())  # H E, kept right for rows to come
        for at, (bits, part) in enumerate(self._parts):
            before, local = self._made(at), moment[part].clone()
            self._index_at_best(at, local)
            if self._whole:
                self._largest_at_best(at, local)
            self._codes_at_best(at, bits, local)
            moment -= matmul(self._hessian[:, part], self._made(at) - before)

    def _error(self) -> Tensor:
        return self._target - torch.cat([self._made(at) for at in range(len(self._parts))])

    def _made(self, at: int) -> Tensor:
        """What the loader computes of a group, f32 `(rows, N)`."""
        return (self._codes[self._parts[at][1]] * self._steps(at)).half().float()

    def _steps(self, at: int) -> Tensor:
        return _group_steps(self._index[at], self._scale_max[at])

    def _coupled(self, x: Tensor) -> Tensor:
        """`x G` for x f32 `(rows, N)`."""
        if self._products is None:
            return x
        return (_column_blocks(x, self._products) @ self._products).transpose(0, 1).reshape(x.shape)

    def _index_at_best(self, at: int, local: Tensor) -> None:
        """Scale indices at the codes that are there. local: the group's rows of H E, kept right."""
        _, part = self._parts[at]
        hessian, codes = self._hessian[part, part], self._codes[part]
        shifted = matmul(hessian, codes)
        curve = (codes * shifted).sum(0) * self._diagonal
        form = (
            None
            if self._products is None
            else _column_blocks(codes, self._products).mT @ _column_blocks(shifted, self._products) * self._products
        )
        every = _group_steps(torch.arange(SCALE_INDICES, device=codes.device)[:, None], self._scale_max[at])
        for _ in range(self._rounds):
            before, slope = self._made(at), (codes * self._coupled(local)).sum(0)
            move = every - self._steps(at)
            gain, pick = (move * (2 * slope - move * curve)).max(0)
            taken = _accepted_changes(move.gather(0, pick[None])[0], gain, slope, self._shares, form) != 0
            self._index[at] = torch.where(taken, pick.to(torch.uint8), self._index[at])
            local -= matmul(hessian, self._made(at) - before)

    def _largest_at_best(self, at: int, local: Tensor) -> None:
        """The group's largest step at the codes and indices that are there, the least-squares answer if that is better once stored."""
        bits, part = self._parts[at]
        hessian, before, kept = self._hessian[part, part], self._made(at), self._scale_max[at].clone()
        shifted, coupled = matmul(hessian, before), self._coupled(local)
        growth = (coupled * before).sum() / (self._coupled(before) * shifted).sum().clamp_min(1e-30)
        found = (kept * (1 + growth)).clamp(MIN_LARGEST_STEP, MAX_WEIGHT / (1 << (bits - 1))).half().float()
        self._scale_max[at] = found
        change = self._made(at) - before
        shifted = matmul(hessian, change)
        better = (self._coupled(change) * shifted).sum() < 2 * (coupled * change).sum()
        self._scale_max[at] = torch.where(better, found, kept)
        local -= torch.where(better, shifted, 0)

    def _codes_at_best(self, at: int, bits: int, local: Tensor) -> None:
        """Row after row."""
        _, part = self._parts[at]
        hessian, codes, made, steps = self._hessian[part, part], self._codes[part], self._made(at), self._steps(at)
        low, high, inverse = -(1 << (bits - 1)), (1 << (bits - 1)) - 1, 1 / steps.clamp_min(1e-30)
        for row in range(len(codes)):
            height = hessian[row, row]
            curve = height * self._diagonal
            for _ in range(self._rounds):
                slope = self._coupled(local[row : row + 1])[0]
                levels = ((made[row] + slope / curve) * inverse).round().clamp(low, high)
                found = (levels * steps).half().float()
                move = found - made[row]
                move = _accepted_changes(move, move * (2 * slope - move * curve), slope, self._shares, self._products, height)
                taken = move != 0
                codes[row], made[row] = torch.where(taken, levels, codes[row]), torch.where(taken, found, made[row])
                local.addr_(hessian[:, row], move, alpha=-1)


def _group_steps(index: Tensor, scale_max: Tensor) -> Tensor:
    """f32, as the loader computes them."""
    return ((index.float() + 1).square() * (scale_max / 256).half().float()).half().float()


def _column_blocks(x: Tensor, products: Tensor) -> Tensor:
    """`(rows, N)` as `(N / B, rows, B)`."""
    return x.view(len(x), len(products), -1).transpose(0, 1)


def _accepted_changes(
    move: Tensor, gain: Tensor, slope: Tensor, shares: Tensor, form: Tensor | None, height: Tensor | float = 1.0
) -> Tensor:
    """The changes that are made, f32 `(N,)`, 0 elsewhere.

    Args:
        move: change of each column. gain: what it gains alone. shares: GAIN_SHARES, `(S, 1)`.
        slope, form: a change m of all columns costs height * m form m^T - 2 m slope^T; form: f32 `(N / B, B, B)`, None: diagonal.
    """
    if form is None:
        return torch.where(gain > 0, move, 0)
    gain, move, slope = (x.view(len(form), 1, -1) for x in (gain, move, slope))
    least = gain.amax(-1, keepdim=True) * shares
    tried = torch.where((gain > 0) & (gain >= least), move, 0)
    cost, pick = (tried * (height * (tried @ form) - 2 * slope)).sum(-1).min(1)
    taken = tried.gather(1, pick[:, None, None].expand(-1, 1, tried.shape[-1]))
    return torch.where(cost[:, None, None] < 0, taken, 0).flatten()

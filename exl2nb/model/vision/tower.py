"""A vision tower as data, and its forward pass in torch: patches, positions, blocks, features. One picture or one video at a time.

Shapes: n patches, E width of the tower. Weights are a mapping from names below the tower's prefix to tensors of one dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
Grid = tuple[int, int, int]

ACTIVATION_FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@dataclass(frozen=True, kw_only=True)
class BlockNames:
    """Names of one block's parts. layer: its prefix, {} is the number. qkv: one fused matrix, or three. up: of the MLP, or (gate, up)."""

    layer: str
    norm1: str
    norm2: str
    qkv: tuple[str, ...]
    out: str
    up: tuple[str, ...]
    down: str


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """One tower.

    layers, width, heads: of the transformer. patch: side of a patch in pixels. temporal: frames of a patch. merge: patches come in blocks
    of merge x merge, the order in which they are merged afterwards. names: see `BlockNames`. embed: name of the patch embedding. norm:
    "rms" or "layer". rope: "" (none), "halves" (height turns the first half of the frequencies, width the second) or "alternate" (they take
    turns). positions: "" (none), "table" (one learned row per patch) or "resampled" (a square table, interpolated to the grid);
    position_name: where they are. class_token: name of a row in front of the patches. norm_before, norm_after: names of norms around the
    blocks. window: side of an attention window in pixels, 0 = the whole frame; whole: blocks that see the whole frame nevertheless. taken:
    blocks whose outputs are wanted, counted from 1; 0: what goes into the first.
    """

    layers: int
    width: int
    heads: int
    patch: int
    names: BlockNames
    embed: str
    temporal: int = 1
    merge: int = 1
    norm: str = "layer"
    eps: float = 1e-6
    activation: str = "gelu"
    rope: str = ""
    theta: float = 10000.0
    positions: str = ""
    position_name: str = ""
    class_token: str = ""
    norm_before: str = ""
    norm_after: str = ""
    window: int = 0
    whole: tuple[int, ...] = ()
    taken: tuple[int, ...] = field(default=())

    @property
    def head_dim(self) -> int:
        """Entries of one head."""
        return self.width // self.heads


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """The linear layer of that name."""
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def norm(weights: Weights, name: str, x: Tensor, eps: float, kind: str = "layer") -> Tensor:
    """LayerNorm, or RMS norm in f32."""
    weight = weights[f"{name}.weight"]
    if kind == "layer":
        return F.layer_norm(x, (x.shape[-1],), weight, weights.get(f"{name}.bias"), eps)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def grid_of(tower: TowerConfig, frames: Tensor) -> Grid:
    """Patches in time, height and width of frames `(T, C, H, W)`."""
    return frames.shape[0] // tower.temporal, frames.shape[2] // tower.patch, frames.shape[3] // tower.patch


def patches_of(tower: TowerConfig, frames: Tensor) -> Tensor:
    """Frames f32 `(T, C, H, W)` as rows `(n, C * temporal * patch * patch)`, frame by frame, in blocks of merge x merge."""
    (t, h, w), (p, m, d) = grid_of(tower, frames), (tower.patch, tower.merge, tower.temporal)
    cut = frames.reshape(t, d, frames.shape[1], h // m, m, p, w // m, m, p)
    return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1)


def patch_places(tower: TowerConfig, grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column int64 `(n,)` of each patch, in the order of `patches_of`."""
    t, h, w = grid
    m = tower.merge

    def ordered(values: Tensor) -> Tensor:
        return values.reshape(h // m, m, w // m, m).transpose(1, 2).reshape(-1).repeat(t)

    rows, columns = torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
    return ordered(rows), ordered(columns)


def rotary_tables(tower: TowerConfig, grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines f32 `(n, 1, head_dim)` of 2-D RoPE; the pairs are (j, j + head_dim / 2)."""
    rows, columns = (place.float()[:, None] for place in patch_places(tower, grid, device))
    dim = tower.head_dim
    if tower.rope == "halves":
        inverse = 1.0 / tower.theta ** (torch.arange(0, dim // 2, 2, dtype=torch.float32, device=device) / (dim // 2))
        angles = torch.cat((rows * inverse, columns * inverse), 1)
    else:
        inverse = 1.0 / tower.theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
        angles = torch.cat((rows * inverse[0::2], columns * inverse[1::2]), 1)
    angles = torch.cat((angles, angles), 1)[:, None]
    return angles.cos(), angles.sin()


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """X `(n, heads, D)` turned by its place, computed in f32."""
    wide = x.float()
    a, b = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


def resample_positions(table: Tensor, tower: TowerConfig, grid: Grid) -> Tensor:
    """A learned square of positions `(side * side, E)`, interpolated to the grid, corners on corners: `(n, E)`."""
    side = round(len(table) ** 0.5)

    def taps(place: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        at = place.float() * (side - 1) / max(size - 1, 1)
        low = at.floor()
        return low.long(), (low.long() + 1).clamp(max=side - 1), at - low

    rows, columns = patch_places(tower, grid, table.device)
    top, bottom, down = taps(rows, grid[1])
    left, right, across = taps(columns, grid[2])
    parts = (
        (top, left, (1 - down) * (1 - across)), (top, right, (1 - down) * across),
        (bottom, left, down * (1 - across)), (bottom, right, down * across),
    )  # fmt: skip
    stacked = torch.stack([table[row * side + column] * weight[:, None] for row, column, weight in parts], 1)
    return stacked.sum(1)


def window_order(tower: TowerConfig, grid: Grid, device: torch.device) -> tuple[Tensor, list[int]]:
    """The order of the merged blocks by attention window, int64, and the number of patches of each window.

    Windows have window / patch / merge blocks a side; those at the right and lower edge are smaller, and come last in their frame.
    """
    t, h, w = grid[0], grid[1] // tower.merge, grid[2] // tower.merge
    side = tower.window // tower.merge // tower.patch
    number = torch.arange(t * h * w, device=device).reshape(t, h, w)
    pieces: list[Tensor] = []
    for frame in number:
        cut = [frame[top : top + side, left : left + side].reshape(-1) for top in range(0, h, side) for left in range(0, w, side)]
        pieces += sorted(cut, key=len, reverse=True)  # equal ones side by side: `attention` takes them together
    return torch.cat(pieces), [len(piece) * tower.merge**2 for piece in pieces]


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attention of q, k, v `(n, heads, D)` within segments of these lengths: `(n, heads * D)`."""
    out: list[Tensor] = []
    at = 0
    for length, run in itertools.groupby(lengths):  # equal neighbours are one batch
        count = len(list(run))
        cut = slice(at, at + count * length)
        a, b, c = (part[cut].unflatten(0, (count, length)).transpose(1, 2) for part in (q, k, v))
        out.append(F.scaled_dot_product_attention(a, b, c).transpose(1, 2).flatten(2).flatten(0, 1))
        at = cut.stop
    return out[0] if len(out) == 1 else torch.cat(out)


def block(
    tower: TowerConfig, weights: Weights, layer: int, x: Tensor, turn: tuple[Tensor, Tensor] | None, lengths: Sequence[int]
) -> Tensor:
    """One block on x `(n, E)`."""
    names = tower.names
    stem = names.layer.format(layer)
    h = norm(weights, f"{stem}.{names.norm1}", x, tower.eps, tower.norm)
    made = torch.cat([linear(weights, f"{stem}.{part}", h) for part in names.qkv], 1)
    q, k, v = made.reshape(len(x), 3, tower.heads, tower.head_dim).unbind(1)
    if turn is not None:
        q, k = rotate_heads(q, *turn), rotate_heads(k, *turn)
    x = x + linear(weights, f"{stem}.{names.out}", attention(q, k, v, lengths))
    h = norm(weights, f"{stem}.{names.norm2}", x, tower.eps, tower.norm)
    inner = ACTIVATION_FUNCTIONS[tower.activation](linear(weights, f"{stem}.{names.up[0]}", h))
    if len(names.up) == 2:
        inner = inner * linear(weights, f"{stem}.{names.up[1]}", h)
    return x + linear(weights, f"{stem}.{names.down}", inner)


def forward(tower: TowerConfig, weights: Weights, frames: Tensor) -> list[Tensor]:
    """The outputs of the blocks in `taken`, in that order, each `(n, E)`, in the order of `patches_of`; the class token comes first.

    Args:
        frames: f32 `(T, C, H, W)`, normalised; H and W multiples of patch * merge, T of `temporal`.
    """
    embed = weights[f"{tower.embed}.weight"]
    x = F.linear(patches_of(tower, frames).to(embed.dtype), embed.flatten(1), weights.get(f"{tower.embed}.bias"))
    grid = grid_of(tower, frames)
    if tower.class_token:
        x = torch.cat((weights[tower.class_token].reshape(1, -1).to(x.dtype), x))
    if tower.positions == "table":
        x = x + weights[f"{tower.position_name}.weight"]
    elif tower.positions == "resampled":
        x = x + resample_positions(weights[f"{tower.position_name}.weight"], tower, grid).to(x.dtype)
    if tower.norm_before:
        x = norm(weights, tower.norm_before, x, tower.eps, tower.norm)
    turn = rotary_tables(tower, grid, x.device) if tower.rope else None
    frame = [len(x) // grid[0]] * grid[0]
    order, in_windows = None, frame
    if tower.window:
        blocks, in_windows = window_order(tower, grid, x.device)
        size = tower.merge**2
        order = (blocks[:, None] * size + torch.arange(size, device=x.device)).reshape(-1)
        x = x[order]
        turn = None if turn is None else (turn[0][order], turn[1][order])
    found: dict[int, Tensor] = {}
    last = max(tower.taken)
    for layer in range(last + 1):
        if layer in tower.taken:
            found[layer] = x if order is None else torch.empty_like(x).index_copy_(0, order, x)
        if layer < last:
            x = block(tower, weights, layer, x, turn, in_windows if tower.window and layer not in tower.whole else frame)
    return [norm(weights, tower.norm_after, found[i], tower.eps, tower.norm) if tower.norm_after else found[i] for i in tower.taken]

"""Named places in a forward pass, by TransformerLens' names: which there are, their shapes, patterns of names, edits. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor

from exl2nb.core.errors import OptionError
from exl2nb.core.options import several, shown
from exl2nb.model.config import ModelConfig

TOKEN_DIM = -1  # a dimension of tokens in `Point.shape`
LOGITS_POINT = "logits"


@dataclass(frozen=True)
class Point:
    """name: as TransformerLens has it, without the batch dimension in `shape`, where `T` stands for the tokens. layer: -1 outside."""

    name: str
    layer: int
    shape: tuple[int, ...]
    whole: bool = False  # whole numbers

    @property
    def part(self) -> str:
        """The name inside its layer: "attn.hook_z"."""
        return self.name.split(".", 2)[2] if self.layer >= 0 else self.name

    def sized(self, tokens: int) -> tuple[int, ...]:
        """Its shape for so many tokens."""
        return tuple(tokens if size == TOKEN_DIM else size for size in self.shape)


@dataclass(frozen=True)
class Hook:
    """What a function that edits is told. name, layer: of the point. start: position of the first token of the tensor."""

    name: str
    layer: int
    start: int


Edit = Tensor | float | Callable[[Tensor, Hook], "Tensor | None"]


def model_points(config: ModelConfig) -> dict[str, Point]:
    """Every point of a model, in running order."""
    H, Hq, Hkv, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    found = [Point("hook_embed", -1, (TOKEN_DIM, H))]
    for layer in range(config.num_layers):
        parts: dict[str, tuple[int, ...]] = {
            "hook_resid_pre": (TOKEN_DIM, H), "ln1.hook_normalized": (TOKEN_DIM, H), "attn.hook_q": (TOKEN_DIM, Hq, D),
            "attn.hook_k": (TOKEN_DIM, Hkv, D),
            "attn.hook_v": (TOKEN_DIM, Hkv, D), "attn.hook_rot_q": (TOKEN_DIM, Hq, D), "attn.hook_rot_k": (TOKEN_DIM, Hkv, D),
            "attn.hook_attn_scores": (Hq, TOKEN_DIM, TOKEN_DIM), "attn.hook_pattern": (Hq, TOKEN_DIM, TOKEN_DIM),
            "attn.hook_z": (TOKEN_DIM, Hq, D), "hook_attn_out": (TOKEN_DIM, H),
        }  # fmt: skip
        if not config.parallel:
            parts |= {"hook_resid_mid": (TOKEN_DIM, H), "ln2.hook_normalized": (TOKEN_DIM, H)}
        moe = config.experts(layer)
        if moe is None:
            inner = (TOKEN_DIM, config.intermediate_size)
            parts |= {"mlp.hook_pre": inner, **({"mlp.hook_pre_linear": inner} if config.gated else {}), "mlp.hook_post": inner}
        else:
            parts |= {"mlp.hook_expert_weights": (TOKEN_DIM, moe.top_k), "mlp.hook_expert_indices": (TOKEN_DIM, moe.top_k)}
        parts |= {"hook_mlp_out": (TOKEN_DIM, H), "hook_resid_post": (TOKEN_DIM, H)}
        found += [Point(f"blocks.{layer}.{part}", layer, shape, part.endswith("indices")) for part, shape in parts.items()]
    found += [Point("ln_final.hook_normalized", -1, (TOKEN_DIM, H)), Point(LOGITS_POINT, -1, (TOKEN_DIM, config.vocab_size))]
    return {point.name: point for point in found}


def match_points(known: Mapping[str, Point], patterns: str | Iterable[str], *, where: str) -> list[Point]:
    """The points that names or patterns such as "blocks.*.hook_resid_post" mean, in running order.

    Raises:
        OptionError: a pattern that means none.
    """
    wanted: set[str] = set()
    for pattern in several(patterns):
        found = [name for name in known if fnmatchcase(name, pattern)] if isinstance(pattern, str) else []
        if not found:
            parts = ", ".join(point.part for point in known.values() if point.layer == 0)
            raise OptionError(
                f"{where}: no point {shown(pattern)}; known: hook_embed, blocks.N. with one of {parts}; ln_final.hook_normalized, "
                f"{LOGITS_POINT}; and patterns such as blocks.*.hook_resid_post"
            )
        wanted.update(found)
    return [point for name, point in known.items() if name in wanted]


class Edits:
    """What replaces activations, by point; checked against the shapes of `tokens` tokens (0: their number is not known).

    Raises:
        OptionError: an unknown name, a tensor of another shape, or something that is no edit.
    """

    def __init__(self, known: Mapping[str, Point], patch: Mapping[str, Edit], tokens: int, *, where: str = "patch") -> None:
        self._edits: dict[str, list[Edit]] = {}
        for pattern, edit in patch.items():
            for point in match_points(known, pattern, where=where):
                if point.name == LOGITS_POINT:
                    raise OptionError(f"{where}: the logits are the result; edit ln_final.hook_normalized, or the tensor that comes back")
                self._edits.setdefault(point.name, []).append(_check_edit(point, edit, tokens, where))

    def __contains__(self, name: str) -> bool:
        return name in self._edits

    def any(self, names: Iterable[str]) -> bool:
        """Whether one of the points is edited."""
        return any(name in self._edits for name in names)

    def apply(self, point: Point, value: Tensor, start: int) -> Tensor:
        """The value of a point after its edits, a new tensor; `start`: position of its first token."""
        for edit in self._edits[point.name]:
            value = _apply_edit(point, edit, value, start)
        return value


def _check_edit(point: Point, edit: object, tokens: int, where: str) -> Edit:
    if isinstance(edit, (int, float)) and not isinstance(edit, bool):
        return float(edit)
    if isinstance(edit, Tensor):
        want = point.sized(tokens or 1)
        try:
            fits = torch.broadcast_shapes(edit.shape, want) == torch.Size(want)
        except RuntimeError:
            fits = False
        if not fits:
            known = (
                f"{want} for these tokens" if tokens else f"{want}: how many tokens there will be is not known, so one row or a function"
            )
            raise OptionError(f"{where}: {point.name} is given {tuple(edit.shape)}; expected what broadcasts to {known}")
        return edit.detach()
    if callable(edit):
        return cast("Edit", edit)
    raise OptionError(f"{where}: {point.name} is given {shown(edit)}; expected a number, a tensor, or a function of (value, hook)")


def _apply_edit(point: Point, edit: Edit, value: Tensor, start: int) -> Tensor:
    if isinstance(edit, float):
        return torch.full_like(value, edit)
    if isinstance(edit, Tensor):
        piece = edit
        for axis, size in enumerate(point.shape):
            at = axis - len(point.shape) + edit.dim()
            if size == TOKEN_DIM and at >= 0 and edit.shape[at] > 1:
                keys = len(point.shape) == 3 and axis == 2 and point.shape[1] == TOKEN_DIM  # of attention: from the first token on
                piece = piece.narrow(at, 0 if keys else start, value.shape[axis])
        return piece.to(value.device, value.dtype).expand_as(value).clone()
    given = value.clone()
    made = cast("Callable[..., Any]", edit)(given, Hook(point.name, point.layer, start))
    made = given if made is None else made
    if not isinstance(made, Tensor) or made.shape != value.shape:
        got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise OptionError(f"patch: the function for {point.name} returned {got}; expected a tensor {tuple(value.shape)}, or None")
    return made.to(value.device, value.dtype)

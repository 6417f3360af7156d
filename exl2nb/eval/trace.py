"""What passes through a model while it reads a text, as named tensors; and what comes out where some of it is replaced."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exl2nb.cache.spec import parse_mode
from exl2nb.core.errors import OptionError
from exl2nb.core.options import check_range, several
from exl2nb.core.show import size_text
from exl2nb.eval.rows import check_ids
from exl2nb.model.batch import Batch
from exl2nb.model.model import Model
from exl2nb.model.points import LOGITS_POINT, TOKEN_DIM, Edit, Edits, Point, match_points

if TYPE_CHECKING:
    import pandas as pd

    from exl2nb.model.vision.prompt import Placed, PromptPictures

CHUNK_TOKENS = 1024  # tokens of a step: a long text leaves other requests their turn between two of them
ATTENTION_CHUNK = 128  # the same where attention patterns are seen, whose work grows with the tokens before
PATTERN_POINT = "attn.hook_pattern"
HEAD_ROWS_AT_ONCE = 256  # of the residual stream that meet the head at once


@dataclass(frozen=True, eq=False, kw_only=True)
class Trace(Mapping[str, Tensor]):
    """Activations by name, on the CPU: `trace["blocks.3.attn.hook_pattern"]`.

    ids: the T tokens. texts: of each. tensors: float32 (expert numbers int64), T or heads first, as `Point.shape` says. logits: float32
    `(T, V)` where "logits" was captured, else `(1, V)` of the last token. cache: mode of the KV cache. model: its name. pooled: rows and
    columns of attention patterns that were averaged; 0 = none were. pictures: of the prompt, which of the tokens each is.
    """

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    tensors: dict[str, Tensor]
    logits: Tensor
    cache: str
    model: str = ""
    pooled: int = 0
    pictures: tuple[Placed, ...] = ()
    unembed: Callable[[Tensor], Tensor] = field(repr=False)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise KeyError(f"{name!r} was not captured; this trace has {_some(self.tensors)}")
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def nbytes(self) -> int:
        """Memory of the tensors and the logits."""
        return sum(value.nbytes for value in self.tensors.values()) + self.logits.nbytes

    def lens(self, layer: int, where: str = "hook_resid_post") -> Tensor:
        """The logit lens: what the head makes of the residual stream of a layer, float32 `(T, V)`.

        Args:
            layer: its number. where: "hook_resid_pre", "hook_resid_mid" or "hook_resid_post"; it must have been captured.

        Raises:
            OptionError: it was not captured. EngineClosed: the model was closed.
        """
        name = f"blocks.{layer}.{where}"
        if name not in self.tensors or "resid" not in where:
            raise OptionError(f"lens: {name} was not captured; trace again with capture=[{name!r}], or 'blocks.*.hook_resid_post' for all")
        stream = self.tensors[name]
        return torch.cat([self.unembed(rows).float().cpu() for rows in stream.split(HEAD_ROWS_AT_ONCE)])

    def kl(self, other: Trace | Tensor) -> Tensor:
        """KL(self || other) of each position in nats, float32 `(R,)`: how far another run's predictions are from these.

        Raises:
            OptionError: the logits have other shapes: capture "logits" in both, or in neither.
        """
        theirs = other.logits if isinstance(other, Trace) else other
        if theirs.shape != self.logits.shape:
            raise OptionError(f"kl: logits are {tuple(self.logits.shape)} and {tuple(theirs.shape)}; capture 'logits' in both traces")
        return divergence(self.logits, theirs)

    def to_frame(self) -> pd.DataFrame:
        """One row per tensor: name, shape, rms, largest magnitude, and the token where it is (-1 where tokens are not the first axis)."""
        import pandas as pd

        rows = []
        for name, value in self.tensors.items():
            finite = torch.nan_to_num(value.float(), neginf=0.0)
            largest = finite.abs().amax(tuple(range(1, value.dim()))) if value.shape[0] == len(self.ids) else None
            top = float(finite.abs().max())
            where = -1 if largest is None else int(largest.argmax())
            rows.append(
                {"name": name, "shape": tuple(value.shape), "rms": float(finite.square().mean().sqrt()), "max": top, "token": where}
            )
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        of = f" of {self.model}" if self.model else ""
        return f"Trace({len(self.ids)} tokens{of}, {len(self.tensors)} tensors, {size_text(self.nbytes)}: {_some(self.tensors)})"

    def _repr_html_(self) -> str:
        left = "<td style='text-align:left'>"
        rows = "".join(
            f"<tr>{left}{html.escape(row['name'])}</td><td>{row['shape']}</td><td>{row['rms']:.3g}</td><td>{row['max']:.3g}</td></tr>"
            for row in self.to_frame().head(40).to_dict("records")
        )
        more = f"<tr><td colspan=4>and {len(self) - 40} more</td></tr>" if len(self) > 40 else ""
        head = "<tr><th style='text-align:left'>point</th><th>shape</th><th>rms</th><th>largest</th></tr>"
        caption = f"{len(self.ids)} tokens, {self.cache} cache, {size_text(self.nbytes)}"
        return f"<table><caption>{html.escape(caption)}</caption>{head}{rows}{more}</table>"


def _some(names: Mapping[str, Any]) -> str:
    return ", ".join(list(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) of rows of logits `(R, V)`, float32 `(R,)`, nats; never below 0."""
    log_p, log_q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0).float()


class _PointRecorder:
    """Keeps what passes, in tensors allocated beforehand."""

    def __init__(self, found: Sequence[Point], tokens: int, pooled: int) -> None:
        self._tokens, self.pooled = tokens, pooled
        shapes = {point.name: self._shape(point) for point in found}
        kinds = {point.name: torch.int64 if point.whole else torch.float32 for point in found}
        self.tensors = {name: torch.zeros(shape, dtype=kinds[name]) for name, shape in shapes.items()}
        if pooled:
            bins = torch.arange(tokens) * pooled // tokens
            self._bins, self._counts = bins, torch.bincount(bins, minlength=pooled).float()

    def _shape(self, point: Point) -> tuple[int, ...]:
        if self.pooled and point.name.endswith(PATTERN_POINT):
            return point.shape[0], self.pooled, self.pooled
        return point.sized(self._tokens)

    def __call__(self, point: Point, value: Tensor, start: int) -> None:
        kept = self.tensors[point.name]
        if point.shape[1:] != (TOKEN_DIM, TOKEN_DIM):
            kept[start : start + value.shape[0]] = value
            return
        _, n, keys = value.shape
        if self.pooled and point.name.endswith(PATTERN_POINT):
            queries = self._bins[start : start + n].to(value.device)
            mass = value.new_zeros(value.shape[0], n, self.pooled).index_add_(2, self._bins[:keys].to(value.device), value.float())
            mass /= self._counts.to(value.device)[queries][:, None]
            kept.copy_(kept.to(value.device).index_add_(1, queries, mass))
            return
        if point.name.endswith("scores"):
            kept[:, start : start + n] = float("-inf")
        kept[:, start : start + n, :keys] = value


def trace(
    model: Model,
    ids: Sequence[int],
    capture: str | Sequence[str] = (),
    *,
    patch: Mapping[str, Edit] | None = None,
    layers: Mapping[int, Any] | None = None,
    texts: Sequence[str] = (),
    cache: str = "fp32",
    pattern_size: int | None = None,
    max_bytes: int = 1 << 30,
    name: str = "",
    on_step: Callable[[int, Mapping[str, Tensor]], None] | None = None,
    pictures: PromptPictures | None = None,
) -> Trace:
    """Read a text and keep what passes through the model at some points.

    Args:
        model: a loaded model, or an engine's `shared_model`. ids: at least one.
        capture: names and patterns of the model's `points`.
        patch: edits by name or pattern. layers: models of the same shape by the number of the layer that runs with their weights.
        texts: of the ids, for display. cache: mode of the KV cache. name: of the model, for display.
        pattern_size: attention patterns of more tokens are averaged to so many rows and columns: the mean over the queries of a row of the
            attention that the keys of a column get together, so that rows still add up to 1; None = they are kept whole.
        max_bytes: of all tensors.
        on_step: called after each step with the number of tokens read so far and the tensors, which it must not change; later tokens are 0
            in them. What it raises ends the trace.
        pictures: of the ids, encoded and placed.

    Raises:
        OptionError: an unknown name, an edit that does not fit, tensors of more than `max_bytes`; says how many; or a model in which the
            tokens of a picture see each other.
        ContextOverflow: more ids than the context.
    """
    row = check_ids(model, torch.tensor([list(ids)]))[0].tolist()
    check_range("max_bytes", max_bytes, 1, 1 << 50, where="trace")
    if pattern_size is not None:
        check_range("pattern_size", pattern_size, 2, 1 << 14, where="trace")
    if pictures is not None and pictures.blocks:
        raise OptionError("trace: tokens of one picture see each other in this model, which a trace does not follow; give a text alone")
    known: dict[str, Point] = model.points
    found = match_points(known, capture, where="trace") if capture else []
    kept = [point for point in found if point.name != LOGITS_POINT]
    pooled = int(pattern_size) if pattern_size is not None and pattern_size < len(row) else 0
    _check_bytes(found, len(row), pooled, max_bytes)
    edits = Edits(known, patch or {}, len(row))
    borrowed = {layer: _borrowed(model, other, layer, len(row)) for layer, other in (layers or {}).items()}
    recorder = _PointRecorder(kept, len(row), pooled)
    spec = model.cache_spec(len(row), mode=parse_mode(cache, where="trace"))
    pool, pages = model.new_cache(spec), list(range(spec.num_pages))
    long = model.rope_switch is None or len(row) > model.rope_switch
    every, wanted, logits = any(point.name == LOGITS_POINT for point in found), frozenset(recorder.tensors), list[Tensor]()
    squares = edits.any(name for name, point in known.items() if point.shape[1:] == (TOKEN_DIM, TOKEN_DIM)) or any(
        p.shape[1:] == (TOKEN_DIM, TOKEN_DIM) for p in kept
    )
    step = min(CHUNK_TOKENS, ATTENTION_CHUNK) if squares else CHUNK_TOKENS
    with torch.inference_mode():
        for start in range(0, len(row), step):
            rows = "all" if every else "last"
            batch = Batch.single(row[start : start + step], start=start, pages=pages, logit_rows=rows, device=model.device, long=long)
            if pictures is not None:
                count = len(batch.input_ids)
                at = torch.from_numpy(pictures.positions(start, count)).to(batch.positions.device)
                batch = replace(batch, positions=at, pictures=pictures.within(start, count, 0))
            out = model.trace(batch, pool, wanted=wanted, seen=recorder, edits=edits, borrowed=borrowed).float().cpu()
            logits = [*logits, out] if every else [out]
            if on_step is not None:
                on_step(min(start + step, len(row)), recorder.tensors)
    tensors = {key: value.clone() for key, value in recorder.tensors.items()}  # out of inference mode: they may be edited
    return Trace(
        ids=tuple(row), texts=tuple(texts), tensors=tensors, logits=torch.cat(logits).clone(), cache=spec.mode, model=name, pooled=pooled,
        pictures=() if pictures is None else pictures.images, unembed=model.unembed,
    )  # fmt: skip


def _check_bytes(found: Sequence[Point], tokens: int, pooled: int, most: int) -> None:
    sizes = {}
    for point in found:
        square = pooled and point.name.endswith(PATTERN_POINT)
        sizes[point.name] = (8 if point.whole else 4) * (point.shape[0] * pooled**2 if square else math.prod(point.sized(tokens)))
    total = sum(sizes.values())
    if total > most:
        largest = max(sizes, key=lambda name: sizes[name])
        hint = "; pattern_size=512 averages attention patterns" if largest.endswith(PATTERN_POINT) and not pooled else ""
        raise OptionError(
            f"trace: {len(found)} tensors of {tokens} tokens need {total} bytes ({size_text(total)}), more than max_bytes {most} "
            f"({size_text(most)}); the largest is {largest} with {size_text(sizes[largest])}: capture fewer, or raise max_bytes{hint}"
        )


def _borrowed(model: Model, other: Any, layer: int, tokens: int) -> Any:
    ours, theirs = model.config, other.config
    names = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "parallel", "moe")
    unlike = [name for name in names if getattr(ours, name) != getattr(theirs, name)]
    if unlike or model.device != other.device:
        what = f"{unlike[0]} {getattr(theirs, unlike[0])} and not {getattr(ours, unlike[0])}" if unlike else f"its device {other.device}"
        raise OptionError(f"patch: layer {layer} of another model cannot run here: it has {what}; use a model of the same shape and device")
    if not 0 <= layer < ours.num_layers:
        raise OptionError(f"patch: there is no layer {layer}; expected blocks.0 to blocks.{ours.num_layers - 1}")
    return other.layer(layer, tokens)


def continued(
    model: Model,
    ids: Sequence[int],
    *,
    max_tokens: int,
    stop: Sequence[int] = (),
    patch: Mapping[str, Edit] | None = None,
    layers: Mapping[int, Any] | None = None,
    cache: str = "fp32",
    columns: int | None = None,
) -> list[int]:
    """Greedy continuation under edits, token by token on a cache of its own; arguments and errors as in `trace`.

    An edit that is a tensor must fit any number of tokens: one row, or a function. columns: only the first so many ids may be drawn.
    """
    row = check_ids(model, torch.tensor([list(ids)]))[0].tolist()
    total = min(len(row) + max_tokens, model.context)
    spec = model.cache_spec(total, mode=parse_mode(cache, where="patch"))
    pool, pages = model.new_cache(spec), list(range(spec.num_pages))
    edits = Edits(model.points, patch or {}, 0)
    borrowed = {layer: _borrowed(model, other, layer, total) for layer, other in (layers or {}).items()}
    found: list[int] = []
    long = model.rope_switch is None or total > model.rope_switch
    pieces = [row[at : at + CHUNK_TOKENS] for at in range(0, len(row), CHUNK_TOKENS)]
    start = 0
    with torch.inference_mode():
        while pieces:
            piece = pieces.pop(0)
            batch = Batch.single(piece, start=start, pages=pages, device=model.device, long=long)
            logits = model.trace(batch, pool, edits=edits, borrowed=borrowed)
            start += len(piece)
            if not pieces and len(found) < max_tokens and start < total:
                token = int(logits[-1][:columns].argmax())
                found.append(token)
                if token not in stop:
                    pieces.append([token])
    return found


LAYER_PARTS = ("attention", "middle", "output")


@dataclass(frozen=True, eq=False, kw_only=True)
class Hidden(Mapping[str, Tensor]):
    """Activations by point: `hidden["layers.3.output"]` is float32 `(T, H)` on the CPU. ids: the T tokens. texts: of each."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    points: dict[str, Tensor]

    def __getitem__(self, point: str) -> Tensor:
        return self.points[point]

    def __iter__(self) -> Iterator[str]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def __repr__(self) -> str:
        return f"Hidden({len(self.ids)} tokens at {len(self.points)} points: {', '.join(list(self.points)[:6])})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{html.escape(name)}</td><td>{tuple(value.shape)}</td>"
            f"<td>{value.norm(dim=-1).mean().item():.3g}</td><td>{value.abs().max().item():.3g}</td></tr>"
            for name, value in self.points.items()
        )
        head = "<tr><th style='text-align:left'>point</th><th>shape</th><th>mean length</th><th>largest</th></tr>"
        return f"<table><caption>{len(self.ids)} tokens</caption>{head}{rows}</table>"


def point_names(model: Model) -> list[str]:
    """Every point of a model, in running order.

    "embedding"; for each layer i "layers.i.attention" (what the heads read out, before the output projection), "layers.i.middle" (the
    residual stream after attention) and "layers.i.output" (after the layer); "logits".
    """
    layers = [f"layers.{i}.{part}" for i in range(model.config.num_layers) for part in LAYER_PARTS]
    return ["embedding", *layers, "logits"]


def hidden(
    model: Model,
    ids: Sequence[int],
    points: str | Sequence[str],
    *,
    texts: Sequence[str] | None = None,
    cache: str = "fp32",
    adapter: int = -1,
) -> Hidden:
    """Run a text and keep the activations at some points.

    Args:
        model: a loaded model; nothing else may run it during the call.
        ids: at least one.
        points: names as `point_names` lists them, or patterns such as "layers.*.output".
        texts: of the ids, for display. adapter: row of `Model.adapters`, -1 for none.

    Raises:
        OptionError: a name or pattern that is no point. ContextOverflow: more ids than the context.

    Cost: one pass over the ids, op by op; the arrays take 4 bytes * T * width each.
    """
    known = point_names(model)
    wanted: set[str] = set()
    for pattern in several(points):
        found = [name for name in known if fnmatchcase(name, pattern)] if isinstance(pattern, str) else []
        if not found:
            raise OptionError(
                f"hidden: no point {pattern!r}; known: embedding, layers.0.attention, layers.0.middle, layers.0.output ... "
                f"layers.{model.config.num_layers - 1}.output, logits, and patterns of them"
            )
        wanted.update(found)
    row = check_ids(model, torch.tensor([list(ids)]))[0]
    spec = model.cache_spec(len(row), mode=cache)
    rows, pages = "all" if "logits" in wanted else "last", list(range(spec.num_pages))
    batch = Batch.single(row.tolist(), start=0, pages=pages, logit_rows=rows, device=model.device, adapter=adapter)
    kept: dict[str, Tensor] = {}

    def observe(name: str, value: Tensor) -> None:
        if name in wanted:
            kept[name] = value.detach().float().cpu().clone()  # the model goes on in place

    with torch.inference_mode():
        logits = model.forward_by_ops(batch, model.new_cache(spec), observe)
    observe("logits", logits)
    return Hidden(ids=tuple(int(i) for i in ids), texts=tuple(texts or ()), points={name: kept[name] for name in known if name in kept})

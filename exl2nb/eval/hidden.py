"""Activations of a model at named points, as arrays."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from exl2nb.core.errors import OptionError
from exl2nb.core.options import several
from exl2nb.eval.logits import check_ids
from exl2nb.model.batch import Batch
from exl2nb.model.model import Model

PARTS = ("attention", "middle", "output")


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
    layers = [f"layers.{i}.{part}" for i in range(model.config.num_layers) for part in PARTS]
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

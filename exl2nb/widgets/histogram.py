"""WeightHistogram: the values of a group before and after quantisation, its codes, and the grid they are on, one bitrate beside another."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import traitlets as t

from exl2nb.core.errors import OptionError
from exl2nb.core.options import shown
from exl2nb.io import hub
from exl2nb.widgets import bitgrid
from exl2nb.widgets.base import ExlWidget
from exl2nb.widgets.bitgrid import OUTSIDE_LAYERS
from exl2nb.widgets.protocol import GroupHistogram, WeightHistogramState

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from exl2nb.model.inspection import Weights
    from exl2nb.quant.exl2_slice import Exl2Group

HISTOGRAM_BINS = 64
MAX_MODELS = 4
_PLACE_TRAITS = ("layer", "matrix", "row")


class WeightHistogram(ExlWidget):
    """One group of rows of a matrix in several EXL2 models: values before and after, stored codes, scales of the columns.

    A row of the original matrix (an input channel) chooses the group of each model that it lies in. Beside the codes that are stored stand
    those that rounding to the nearest level would give: GPTQ stores others.

    Args:
        sources: EXL2 models by label, or several: directories, hub ids or loaded models. One that is not quantised is the original.
        original: directory, hub id or `LLM` of the model they were made of; None = none, or the one among the sources.

    Traits, also keywords (synced with the page both ways):
        layer: -1 for what stands outside the layers. matrix: name in the layer, such as "self_attn.q_proj". row: of the original matrix.

    Raises:
        OptionError: no EXL2 model, or no matrix that all of them have. FormatError: a file breaks a rule.

    Example:
        >>> WeightHistogram({"4 bits": "model-4.0bpw", "2.5 bits": "model-2.5bpw"}, original="model")  # doctest: +SKIP
    """

    _bundle, _state_type = "histogram", WeightHistogramState

    layer = t.Int(0).tag(sync=True, option=True)
    matrix = t.Unicode("").tag(sync=True, option=True)
    row = t.Int(0).tag(sync=True, option=True)
    _layers = t.List().tag(sync=True)
    _matrices = t.List().tag(sync=True)
    _rows = t.Int(0).tag(sync=True)
    _original = t.Unicode("").tag(sync=True)
    _groups = t.List().tag(sync=True)

    def __init__(self, sources: Any, original: Any = None, **kwargs: Any) -> None:
        self._at: tuple[Any, ...] | None = None
        found, base = _opened(sources, original)
        self.weights: dict[str, Weights] = found
        self._keys: dict[int, dict[str, str]] = {}
        first, *others = found.values()
        for matrix in first.matrices.values():
            if all(matrix.key in other.matrices for other in others):
                self._keys.setdefault(OUTSIDE_LAYERS if matrix.layer is None else matrix.layer, {})[matrix.name] = matrix.key
        if not self._keys:
            raise OptionError(f"WeightHistogram: {' and '.join(found)} have no matrix in common; expected bitrates of one model")
        super().__init__(**kwargs)
        self._layers, self._original = list(self._keys), base
        first_layer = self.layer if "layer" in kwargs else next(iter(self._keys))
        self.look(layer=first_layer, matrix=self.matrix, row=self.row)

    def look(self, *, layer: int | None = None, matrix: str | None = None, row: int | None = None) -> WeightHistogram:
        """Show another place; omitted arguments keep their value.

        Raises:
            OptionError: there is no such place. FormatError: a file breaks a rule there.
        """
        layer = self.layer if layer is None else layer
        matrix = self.matrix if matrix is None else matrix
        row = self.row if row is None else row
        if layer not in self._keys:
            raise OptionError(f"WeightHistogram: layer is {shown(layer)}; expected one of {', '.join(map(str, self._keys))}")
        names = self._keys[layer]
        if matrix and matrix not in names:
            raise OptionError(f"WeightHistogram: layer {layer} has no matrix {shown(matrix)}; it has {', '.join(list(names)[:12])}")
        matrix = matrix or next(iter(names))
        key = names[matrix]
        groups = [_histogram(label, weights, key, row) for label, weights in self.weights.items()]
        self._at = (layer, matrix, row)
        with self.hold_sync():
            self._groups, self._matrices = [dict(one) for one in groups], list(names)
            self._rows = next(iter(self.weights.values())).slices(key).in_features
            self.layer, self.matrix, self.row = self._at
            self.error, self.status = "", "done"
        return self

    def open_cell(self, layer: int, role: str) -> None:
        """Go to the matrix that `BitMap` calls `role` in this layer; stay where not all models have it."""
        for name, key in self._keys.get(layer, {}).items():
            if bitgrid.place(key)[1] == role:
                self.look(layer=layer, matrix=name, row=min(self.row, next(iter(self.weights.values())).slices(key).in_features - 1))
                return

    @t.observe(*_PLACE_TRAITS)
    def _follow(self, change: Mapping[str, Any]) -> None:
        """A trait was set: show that place, or stay where it was."""
        at = getattr(self, "_at", None)
        if at is None or change["new"] == at[_PLACE_TRAITS.index(change["name"])]:
            return
        try:
            self.look()
        except OptionError:
            self.set_trait(change["name"], change["old"])
            raise

    def _receive_place(self, message: Mapping[str, Any]) -> None:
        """The page asks for a place; a row past the end of another matrix means its last one."""
        layer, matrix, row = message.get("layer"), message.get("matrix"), message.get("row")
        if not (isinstance(layer, int) and isinstance(matrix, str) and isinstance(row, int)):
            raise OptionError("WeightHistogram: the page sent an invalid place; reload it")
        names = self._keys.get(layer, {})
        matrix = matrix if matrix in names else next(iter(names), "")
        rows = next(iter(self.weights.values())).slices(names[matrix]).in_features if names else 1
        self.look(layer=layer, matrix=matrix, row=min(max(0, row), rows - 1))

    def close(self) -> None:
        """Close the files and remove the widget from the page."""
        for weights in getattr(self, "weights", {}).values():
            weights.close()
        super().close()

    # ---- without the page

    @property
    def _all(self) -> list[Any]:
        return list(self._groups)

    def to_frame(self) -> pd.DataFrame:
        """One row per model: model, bits, group, rows, columns, error, clipped, entropy."""
        import pandas as pd

        names = ("label", "bits", "group", "rows", "columns", "error", "clipped", "entropy")
        return pd.DataFrame([{name: one[name] for name in names} for one in self._all]).rename(columns={"label": "model"})

    def to_code_frame(self) -> pd.DataFrame:
        """One row per model and code: model, code, level, stored, nearest (0 where the original is not known)."""
        import pandas as pd

        rows = [
            {"model": one["label"], "code": code, "level": code - (1 << (one["bits"] - 1)), "stored": count, "nearest": nearest}
            for one in self._all
            for code, (count, nearest) in enumerate(zip(one["codes"], one["nearest"] or [0] * len(one["codes"])))
        ]
        return pd.DataFrame(rows)

    def _summary(self) -> str:
        parts = []
        for one in self._all:
            error = "" if one["error"] is None else f", error {100 * one['error']:.1f} %"
            parts.append(f"{one['label']}: {one['bits']} bits, {one['entropy']:.2f} used{error}")
        layer, matrix, row = self._at or (self.layer, self.matrix, self.row)
        return f"WeightHistogram(layer {layer} {matrix}, row {row}; {'; '.join(parts)})"

    def _static_body(self) -> str:
        cell = '<td style="text-align:right;padding:0 8px">'
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(one['label'])}</th>{cell}{one['bits']}</td>{cell}{one['group']}</td>"
            f"{cell}{_share(one['error'])}</td>{cell}{_share(one['clipped'])}</td>"
            f"{cell}{one['entropy']:.2f}</td>{cell}{' '.join(str(count) for count in one['codes'][:16])}</td></tr>"
            for one in self._all
        )
        head = "".join(f"<th>{name}</th>" for name in ("", "bits", "group", "error", "clipped", "code entropy, bits", "codes"))
        caption = html.escape(f"layer {self.layer} {self.matrix}, row {self.row}")
        return f'<table style="font-size:12px"><caption>{caption}</caption><tr>{head}</tr>{rows}</table>'


def _opened(sources: Any, original: Any) -> tuple[dict[str, Weights], str]:
    """The EXL2 models by label, and the name of the original."""
    from exl2nb.model.inspection import Weights, inspect

    if isinstance(sources, Mapping):
        pairs = [(str(label), _directory(one)) for label, one in sources.items()]
    else:
        listed = list(sources) if isinstance(sources, Sequence) and not isinstance(sources, str) else [sources]
        pairs = [("", _directory(one)) for one in listed]
    base = None if original is None else _directory(original)
    quantised: list[tuple[str, Path]] = []
    for label, path in pairs:
        if any(matrix.format == "exl2" for matrix in inspect(path).matrices):
            quantised.append((bitgrid.plain(label or hub.label(path))[:40], path))
        elif base is None:
            base = path
        else:
            name = shown(label or hub.label(path))
            raise OptionError(f"WeightHistogram: {name} is not quantised with EXL2, and there is an original already")
    if not 1 <= len(quantised) <= MAX_MODELS or len({label for label, _ in quantised}) < len(quantised):
        raise OptionError(f"WeightHistogram: got {len(quantised)} EXL2 models; expected 1 to {MAX_MODELS}, each with a label of its own")
    found: dict[str, Weights] = {}
    try:
        for label, path in quantised:
            found[label] = Weights(path, base)
    except BaseException:
        for weights in found.values():
            weights.close()
        raise
    return found, "" if base is None else bitgrid.plain(base.name)


def _directory(source: Any) -> Path:
    from exl2nb.io import hub

    path = source if isinstance(source, (str, os.PathLike)) else getattr(source, "path", None)
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(f"WeightHistogram: got {type(source).__name__!r}; expected an EXL2 directory, a hub id or a loaded model")
    return hub.resolve(path)


def _histogram(label: str, weights: Weights, key: str, row: int) -> GroupHistogram:
    slices = weights.slices(key)
    number, _, _ = slices.locate(row)
    group = slices.group(number)
    before = weights.original_rows(key, group.rows)
    columns = group.codes.shape[1] if before is None else before.shape[1]  # the others are padding
    after, codes = group.weights[:, :columns], group.codes[:, :columns]
    values = after if before is None else before
    span = max(float(values.abs().max()), float(after.abs().max()), 1e-12)
    counts = codes.flatten().bincount(minlength=1 << group.bits)
    share = counts[counts > 0].float() / counts.sum()
    return GroupHistogram(
        label=label, bits=group.bits, group=number, groups=len(slices.groups), rows=len(group.rows), columns=columns,
        first=sum(rows for _, rows in slices.groups[:number]), low=-span, high=span,
        before=[] if before is None else _bins(before, span), after=_bins(after, span), codes=counts.tolist(),
        scales=group.scale_index[:columns].long().bincount(minlength=16).tolist(), entropy=float(-(share * share.log2()).sum()),
        **_against(group, before, after),
    )  # fmt: skip


def _against(group: Exl2Group, before: torch.Tensor | None, after: torch.Tensor) -> Any:
    """What only the original tells: nearest codes, relative error, share beyond the last level."""
    if before is None:
        return {"nearest": [], "error": None, "clipped": None}
    zero, steps = 1 << (group.bits - 1), group.steps[: before.shape[1]].clamp_min(1e-12)
    wished = (before / steps + zero).round()
    most = (1 << group.bits) - 1
    nearest = wished.clamp(0, most).long().flatten().bincount(minlength=most + 1)
    error = float((after - before).norm() / before.norm().clamp_min(1e-12))
    return {"nearest": nearest.tolist(), "error": error, "clipped": float(((wished < 0) | (wished > most)).float().mean())}


def _bins(values: torch.Tensor, span: float) -> list[int]:
    return [int(count) for count in values.flatten().histc(HISTOGRAM_BINS, -span, span).tolist()]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"

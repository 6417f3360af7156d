"""WeightBrowser: what is stored in the file, and how it becomes a weight: words, codes, scale, weight, error against the original."""

from __future__ import annotations

import html
import math
import os
import struct
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import traitlets as t

from exl2nb.core.errors import OptionError
from exl2nb.core.show import diverging, ink
from exl2nb.io.hub import label
from exl2nb.widgets import bitgrid
from exl2nb.widgets.base import ExlWidget
from exl2nb.widgets.bitgrid import OUTSIDE_LAYERS
from exl2nb.widgets.protocol import Run, WeightSlice, WeightsState

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from exl2nb.model.inspection import Weights
    from exl2nb.quant.exl2_slice import Exl2Unit


def unit_table(title: str, key: str, shown: Mapping[str, Any]) -> str:
    """The words, the scale, and one line per weight."""
    bits, zero = shown["bits"], shown["zero"]
    mono = "font-family:monospace"
    words = " ".join(f"{word:08X}" for word in shown["words"])
    largest = f"{shown['scale_max']:.6g} ({half(shown['scale_max'])})"
    head = ["stored row", "row", "code", "level", "weight", *(["original", "error"] if shown["original"] else [])]
    lines = [
        f"{shown['bits']}-bit codes in words {shown['first_word']} to {shown['first_word'] + bits - 1} of column {shown['column']}: "
        f'<span style="{mono}">{words}</span>',
        f"scale: word {shown['scale_word']:08X}, index {shown['scale_index']}; largest step {largest}; "
        f"step = ({shown['scale_index']} + 1)² × fp16(largest / 256) = {shown['step']:.6g} ({half(shown['step'])})",
    ]
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in _rows(shown, zero))
    return (
        f"<div><b>{html.escape(title)}</b> {html.escape(key)}, group {shown['group']}, column {shown['column']}"
        f"{''.join(f'<div>{line}</div>' for line in lines)}"
        f'<table style="font-size:12px;font-variant-numeric:tabular-nums"><tr>{"".join(f"<th>{name}</th>" for name in head)}</tr>{body}'
        "</table></div>"
    )


def _rows(shown: Mapping[str, Any], zero: int) -> list[list[str]]:
    found = []
    for i, (row, code, weight) in enumerate(zip(shown["rows"], shown["codes"], shown["weights"])):
        level = code - zero
        back = diverging(2 * level / zero)
        chip = f'<span style="background:rgb{back};color:rgb{ink(back)};padding:0 .4em">{code}</span>'
        cells = [str(shown["first_row"] + i), str(row), chip, f"{level:+d}" if level else "0", f"{weight:.5g}"]
        if shown["original"]:
            cells += [f"{shown['original'][i]:.5g}", f"{weight - shown['original'][i]:+.2g}"]
        found.append(cells)
    return found


def half(value: float) -> str:
    """The sixteen bits of an fp16 value: "0x3800"."""
    return f"0x{struct.unpack('<H', struct.pack('<e', value))[0]:04X}"


class WeightBrowser(ExlWidget):
    """A magnifying glass over an EXL2 file: 32 rows of one column, from the 32-bit words to the weights.

    Each field of the words has the colour of its code. Pointing at a field, a weight or a dot of the picture, or walking over the weights
    with the arrow keys, follows that value through all stages: bits, code, scale, weight, and the error against the original where that is
    known. Only what is shown is read from the file, so models of any size open at once.

    Args:
        source: an EXL2 directory or hub id, a loaded `LLM` of one, or the result of `convert` (which also knows the original).
        original: directory, hub id or `LLM` of the model it was made of; None: none, or that of the conversion.

    Traits, also keywords (synced with the page both ways):
        layer: -1 for what stands outside the layers. matrix: name in the layer, such as "self_attn.q_proj". group: of rows, from the top.
        unit: of 32 rows in the group. column: of the matrix. value: 0..31, the one that is followed. title: default, the model's name.

    Example:
        >>> browser = WeightBrowser("model-4.0bpw", original="model", layer=3, matrix="mlp.down_proj", column=17)  # doctest: +SKIP
        >>> browser.to_frame()[["row", "code", "weight", "original", "error"]]  # doctest: +SKIP
    """

    _bundle, _state_type = "weights", WeightsState

    title = t.Unicode("").tag(sync=True, option=True)
    layer = t.Int(0).tag(sync=True, option=True)
    matrix = t.Unicode("").tag(sync=True, option=True)
    group = t.Int(0).tag(sync=True, option=True)
    unit = t.Int(0).tag(sync=True, option=True)
    column = t.Int(0).tag(sync=True, option=True)
    value = t.Int(0, min=0, max=31).tag(sync=True, option=True)
    _layers = t.List().tag(sync=True)
    _matrices = t.List().tag(sync=True)
    _runs = t.List().tag(sync=True)
    _units = t.Int(1).tag(sync=True)
    _rows = t.Int(0).tag(sync=True)
    _columns = t.Int(0).tag(sync=True)
    _bpw = t.Float(0.0).tag(sync=True)
    _original = t.Unicode("").tag(sync=True)
    _slice = t.Dict().tag(sync=True)

    def __init__(self, source: Any, original: Any = None, **kwargs: Any) -> None:
        directory, known = _directory(source), getattr(source, "source", None)
        if original is None and known is not None and os.path.isdir(known):
            original = known
        where = None if original is None else _directory(original)
        from exl2nb.model.inspection import Weights

        self.weights: Weights = Weights(directory, where)
        self._keys: dict[int, dict[str, str]] = {}
        for matrix in self.weights.matrices.values():
            self._keys.setdefault(OUTSIDE_LAYERS if matrix.layer is None else matrix.layer, {})[matrix.name] = matrix.key
        self._at: tuple[Any, ...] | None = None
        super().__init__(**kwargs)
        with self.hold_sync():
            self.title = self.title or bitgrid.plain(label(directory))
            self._original = "" if where is None else bitgrid.plain(label(where))
            self._layers = list(self._keys)
            first = self.layer if "layer" in kwargs else next(iter(self._keys))
            self.look(layer=first, matrix=self.matrix, group=self.group, unit=self.unit, column=self.column)

    # ---- going elsewhere ----

    @property
    def key(self) -> str:
        """Module key of the matrix shown."""
        return self._keys[self.layer][self.matrix]

    def look(
        self,
        *,
        layer: int | None = None,
        matrix: str | None = None,
        group: int | None = None,
        unit: int | None = None,
        column: int | None = None,
        row: int | None = None,
    ) -> WeightBrowser:
        """Show another place; omitted arguments keep their value. `row`, an original row of the matrix, selects its group and unit.

        Raises:
            OptionError: there is no such place. FormatError: the file breaks a rule there.
        """
        key = self._key_of(self.layer if layer is None else layer, self.matrix if matrix is None else matrix)
        slices = self.weights.slices(key)
        group, unit = self.group if group is None else group, self.unit if unit is None else unit
        value = self.value
        if row is not None:
            group, unit, value = slices.locate(row)
        found = slices.unit(group, unit, self.column if column is None else column)
        original = self.weights.original(key, found.column)
        about = self.weights.matrices[key]
        layer, matrix = OUTSIDE_LAYERS if about.layer is None else about.layer, about.name
        self._at = (layer, matrix, group, unit, found.column)
        with self.hold_sync():
            self._slice = dict(_slice_of(found, original))
            self._matrices = list(self._keys[layer])
            self._runs = [list(Run(bits, rows, len(list(same)))) for (bits, rows), same in groupby(slices.groups)]
            self._units, self._rows, self._columns = slices.units(group), slices.in_features, slices.out_features
            self._bpw = round(about.bpw, 4)
            self.layer, self.matrix, self.group, self.unit, self.column = self._at
            self.value, self.error, self.status = value, "", "idle"
        self._fire("look", self)
        return self

    def open_cell(self, layer: int, role: str) -> None:
        """Go to the matrix that `BitMap` calls `role` in this layer; stay where there is none of EXL2."""
        for name, key in self._keys.get(layer, {}).items():
            if bitgrid.place(key)[1] == role:
                self.look(layer=layer, matrix=name, group=0, unit=0, column=_inside(self.column, self.weights.slices(key).out_features))
                return

    def _key_of(self, layer: int, matrix: str) -> str:
        if layer not in self._keys:
            raise OptionError(f"WeightBrowser: layer is {layer}; expected one of {', '.join(map(str, self._keys))}")
        names = self._keys[layer]
        if matrix and matrix not in names:
            raise OptionError(f"WeightBrowser: layer {layer} has no EXL2 matrix {matrix!r}; it has {', '.join(list(names)[:12])}")
        return names[matrix or next(iter(names))]

    @t.observe("layer", "matrix", "group", "unit", "column")
    def _follow(self, change: Mapping[str, Any]) -> None:
        """A trait was set from Python: show that place, or stay where it was."""
        wanted = (self.layer, self.matrix, self.group, self.unit, self.column)
        at = getattr(self, "_at", None)
        if at is None or wanted == at or change["new"] == at[_PLACE_TRAITS.index(change["name"])]:
            return
        try:
            self.look()
        except OptionError:
            self.set_trait(change["name"], change["old"])
            raise

    def on_look(self, callback: Callable[[WeightBrowser], Any], remove: bool = False) -> None:
        """Call `callback(browser)` whenever another place is shown."""
        self._listen("look", callback, remove)

    def _receive_look(self, message: Mapping[str, Any]) -> None:
        """The page asks for a place; a number past the end of another matrix means its end."""
        layer, matrix = message.get("layer"), message.get("matrix")
        group, unit, column = (message.get(name) for name in ("group", "unit", "column"))
        if not (isinstance(layer, int) and isinstance(matrix, str) and all(isinstance(n, int) for n in (group, unit, column))):
            raise OptionError("WeightBrowser: the page sent an invalid place; reload it")
        key = self._key_of(layer, matrix if matrix in self._keys.get(layer, {}) else "")
        slices = self.weights.slices(key)
        group = _inside(group, len(slices.groups))
        self.look(
            layer=layer,
            matrix=self.weights.matrices[key].name,
            group=group,
            unit=_inside(unit, slices.units(group)),
            column=_inside(column, slices.out_features),
        )

    def close(self) -> None:
        """Close the files and remove the widget from the page."""
        if hasattr(self, "weights"):
            self.weights.close()
        super().close()

    # ---- without the page ----

    def to_frame(self) -> pd.DataFrame:
        """One line per value shown: stored row, original row, code, level, weight, original, error (NaN without an original)."""
        import pandas as pd

        shown: Any = self._slice
        frame = pd.DataFrame({"row": shown["rows"], "code": shown["codes"], "weight": shown["weights"]})
        frame.insert(0, "stored_row", range(shown["first_row"], shown["first_row"] + len(frame)))
        frame.insert(3, "level", frame.code - shown["zero"])
        frame["original"] = shown["original"] or float("nan")
        frame["error"] = frame.weight - frame.original
        return frame

    def _summary(self) -> str:
        shown: Any = self._slice
        place = f"group {self.group}, rows {shown['first_row']} to {shown['first_row'] + 31}, column {self.column}"
        return f"WeightBrowser({self.key}: {place}, {shown['bits']} bits)"

    def _static_body(self) -> str:
        return unit_table(self.title, self.key, self._slice)


_PLACE_TRAITS = ("layer", "matrix", "group", "unit", "column")


def _slice_of(found: Exl2Unit, original: Tensor | None) -> WeightSlice:
    beside = [] if original is None else original[list(found.rows)].tolist()
    return WeightSlice(
        group=found.group,
        unit=found.unit,
        column=found.column,
        bits=found.bits,
        zero=found.zero,
        first_row=found.first_row,
        first_word=found.first_word,
        words=list(found.words),
        scale_word=found.scale_word,
        scale_index=found.scale_index,
        scale_max=found.scale_max,
        unit_step=found.unit_step,
        step=found.step,
        codes=list(found.codes),
        rows=list(found.rows),
        weights=found.weights.astype(float).tolist(),
        original=beside if all(map(math.isfinite, beside)) else [],  # JSON has no NaN
    )


def _inside(number: Any, end: int) -> int:
    return min(max(0, number), end - 1)


def _directory(source: Any) -> Path:
    """A directory of what was given: a path, a hub id, or something with a path."""
    from exl2nb.io import hub

    path = source if isinstance(source, (str, os.PathLike)) else getattr(source, "path", None)
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(f"WeightBrowser: got {type(source).__name__!r}; expected a model directory, a hub id, an LLM or a conversion")
    return hub.resolve(path)

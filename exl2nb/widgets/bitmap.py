"""BitMap: which matrix got how many bits, as a heat map; a cell opens into its groups of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import traitlets as t

from exl2nb.core.errors import OptionError
from exl2nb.widgets import bitgrid
from exl2nb.widgets.base import ExlWidget
from exl2nb.widgets.bitgrid import grid_of
from exl2nb.widgets.protocol import BitMapState

if TYPE_CHECKING:
    import pandas as pd


class BitMap(ExlWidget):
    """Layers across, matrices down, a cell's colour and number its bits per weight.

    Choosing a cell (click, or arrow keys and Enter) shows its groups of rows in the order of the file, widths true to rows. Experts of a
    layer are one cell with their average. Reads headers alone; needs no engine.

    Args:
        source: a model directory or hub id, the result of `inspect` or `convert`, a plan (`measurement.solve(bpw=...)`), or plain data as
            their `to_dict()` gives it.
        other: a second one of the same kind; the metric "difference" then shows source minus other.

    Traits, also keywords (synced with the page both ways):
        metric: "bpw", "error" (of the rounding, on the calibration text; a finished conversion knows it), "share" (of the predicted KL) or
            "difference". Default "bpw".
        selected: [layer, matrix], layer -1 outside the layers; [] for none.
        title: over the map. Default: the model's name.

    Example:
        >>> BitMap([{"key": "model.layers.0.mlp.up_proj", "bpw": 4.1}, {"key": "model.layers.1.mlp.up_proj", "bpw": 3.1}])
        BitMap(2 cells, 3.60 bits per weight, 3.1 to 4.1)
    """

    _bundle, _state_type = "bitmap", BitMapState

    title = t.Unicode("").tag(sync=True, option=True)
    metric = t.Enum(("bpw", "error", "share", "difference"), "bpw").tag(sync=True, option=True)
    selected = t.List().tag(sync=True, option=True)
    _metrics = t.List().tag(sync=True)
    _matrices = t.List().tag(sync=True)
    _layers = t.List().tag(sync=True)
    _cells = t.List().tag(sync=True)
    _other = t.List().tag(sync=True)
    _other_title = t.Unicode("").tag(sync=True)

    def __init__(self, source: Any, *, other: Any = None, **kwargs: Any) -> None:
        self.grid = grid_of(source)
        self.other = None if other is None else grid_of(other)
        super().__init__(**kwargs)
        grid, against = self.grid, {(c.matrix, c.layer): c.bpw for c in self.other.cells} if self.other else {}
        metrics = [*grid.metrics, *(["difference"] if self.other else [])]
        if self.metric not in metrics:
            raise OptionError(f"BitMap: metric is {self.metric!r}, which this source does not have; expected one of {', '.join(metrics)}")
        with self.hold_sync():
            self.title = self.title or grid.title
            self._metrics, self._matrices, self._layers = metrics, list(grid.matrices), list(grid.layers)
            self._cells = [cell._asdict() for cell in grid.cells]
            self._other = [against.get((c.matrix, c.layer)) for c in grid.cells] if self.other else []
            self._other_title = self.other.title if self.other else ""

    @t.validate("selected")
    def _cell_name(self, proposal: Mapping[str, Any]) -> list[Any]:
        value = list(proposal["value"])
        if value and (len(value) != 2 or not isinstance(value[0], int) or not isinstance(value[1], str)):
            raise OptionError(f"BitMap: selected is {value!r}; expected [layer, matrix], such as [3, 'down'], or []")
        return value

    @t.observe("selected")
    def _tell(self, change: Mapping[str, Any]) -> None:
        if hasattr(self, "_callbacks"):
            self._fire("select", change["new"])

    def select(self, layer: int | None, matrix: str = "") -> None:
        """Open the strip of one cell; None closes it.

        Raises:
            OptionError: there is no such cell.
        """
        if layer is not None and not any((c.layer, c.matrix) == (layer, matrix) for c in self.grid.cells):
            raise OptionError(f"BitMap: no matrix {matrix!r} in layer {layer}; matrices are {', '.join(self.grid.matrices)}")
        self.selected = [] if layer is None else [layer, matrix]

    def link(self, *widgets: Any) -> BitMap:
        """Open every cell that is chosen here in other widgets too.

        Args:
            widgets: a `WeightBrowser` or a `WeightHistogram` goes to the matrix (the first expert where a cell has several); another
                `BitMap` or a `BitrateExplorer` chooses the same cell, and one chosen there is chosen here.

        Raises:
            OptionError: a widget that shows no matrices.

        Example:
            >>> BitMap(path).link(WeightBrowser(path))  # doctest: +SKIP
        """
        for widget in widgets:
            if callable(getattr(widget, "open_cell", None)):
                self.observe(lambda change, widget=widget: widget.open_cell(*change["new"]) if change["new"] else None, "selected")
            elif "selected" in widget.trait_names() and hasattr(widget, "grid"):
                t.link((self, "selected"), (widget, "selected"))
            else:
                raise OptionError(
                    f"BitMap.link: got {type(widget).__name__!r}; expected a WeightBrowser, WeightHistogram, BitMap or BitrateExplorer"
                )
        return self

    def on_select(self, callback: Callable[[list[Any]], Any], remove: bool = False) -> None:
        """Call `callback([layer, matrix])` when a cell is chosen, `callback([])` when none is."""
        self._listen("select", callback, remove)

    def to_frame(self) -> pd.DataFrame:
        """One row per cell: layer, matrix, bpw, nbytes, experts, error, share."""
        import pandas as pd

        return pd.DataFrame(self.grid.to_rows())

    def _summary(self) -> str:
        return f"BitMap({bitgrid.summary(self.grid)})"

    def _static_body(self) -> str:
        return bitgrid.table(self.grid, self.title)

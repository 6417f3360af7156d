"""OutlierMap: how large every channel gets in every layer, activations above weights, and what one outlier costs its group."""

from __future__ import annotations

import base64
import html
import math
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import traitlets as t

from exl2nb.core.errors import OptionError
from exl2nb.sampling.params import check_integer
from exl2nb.widgets.protocol import GroupEffect, Massive, OutlierMapState, OutlierResult
from exl2nb.widgets.sides import InsideWidget, passes

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor

    from exl2nb.eval.trace import Trace

OUTLIER_POINTS: dict[str, tuple[str, str]] = {
    "residual stream": ("hook_resid_pre", "qkv"),
    "attention input": ("ln1.hook_normalized", "qkv"),
    "MLP input": ("ln2.hook_normalized", "up"),
    "down input": ("mlp.hook_post", "down"),
}
"""Name on the page -> (point, matrix that reads it)."""
MOST_BINS = 1024
MAX_MASSIVE_VALUES = 8  # of each model that are listed
OUTLIER_GROUP = 128  # of the sum on one outlier
OUTLIER_BITS = 3
_PICTURE_PX = 6


class OutlierMap(InsideWidget):
    """The largest magnitude of every channel in every layer, over the tokens of a prompt, and of the weights that read it.

    Channels are across, layers down, the scale is logarithmic. Choosing a channel shows its size through depth for every model, and what it
    does to its group: the rounding error of the 127 channels beside it at 3 bits, with it and without it, since the largest of a group sets
    the step for all. The table lists massive activations: single numbers of the residual stream that are hundreds of times the median.

    Args:
        models: one to four bitrates or caches of one model by label, the reference first: loaded models, or pairs (model, {"cache": mode}).
        prompt: text that is read, 2 to 512 tokens.
        result: what `to_dict` gave, in place of models.
        wait: False = return at once and measure in the background; `.wait()` waits for it.

    Traits, also keywords (synced with the page both ways):
        prompt: as above.
        side: index of the model that the maps are of, 0 = the reference. Default 0.
        point: 0 = the residual stream before the layer, 1 = the input of attention, 2 = of the MLP, 3 = of its last matrix. Default 0.
        layer, channel: the chosen channel; channel -1 = none. Default 0, -1.

    Raises:
        OptionError: no bitrates or caches of one model, or a prompt that is too short or too long.

    Example:
        >>> OutlierMap({"16 bits": llm, "4 bits": low}, "It was a dark")  # doctest: +SKIP
        OutlierMap(5 tokens, 12 layers; 16 bits: largest activation 41.3 in layer 11, token 0, channel 77, 55 times the median)
    """

    _bundle, _state_type = "outliers", OutlierMapState
    _empty = OutlierResult(
        labels=[], layers=0, texts=[], points=[], channels=[], bins=[], activations=[], lows=[], spans=[], weights=[], weight_lows=[],
        weight_spans=[], massive=[],
    )  # fmt: skip
    _least = 1

    side = t.Int(0).tag(sync=True, option=True)
    point = t.Int(0).tag(sync=True, option=True)
    layer = t.Int(0).tag(sync=True, option=True)
    channel = t.Int(-1).tag(sync=True, option=True)
    _effect = t.List().tag(sync=True)

    def __init__(
        self, models: Any = None, prompt: str | None = None, *, result: Mapping[str, Any] | None = None, wait: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(models, prompt, result=result, wait=wait, **kwargs)
        self._ready = True
        if self.channel >= 0 and self.sides and self.status == "done":
            self.look(self.layer, self.channel)

    def _measure(self, ids: list[int], stop: threading.Event) -> dict[str, Any] | None:
        import torch

        first = self.sides[0]
        layers, known = first.llm.config.num_layers, first.llm.model.points
        points = {name: pair for name, pair in OUTLIER_POINTS.items() if f"blocks.{layers - 1}.{pair[0]}" in known}
        widths = [known[f"blocks.{layers - 1}.{part}"].shape[-1] for part, _ in points.values()]
        bins = [min(MOST_BINS, width) for width in widths]
        active = [[torch.zeros(layers, count) for _ in self.sides] for count in bins]
        heavy = [[torch.zeros(layers, count) for _ in self.sides] for count in bins]
        massive: list[Massive] = []
        texts: tuple[str, ...] = ()
        for i, side in enumerate(self.sides):
            found: list[Massive] = []
            for some, names in passes(side, [part for part, _ in points.values()], len(ids)):
                if stop.is_set():
                    return None
                trace = side.trace(ids, names)
                texts = trace.texts
                for layer in some:
                    found += _massive(trace, layer, i)
                    for p, (part, matrix) in enumerate(points.values()):
                        if (name := f"blocks.{layer}.{part}") in trace:
                            active[p][i][layer] = _largest(trace[name].abs().amax(0), bins[p])
                        weight = side.llm.engine.shared_model.matrix(layer, matrix)
                        if weight is not None and len(weight) == widths[p]:
                            heavy[p][i][layer] = _largest(weight.abs().amax(1), bins[p])
            massive += sorted(found, key=lambda one: -abs(one.value))[:MAX_MASSIVE_VALUES]
        activations, weights = [_bytes(tables) for tables in active], [_bytes(tables) for tables in heavy]
        return {
            **OutlierResult(
                labels=[side.label for side in self.sides], layers=layers, texts=list(texts), points=list(points), channels=widths,
                bins=bins,
                activations=[text for text, _, _ in activations], lows=[low for _, low, _ in activations],
                spans=[span for _, _, span in activations], weights=[text for text, _, _ in weights],
                weight_lows=[low for _, low, _ in weights], weight_spans=[span for _, _, span in weights], massive=[],
            ),
            "massive": [list(one) for one in massive],
        }  # fmt: skip

    # ---- one channel

    def look(self, layer: int, channel: int, *, point: int | None = None) -> OutlierMap:
        """Choose a channel, and work out what it does to its group.

        Raises:
            OptionError: there is no such channel, or no model is attached.
        """
        shown: Any = self._result
        point = self.point if point is None else point
        if not self.sides:
            raise OptionError("OutlierMap: no model is attached; make it with OutlierMap({'16 bits': llm, ...})")
        check_integer("OutlierMap: point", point, 0, len(shown["points"]) - 1)
        check_integer("OutlierMap: layer", layer, 0, shown["layers"] - 1)
        check_integer("OutlierMap: channel", channel, 0, shown["channels"][point] - 1)
        part, matrix = OUTLIER_POINTS[shown["points"][point]]
        side = self.sides[min(max(0, self.side), len(self.sides) - 1)]
        name = f"blocks.{layer}.{part}"
        x = side.trace(self._ids, [name])[name]
        weight = side.llm.engine.shared_model.matrix(layer, matrix)
        first = channel // OUTLIER_GROUP * OUTLIER_GROUP
        group = slice(first, min(first + OUTLIER_GROUP, x.shape[1]))
        effect = GroupEffect(
            layer=layer, point=point, channel=channel, bits=OUTLIER_BITS, activation=float(x[:, channel].abs().max()),
            weight=0.0 if weight is None else float(weight[channel].abs().max()),
            activations=group_errors(x.T[group], channel - first, OUTLIER_BITS),
            weights=[0.0, 0.0] if weight is None else group_errors(weight[group], channel - first, OUTLIER_BITS),
        )  # fmt: skip
        self._ready = False
        with self.hold_sync():
            self.point, self.layer, self.channel, self._effect = point, layer, channel, [dict(effect)]
        self._ready = True
        return self

    @property
    def effect(self) -> GroupEffect | None:
        """What the chosen channel does to its group; None where none is chosen."""
        found: Any = self._effect[0] if self._effect else None
        return found

    @t.observe("point", "layer", "channel", "side")
    def _follow(self, change: Mapping[str, Any]) -> None:
        """The page chose a channel: work it out in the background."""
        if not getattr(self, "_ready", False) or not self.sides:
            return
        if self.channel < 0:
            self._effect = []
            return
        shown: Any = self._result
        point = min(max(0, self.point), len(shown["points"]) - 1)
        place = (min(max(0, self.layer), shown["layers"] - 1), min(self.channel, shown["channels"][point] - 1))
        if not self._background.alive:
            self._work(lambda stop: self.look(*place, point=point))

    # ---- without the page

    def to_frame(self) -> pd.DataFrame:
        """One row per massive activation: model, layer, token, text, channel, value, ratio (over the median of the layer)."""
        import pandas as pd

        shown: Any = self._result
        rows = [
            {"model": shown["labels"][side], "layer": layer, "token": token, "text": shown["texts"][token], "channel": channel}
            | {"value": value, "ratio": ratio}
            for side, layer, token, channel, value, ratio in shown["massive"]
        ]
        return pd.DataFrame(rows, columns=["model", "layer", "token", "text", "channel", "value", "ratio"])

    def ranges(self, point: int = 0, side: int = 0, *, weights: bool = False) -> torch.Tensor:
        """A map: float32 `(layers, bins)`, the largest magnitude of each channel (or of the channels of a column), as the page has it."""
        import torch

        shown: Any = self._result
        check_integer("OutlierMap: point", point, 0, len(shown["points"]) - 1)
        check_integer("OutlierMap: side", side, 0, len(shown["labels"]) - 1)
        kind = "weight_" if weights else ""
        text = shown["weights" if weights else "activations"][point][side]
        low, span = shown[f"{kind}lows"][point], shown[f"{kind}spans"][point]
        codes = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8).view(shown["layers"], shown["bins"][point])
        return torch.where(codes > 0, low * 10 ** (codes.float() * span / 255), 0.0)

    def _summary(self) -> str:
        shown: Any = self._result
        parts = [f"{len(shown['texts'])} tokens, {shown['layers']} layers"]
        for i, label in enumerate(shown["labels"]):
            of = [Massive(*one) for one in shown["massive"] if one[0] == i]
            if of:
                where = f"layer {of[0].layer}, token {of[0].token}, channel {of[0].channel}"
                parts.append(f"{label}: largest activation {of[0].value:.3g} in {where}, {of[0].ratio:.0f} times the median")
        return f"OutlierMap({'; '.join(parts)})"

    def _static_body(self) -> str:
        names = ("model", "layer", "token", "text", "channel", "value", "times the median")
        rows = "".join(
            "<tr>"
            + "".join(
                f'<td style="padding:0 8px">{html.escape(f"{cell:.3g}" if isinstance(cell, float) else str(cell))}</td>' for cell in row
            )
            + "</tr>"
            for row in self.to_frame().itertuples(index=False)
        )
        head = "".join(f"<th>{name}</th>" for name in names)
        return f'<table style="font-size:12px"><caption>Largest activations of the residual stream</caption><tr>{head}</tr>{rows}</table>'


def group_errors(values: Tensor, outlier: int, bits: int) -> list[float]:
    """Relative error of rounding the other rows of a group, with the outlier in it and without it.

    Args:
        values: f32 `(L, N)`, the rows of one group; each column has a step of its own, set by its largest magnitude.
        outlier: its row. bits: of a code; levels are symmetric.
    """
    import torch

    others = torch.cat((values[:outlier], values[outlier + 1 :]))
    most = (1 << (bits - 1)) - 1
    found = []
    for group in (values, others):
        step = (group.abs().amax(0) / most).clamp_min(1e-20)
        rounded = (others / step).round().clamp(-most, most) * step
        found.append(float(f"{float((rounded - others).norm() / others.norm().clamp_min(1e-20)):.4g}"))
    return found


def _massive(trace: Trace, layer: int, side: int) -> list[Massive]:
    """The largest numbers of one layer's residual stream."""
    x = trace[f"blocks.{layer}.hook_resid_pre"]
    size = x.abs()
    median = float(size.median()) or 1e-9
    values, places = size.flatten().topk(min(MAX_MASSIVE_VALUES, size.numel()))
    found = []
    for value, place in zip(values.tolist(), places.tolist()):
        token, channel = divmod(place, x.shape[1])
        found.append(Massive(side, layer, token, channel, float(f"{float(x[token, channel]):.5g}"), float(f"{value / median:.4g}")))
    return found


def _largest(values: Tensor, bins: int) -> Tensor:
    """The largest of the channels of each column of a map."""
    import torch

    if len(values) == bins:
        return values
    columns = torch.arange(len(values)) * bins // len(values)
    return torch.zeros(bins).scatter_reduce_(0, columns, values, "amax")


def _bytes(tables: list[Tensor]) -> tuple[list[str], float, float]:
    """Maps of one point on a common logarithmic scale: base64 of a byte a place, its low end, and its decades."""
    import torch

    known = torch.cat([table[table > 0] for table in tables])
    if not len(known):
        known = torch.ones(1)
    high = float(known.max())
    low = max(float(known.min()), high * 1e-6)
    span = math.log10(high / low) or 1.0
    texts = []
    for table in tables:
        codes = (table.clamp_min(low) / low).log10().mul(255 / span).round().clamp(1, 255)
        codes = torch.where(table > 0, codes, 0.0).to(torch.uint8)
        texts.append(base64.b64encode(codes.contiguous().numpy().tobytes()).decode("ascii"))
    return texts, float(f"{low:.6g}"), float(f"{span:.6g}")

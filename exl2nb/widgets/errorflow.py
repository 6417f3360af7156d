"""ErrorFlow: where the error of a bitrate or a cache enters the residual stream, who repairs it, and what a layer is worth."""

from __future__ import annotations

import html
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import traitlets as t

from exl2nb.core.errors import OptionError
from exl2nb.sampling.params import check_integer
from exl2nb.widgets.protocol import ErrorFlowState, FlowResult, PatchedKl
from exl2nb.widgets.sides import InsideWidget, Side, passes

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from exl2nb.eval.trace import Trace

ROW_LABELS: dict[str, str] = {
    "q": "attn.hook_q", "k": "attn.hook_k", "v": "attn.hook_v", "heads": "attn.hook_z", "o": "hook_attn_out",
    "stream after attention": "hook_resid_mid", "gate": "mlp.hook_pre", "up": "mlp.hook_pre_linear", "activation": "mlp.hook_post",
    "down": "hook_mlp_out", "stream after MLP": "hook_resid_post",
}  # fmt: skip
"""What the map shows, by its name there, in running order."""
_PICTURE_PX = 10


def relative(reference: Tensor, other: Tensor) -> float:
    """Mean over the tokens of |other - reference| / |reference|."""
    flat, difference = reference.flatten(1), (other - reference).flatten(1)
    return float((difference.norm(dim=1) / flat.norm(dim=1).clamp_min(1e-12)).mean())


def _cosine(error: Tensor, added: Tensor) -> float:
    """Mean cosine between the stream's error and what a module adds to it; 0 where there is none yet."""
    lengths = error.norm(dim=1) * added.norm(dim=1)
    return float(((error * added).sum(1) / lengths.clamp_min(1e-20)).mean()) if bool((lengths > 0).any()) else 0.0


class ErrorFlow(InsideWidget):
    """The relative error of every matrix's output and of the residual stream, layer by layer, against the first model.

    The curve is the stream through depth; the map has matrices down and layers across. Choosing a layer says whether its attention and its
    MLP add error or cancel some, and patches it back: the layer runs with the reference's weights, and the mean KL that is left is shown.

    Args:
        models: two to four bitrates or caches of one model by label, the reference first: loaded models, or pairs (model, {"cache": mode}).
        prompt: text that is read, 2 to 512 tokens.
        result: what `to_dict` gave, in place of models.
        wait: False = return at once and measure in the background; `.wait()` waits for it.

    Traits, also keywords (synced with the page both ways):
        prompt: as above.
        side: index of the model that map and numbers are of, 1 = the first after the reference. Default 1.
        layer: the chosen one; -1 = none. Default -1.

    Raises:
        OptionError: no bitrates or caches of one model, or a prompt that is too short or too long.

    Example:
        >>> ErrorFlow({"16 bits": llm, "4 bits": low}, "It was a dark night")  # doctest: +SKIP
        ErrorFlow(4 bits: KL 0.0784, error of the stream 14.9 % after layer 11)
    """

    _bundle, _state_type = "errorflow", ErrorFlowState
    _empty = FlowResult(labels=[], rows=[], layers=0, tokens=0, errors=[], flow=[], cosines=[], kl=[], patched=[])

    layer = t.Int(-1).tag(sync=True, option=True)

    def _measure(self, ids: list[int], stop: threading.Event) -> dict[str, Any] | None:
        first, *others = self.sides
        layers, rows = first.llm.config.num_layers, [name for name, part in ROW_LABELS.items() if self._known(part)]
        errors: list[list[list[float | None]]] = [[[None] * layers for _ in rows] for _ in others]
        flow, cosines, kls = [[] for _ in others], [[[0.0] * layers, [0.0] * layers] for _ in others], []
        for some, names in passes(first, ("hook_resid_pre", *ROW_LABELS.values()), len(ids)):
            last = some[-1] == layers - 1
            capture = [*names, *(["logits"] if last else [])]
            want = first.trace(ids, capture)
            for i, side in enumerate(others):
                if stop.is_set():
                    return None
                got = side.trace(ids, capture)
                for layer in some:
                    self._layer(layer, rows, want, got, errors[i], flow[i], cosines[i])
                if last:
                    kls.append(_short(float(want.kl(got).mean())))
        return {
            **FlowResult(
                labels=[side.label for side in self.sides], rows=rows, layers=layers, tokens=len(ids), errors=errors, flow=flow,
                cosines=cosines, kl=kls, patched=[],
            )
        }  # fmt: skip

    def _known(self, part: str) -> bool:
        return any(name.endswith(part) for name in self.sides[0].llm.model.points)

    @staticmethod
    def _layer(
        layer: int,
        rows: list[str],
        want: Trace,
        got: Trace,
        errors: list[list[float | None]],
        flow: list[float],
        cosines: list[list[float]],
    ) -> None:
        def both(part: str) -> tuple[Tensor, Tensor] | None:
            name = f"blocks.{layer}.{part}"
            return (want[name], got[name]) if name in want else None

        for y, row in enumerate(rows):
            if (pair := both(ROW_LABELS[row])) is not None:
                errors[y][layer] = _short(relative(*pair))
        before, middle, after = (both(f"hook_resid_{part}") for part in ("pre", "mid", "post"))
        assert before is not None
        assert after is not None
        if layer == 0:
            flow.append(_short(relative(*before)))
        flow += [_short(relative(*(middle or after))), _short(relative(*after))]
        for kind, stream, part in ((0, before, "hook_attn_out"), (1, middle or before, "hook_mlp_out")):
            pair = both(part)
            if pair is not None:
                cosines[kind][layer] = _short(_cosine(stream[1] - stream[0], pair[1] - pair[0]))

    # ---- patching back

    def patch(self, layer: int | None = None, *, side: int | None = None) -> ErrorFlow:
        """Begin to measure what a layer is worth, and return at once: its KL with this layer patched back comes into `patched`.

        Args:
            layer: None = all layers, one after the other. side: None = the one that is shown.

        Raises:
            OptionError: no such layer or side, or no model is attached. GenerationError: something runs already.
        """
        result: Any = self._result
        chosen = self.side if side is None else side
        if not self.sides:
            raise OptionError("ErrorFlow: no model is attached; make it with ErrorFlow({'16 bits': llm, ...})")
        check_integer("ErrorFlow: side", chosen, 1, len(self.sides) - 1)
        if layer is not None:
            check_integer("ErrorFlow: layer", layer, 0, result["layers"] - 1)
        wanted = range(result["layers"]) if layer is None else [layer]
        self._work(lambda stop: self._patch(list(wanted), chosen, stop))
        return self

    def _patch(self, layers: list[int], chosen: int, stop: threading.Event) -> None:
        first, side = self.sides[0], self.sides[chosen]
        want = first.trace(self._ids, ["logits"])
        for layer in layers:
            if stop.is_set():
                return
            patch, cache = self._back(layer, first, side)
            got = side.llm.trace(self._ids, ["logits"], patch=patch, cache=cache)
            entry = PatchedKl(chosen, layer, _short(float(want.kl(got).mean())))
            shown: Any = self._result
            kept = [one for one in shown["patched"] if tuple(one[:2]) != (chosen, layer)]
            self._result = {**shown, "patched": sorted([*kept, list(entry)])}

    def _back(self, layer: int, first: Side, side: Side) -> tuple[dict[str, Any], str]:
        """The edit that undoes a layer's error: its weights, or where they are the same what its heads read out."""
        if side.llm is not first.llm:
            return {f"blocks.{layer}": first.llm}, side.cache
        name = f"blocks.{layer}.attn.hook_z"
        return {name: first.trace(self._ids, [name])[name]}, side.cache

    def _receive_patch(self, message: Mapping[str, Any]) -> None:
        layer = message.get("layer")
        if not self._background.alive:
            self.patch(layer if isinstance(layer, int) and layer >= 0 else None)

    @property
    def patched(self) -> list[PatchedKl]:
        """What was patched back so far: (side, layer, mean KL that is left)."""
        shown: Any = self._result
        return [PatchedKl(*one) for one in shown["patched"]]

    # ---- without the page

    def to_frame(self) -> pd.DataFrame:
        """One row per model, layer and point: model, layer, point, error (relative, 0.1 = 10 %)."""
        import pandas as pd

        shown: Any = self._result
        rows = [
            {"model": label, "layer": layer, "point": row, "error": value}
            for label, table in zip(shown["labels"][1:], shown["errors"])
            for row, line in zip(shown["rows"], table)
            for layer, value in enumerate(line)
        ]
        return pd.DataFrame(rows, columns=["model", "layer", "point", "error"])

    def _summary(self) -> str:
        shown: Any = self._result
        parts = [
            f"{label}: KL {kl:.3g}, error of the stream {flow[-1]:.1%} after layer {shown['layers'] - 1}"
            for label, kl, flow in zip(shown["labels"][1:], shown["kl"], shown["flow"])
        ]
        return f"ErrorFlow({'; '.join(parts) or self.status})".replace("%", " %")

    def _static_body(self) -> str:
        shown: Any = self._result
        cell = '<td style="text-align:right;padding:0 6px">'
        tables = []
        worth = {tuple(one[:2]): one[2] for one in shown["patched"]}
        for i, (label, kl, flow) in enumerate(zip(shown["labels"][1:], shown["kl"], shown["flow"])):
            patched = [layer for layer in range(shown["layers"]) if (i + 1, layer) in worth]
            head = "".join(
                f"<th>{text}</th>" for text in ("layer", "after attention", "after MLP", *(["KL if patched back"] if patched else []))
            )
            rows = "".join(
                f"<tr>{cell}{layer}</td>{cell}{flow[2 * layer + 1]:.2%}</td>{cell}{flow[2 * layer + 2]:.2%}</td>"
                + (f"{cell}{worth[i + 1, layer]:.3g}</td>" if layer in patched else f"{cell}</td>" if patched else "")
                + "</tr>"
                for layer in range(shown["layers"])
            )
            caption = (
                f"{html.escape(label)} against {html.escape(shown['labels'][0])}: relative error of the residual stream; mean KL {kl:.3g}"
            )
            tables.append(
                f'<table style="font-size:12px"><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
            )
        return f'<div style="display:flex;flex-wrap:wrap;gap:12px 24px">{"".join(tables)}</div>'


def _short(value: float) -> float:
    return float(f"{value:.4g}")

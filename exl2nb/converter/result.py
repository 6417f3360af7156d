"""Result of a conversion: allocation per matrix, bits, bytes, seconds, held-out quality; as data, table and picture."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exl2nb.converter.allocation import MixedMatrix
from exl2nb.converter.measurement import Measurement
from exl2nb.core.show import bits_cell, size_text
from exl2nb.io.atomic import atomic_write
from exl2nb.model import reference
from exl2nb.model.config import ModelConfig

if TYPE_CHECKING:
    import pandas as pd

    from exl2nb.converter.blockwise import Layerwise
    from exl2nb.converter.polish import Polished
    from exl2nb.converter.tuning import Tuned


@dataclass(frozen=True)
class Quality:
    """Held-out quality.

    rows x length: tokens judged. kl: mean KL(source || made) in nats per token; kl_low, kl_high: 95 % confidence, over rows.
    top1: share of tokens whose most likely successor is the same. ppl, source_ppl: perplexities of the made model and of its source.
    """

    rows: int
    length: int
    kl: float
    kl_low: float
    kl_high: float
    top1: float
    ppl: float
    source_ppl: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, None for NaN."""
        return {name: None if value != value else value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        spread = "" if math.isnan(self.kl_low) else f" ({self.kl_low:.5f} to {self.kl_high:.5f})"
        count = f"{self.rows} row{'' if self.rows == 1 else 's'} of {self.length} tokens"
        return (
            f"held-out KL {self.kl:.5f}{spread}, top-1 {100 * self.top1:.2f} %, "
            f"perplexity {self.ppl:.3f} (source {self.source_ppl:.3f}), {count}"
        )


# two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the table the last one
_T_QUANTILES = (
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.23,
    2.20,
    2.18,
    2.16,
    2.14,
    2.13,
    2.12,
    2.11,
    2.10,
    2.09,
    2.09,
    2.04,
)


def mean_interval(values: list[float]) -> tuple[float, float, float]:
    """Mean and its 95 % confidence interval, NaN for one value, which has none."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, math.nan, math.nan
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    t = _T_QUANTILES[min(n - 2, len(_T_QUANTILES) - 1)]
    return mean, mean - t * deviation, mean + t * deviation


def judge_rows(
    config: ModelConfig, ids: Tensor, dense: tuple[Mapping[str, Tensor], Tensor], made: tuple[Mapping[str, Tensor], Tensor]
) -> Quality:
    """Compare two models on the streams before their heads.

    Args:
        ids: int `(rows, S)`.
        dense, made: embedding, norm and head of the model, and its stream f32 `(rows, S, H)`.
    """
    kls, same, nlls = [], 0, ([], [])
    for row, x, y in zip(ids.to(dense[1].device), dense[1], made[1]):
        wanted, found = (
            reference.head(config, ends, reference.final_norm(config, ends, part)).log_softmax(-1)
            for ends, part in ((dense[0], x), (made[0], y))
        )
        kls.append(float((wanted.exp() * (wanted - found)).sum(-1).mean(dtype=torch.float64)))
        same += int((wanted.argmax(-1) == found.argmax(-1)).sum())
        for nll, logprobs in zip(nlls, (wanted, found)):
            nll.append(-float(logprobs[:-1].gather(-1, row[1:, None].long().to(logprobs.device)).mean(dtype=torch.float64)))
    kl, low, high = mean_interval(kls)
    source, own = (math.exp(min(700.0, sum(nll) / len(nll))) for nll in nlls)
    return Quality(len(ids), ids.shape[1], kl, low, high, same / ids.numel(), own, source)


_SHADE_CHARACTERS = " ░▒▓█"
_LAYERS_PER_BLOCK = 20  # layers of one block of the terminal picture


@dataclass(frozen=True)
class QuantizedMatrix(MixedMatrix):
    """One quantised matrix.

    predicted_kl: what the measurement expects it to cost, nats per token (0 where it was not measured). loss: sum over columns of
    dW^T H dW on the stream it was quantised on.
    """

    predicted_kl: float
    loss: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Conversion:
    """A finished conversion.

    path: the model directory. target_bpw: asked for. bpw: reached: all that the layers store over the weights of their
    matrices; head and embedding not counted. nbytes: of the
    weight files. matrices: in running order, the head last. seconds: per stage. measurement: pass it to the next conversion of this model.
    resumed_layers: layers taken over from an interrupted run. quality: on held-out rows of the calibration text, None without any.
    device: "cpu" or "cuda", where it was computed. polished: what the polish stage found, None where it did not run.
    descent: sweeps of coordinate descent after GPTQ, at most; the matrices' losses are those after it.
    blocks, tuned: what block-wise learning and tuning found, None where they did not run; the matrices' losses are those before them.
    asked: the target, the head's bits, overrides and whether choices were frozen, as they were given.
    """

    path: Path
    source: Path
    target_bpw: float
    bpw: float
    head_bits: float
    nbytes: int
    matrices: tuple[QuantizedMatrix, ...]
    seconds: dict[str, float]
    calibration: dict[str, Any]
    resumed_layers: int
    measurement: Measurement = field(repr=False)
    quality: Quality | None = None
    device: str = "cpu"
    polished: Polished | None = None
    descent: int = 0
    blocks: Layerwise | None = None
    tuned: Tuned | None = None
    asked: dict[str, Any] = field(default_factory=dict)

    @property
    def predicted_kl(self) -> float:
        """Sum of what the measurement expects, nats per token; good for ranking, not for reporting: measure with `compare`."""
        return sum(matrix.predicted_kl for matrix in self.matrices)

    @property
    def expert_tokens(self) -> dict[int, list[int]]:
        """Layer -> calibration tokens that chose each of its experts; empty for a model without experts."""
        return {int(layer): counts for layer, counts in self.measurement.calibration.get("expert_tokens", {}).items()}

    @property
    def unseen(self) -> tuple[str, ...]:
        """Matrices of experts that no calibration token visited: quantised on a sample of all tokens."""
        seen = self.expert_tokens
        return tuple(
            m.key for m in self.matrices if "." in m.role and m.layer in seen and seen[m.layer][int(m.role.partition(".")[2])] == 0
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, the same for the same conversion: no times, no paths."""
        total = self.predicted_kl or 1.0
        names = ("key", "bpw", "mix", "group_size", "loss", "predicted_kl")
        return {
            "asked": self.asked,
            "target_bpw": self.target_bpw,
            "bpw": self.bpw,
            "head_bits": self.head_bits,
            "bytes": self.nbytes,
            "calibration": self.calibration,
            "device": self.device,
            "predicted_kl": self.predicted_kl,
            "polished": self.polished.to_dict() if self.polished else None,
            "quality": self.quality.to_dict() if self.quality else None,
            **({"descent": self.descent} if self.descent else {}),
            **({"blocks": self.blocks.to_dict()} if self.blocks else {}),
            **({"tuned": self.tuned.to_dict()} if self.tuned else {}),
            "unseen": list(self.unseen),
            "matrices": [{**{name: getattr(m, name) for name in names}, "share": m.predicted_kl / total} for m in self.matrices],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON (the model directory has it too, as `conversion.json`)."""
        with atomic_write(path) as file:
            file.write((json.dumps(self.to_dict(), indent=1) + "\n").encode())

    def to_frame(self) -> pd.DataFrame:
        """One line per matrix: key, layer, role, in_features, out_features, bpw, mix, group_size, predicted_kl, loss."""
        import pandas as pd

        names = ("key", "layer", "role", "in_features", "out_features", "bpw", "mix", "group_size", "predicted_kl", "loss")
        return pd.DataFrame([{name: getattr(m, name) for name in names} for m in self.matrices])

    def map(self) -> str:
        """Terminal picture: layers across, roles down, bits per weight of each matrix with a shade."""
        roles, layers = self._grid()
        wide, lines = max(5, *map(len, roles)), list[str]()
        for first in range(0, len(layers), _LAYERS_PER_BLOCK):
            shown = list(layers)[first : first + _LAYERS_PER_BLOCK]
            lines.append(f"{'layer':<{wide}}" + "".join(f"{layer:>6}" for layer in shown))
            lines += [f"{role:<{wide}}" + "".join(_shaded_cell(layers[layer].get(role)) for layer in shown) for role in roles]
        return "\n".join([*lines, f"{'head':<{wide}}{_shaded_cell(self.matrices[-1])}"])

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        return (
            f"{self.path}: {self.bpw:.4f} bits per weight (target {self.target_bpw:g}, head {self.head_bits}), {size_text(self.nbytes)}\n"
            f"{stages} on {self.device}{self._quality_line()}\n{self.map()}"
        )

    def _quality_line(self) -> str:
        unseen = f"\n{len(self.unseen)} matrices of experts without a calibration token" if self.unseen else ""
        return "".join(f"\n{one}" for one in (self.quality, self.blocks, self.tuned) if one) + unseen

    def __repr__(self) -> str:
        return f"Conversion({str(self.path)!r}, bpw={self.bpw:.4f}, head_bits={self.head_bits}, nbytes={self.nbytes})"

    def _repr_html_(self) -> str:
        roles, layers = self._grid()
        header = "".join(f"<th>{layer}</th>" for layer in layers)
        body = "".join(f"<tr><th>{role}</th>{''.join(_html_cell(row.get(role)) for row in layers.values())}</tr>" for role in roles)
        body += f"<tr><th>head</th>{_html_cell(self.matrices[-1])}</tr>"
        facts = f"{self.bpw:.4f} bits per weight (target {self.target_bpw:g}), head {self.matrices[-1].bpw:.2f}, {size_text(self.nbytes)}"
        return (
            '<div style="font:13px/1.4 system-ui,sans-serif">'
            f"<b>{html.escape(str(self.path))}</b><br>{facts}, {sum(self.seconds.values()):.1f} s on {self.device}"
            f"{html.escape(self._quality_line()).replace(chr(10), '<br>')}"
            f'<table style="font-size:12px;font-variant-numeric:tabular-nums"><tr><th>layer</th>{header}</tr>{body}</table></div>'
        )

    def _grid(self) -> tuple[list[str], dict[int, dict[str, QuantizedMatrix]]]:
        layers: dict[int, dict[str, QuantizedMatrix]] = {}
        for matrix in self.matrices[:-1]:
            layers.setdefault(matrix.layer, {})[matrix.role] = matrix
        return list(dict.fromkeys(m.role for m in self.matrices[:-1])), layers


def _shaded_cell(matrix: QuantizedMatrix | None) -> str:
    if matrix is None:
        return " " * 6
    level = min(len(_SHADE_CHARACTERS) - 1, max(0, int((matrix.bpw - 2) / 6.2 * len(_SHADE_CHARACTERS))))
    return f" {_SHADE_CHARACTERS[level] * 2}{matrix.bpw:3.1f}"


def _html_cell(matrix: QuantizedMatrix | None) -> str:
    return "<td></td>" if matrix is None else bits_cell(matrix.bpw, matrix.mix, "padding:1px 4px;text-align:center")

"""LoraExplorer: which matrices an adapter changes and how much, and what that does to an answer, at any scale."""

from __future__ import annotations

import html
import math
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import traitlets as t

from exl2nb.core.errors import OptionError
from exl2nb.eval.comparison import token_divergence
from exl2nb.eval.rows import RowRunner
from exl2nb.model.lora import change_sizes
from exl2nb.sampling.params import check_integer
from exl2nb.widgets.protocol import KlToken, LoraCell, LoraExplorerState, LoraResult
from exl2nb.widgets.sides import InsideWidget

if TYPE_CHECKING:
    import pandas as pd

    from exl2nb.llm.llm import LLM

_ROLE_ORDER = ("q", "k", "v", "o", "gate", "up", "down", "embed", "head")
_MOST_SCALE = 4.0
_PICTURE_PX = 10


class LoraExplorer(InsideWidget):
    """A map of the matrices with the norm of the change against the matrix's own, and one answer without and with the adapter.

    The slider sets the adapter's scale; the answer is regenerated greedily beside the model's own, and every token is coloured by the KL
    between the two, KL(model || with the adapter), given the text so far.

    Args:
        llm: the model. lora: name of an adapter that it has loaded.
        prompt: what both continue.
        max_tokens: of an answer, 1 to 256.
        result: what `to_dict` gave, in place of a model.

    Traits, also keywords (synced with the page both ways):
        prompt: as above.
        scale: -4 to 4. Default 1.
        selected: [layer, matrix], layer -1 outside the layers; [] for none.

    Raises:
        OptionError: no such adapter, a prompt that is too short or too long, a scale out of range.

    Cost: unpacks every matrix that the adapter changes, once.

    Example:
        >>> LoraExplorer(llm, "pirate")  # doctest: +SKIP
        LoraExplorer(pirate at scale 1: 84 matrices, change 5.3 % on average, at most 11.2 % in layer 3 v; mean KL 0.41)
    """

    _bundle, _state_type = "lora", LoraExplorerState
    _empty = LoraResult(name="", model="", matrices=[], layers=[], cells=[], scale=1.0, base=[], adapted=[], kl=None)
    _least = 1

    scale = t.Float(1.0).tag(sync=True, option=True)
    selected = t.List().tag(sync=True, option=True)

    def __init__(
        self,
        llm: LLM | None = None,
        lora: str = "",
        prompt: str | None = None,
        *,
        max_tokens: int = 40,
        result: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        check_integer("LoraExplorer: max_tokens", max_tokens, 1, 256)
        self._lora, self._max_tokens = lora, max_tokens
        self._cells: list[LoraCell] = []
        super().__init__(None if llm is None else {lora or "llm": llm}, prompt, result=result, **kwargs)
        if result is not None:
            self.scale = float(self._result["scale"])

    @t.validate("scale")
    def _in_range(self, proposal: Mapping[str, Any]) -> float:
        value = float(proposal["value"])
        if not abs(value) <= _MOST_SCALE:
            raise OptionError(f"LoraExplorer: scale is {value!r}; expected {-_MOST_SCALE:g} to {_MOST_SCALE:g}")
        return value

    @t.validate("selected")
    def _cell_name(self, proposal: Mapping[str, Any]) -> list[Any]:
        value = list(proposal["value"])
        if value and (len(value) != 2 or not isinstance(value[0], int) or not isinstance(value[1], str)):
            raise OptionError(f"LoraExplorer: selected is {value!r}; expected [layer, matrix], such as [3, 'down'], or []")
        return value

    # ---- measuring

    def _read(self, stop: threading.Event) -> None:
        """Measure, and again as long as the slider has moved meanwhile."""
        while True:
            super()._read(stop)
            if stop.is_set() or abs(self._result["scale"] - self.scale) < 1e-3:
                return

    def _measure(self, ids: list[int], stop: threading.Event) -> dict[str, Any] | None:
        llm, scale = self.sides[0].llm, round(self.scale, 4)
        shown: Any = dict(self._result)
        lora = llm.loras[self._lora]
        if not self._cells:
            sizes = change_sizes(lora.file, llm.model)
            self._cells = [LoraCell(one.layer, one.role, one.rank, _short(one.change), _short(one.weight)) for one in sizes]
        cells: Any = [list(cell) for cell in self._cells]  # plain, as from a file
        if not shown["base"] or ids != self._ids:
            shown["base"] = [list(token) for token in self._answer(ids, None)]
        if stop.is_set():
            return None
        answer = self._answer(ids, {self._lora: scale})
        adapted: Any = [list(token) for token in answer]
        known = [token.kl for token in answer if token.kl is not None]
        roles = [role for role in _ROLE_ORDER if any(cell.matrix == role for cell in self._cells)]
        return {
            **LoraResult(
                name=self._lora, model=str(llm.name), matrices=roles,
                layers=sorted({cell.layer for cell in self._cells if cell.layer >= 0}), cells=cells, scale=scale,
                base=shown["base"], adapted=adapted, kl=_short(sum(known) / len(known)) if known else None,
            )
        }  # fmt: skip

    def _answer(self, ids: list[int], lora: dict[str, float] | None) -> list[KlToken]:
        """A continuation; with an adapter, measured against the model without."""
        llm = self.sides[0].llm
        done = llm.generate(ids, max_tokens=self._max_tokens, temperature=0, lora=lora)
        if lora is None:
            return [KlToken(0, token.text, token.id, _short(math.exp(token.logprob)), None, None, None, None) for token in done.tokens]
        row = llm.loras.row(lora, where="LoraExplorer")
        text = torch.tensor([*ids, *(token.id for token in done.tokens)], dtype=torch.int32)
        found = [_logprobs(llm, text, len(ids), -1), _logprobs(llm, text, len(ids), -1 if row is None else row.row)]
        kl, same = token_divergence(found[0], found[1])
        tokens = []
        for i, token in enumerate(done.tokens):
            favourite = None if same[i] else llm.tokenizer.piece(int(found[0][i].argmax()))
            plain, mine = (_short(float(one[i, token.id].exp())) for one in found)
            tokens.append(KlToken(1, token.text, token.id, mine, plain, _short(float(kl[i])), bool(same[i]), favourite))
        return tokens

    def _receive_scale(self, message: Mapping[str, Any]) -> None:
        scale = message.get("scale")
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise OptionError("LoraExplorer: the page sent an invalid scale; reload it")
        self.scale = float(scale)
        if not self._background.alive:
            self.start()

    def at(self, scale: float) -> LoraExplorer:
        """Set the scale and regenerate the answer; returns when it is done.

        Raises:
            OptionError: a scale out of range, or no model is attached.
        """
        self.scale = scale
        self.start()
        return self.wait()

    # ---- without the page

    @property
    def cells(self) -> list[LoraCell]:
        """Every matrix that the adapter changes."""
        return [LoraCell(*cell) for cell in self._result["cells"]]

    def to_frame(self) -> pd.DataFrame:
        """One row per matrix: layer, matrix, rank, change and weight (Frobenius norms at scale 1), relative."""
        import pandas as pd

        rows = [{**cell._asdict(), "relative": _relative(cell)} for cell in self.cells]
        return pd.DataFrame(rows, columns=[*LoraCell._fields, "relative"])

    def to_token_frame(self) -> pd.DataFrame:
        """One row per token of the answer with the adapter: text, prob, model_prob, kl."""
        import pandas as pd

        tokens = [KlToken(*token) for token in self._result["adapted"]]
        return pd.DataFrame([{"text": o.text, "prob": o.prob, "model_prob": o.reference_prob, "kl": o.kl} for o in tokens])

    def _summary(self) -> str:
        cells, shown = self.cells, self._result
        if not cells:
            return f"LoraExplorer({shown['name'] or self.status})"
        most = max(cells, key=_relative)
        where = most.matrix if most.layer < 0 else f"layer {most.layer} {most.matrix}"
        mean = sum(map(_relative, cells)) / len(cells)
        text = f"{len(cells)} matrices, change {mean:.1%} on average, at most {_relative(most):.1%} in {where}".replace("%", " %")
        kl = "" if shown["kl"] is None else f"; mean KL {shown['kl']:.3g}"
        return f"LoraExplorer({shown['name']} at scale {shown['scale']:g}: {text}{kl})"

    def _static_body(self) -> str:
        shown, cells = self._result, {(cell.layer, cell.matrix): cell for cell in self.cells}
        layers = [*shown["layers"], *([-1] if any(layer < 0 for layer, _ in cells) else [])]
        head = "".join(f"<th>{'outside' if layer < 0 else layer}</th>" for layer in layers)
        lines = [(matrix, "".join(_cell(cells.get((layer, matrix))) for layer in layers)) for matrix in shown["matrices"]]
        rows = "".join(f"<tr><th style='text-align:left'>{html.escape(matrix)}</th>{line}</tr>" for matrix, line in lines)
        title = f"{html.escape(shown['name'])}: norm of the change relative to the matrix, %, at scale 1"
        table = f"<caption>{title}</caption><thead><tr><th>layer</th>{head}</tr></thead><tbody>{rows}</tbody>"
        answers = {"model alone": shown["base"], f"with the adapter at {shown['scale']:g}": shown["adapted"]}
        texts = "".join(_text(name, tokens) for name, tokens in answers.items())
        columns = f'<div style="display:flex;flex-wrap:wrap;gap:12px 24px">{texts}</div>'
        return f'<div><table style="font-size:12px">{table}</table>{columns}</div>'


def _logprobs(llm: LLM, text: torch.Tensor, prompt: int, adapter: int) -> torch.Tensor:
    """Log probabilities f64 `(n, V)` before each token after the prompt."""
    runner = RowRunner(llm.engine.shared_model, len(text), adapter=adapter)
    logits = torch.cat([piece.float().cpu() for _, piece in runner.pieces(text)])
    return logits[prompt - 1 : -1].double().log_softmax(dim=-1)


def _relative(cell: LoraCell) -> float:
    return cell.change / max(cell.weight, 1e-20)


def _cell(cell: LoraCell | None) -> str:
    return f'<td style="text-align:right;padding:0 6px">{"" if cell is None else f"{100 * _relative(cell):.1f}"}</td>'


def _text(name: str, tokens: Sequence[Any]) -> str:
    words = html.escape("".join(token[1] for token in tokens))
    return f'<div style="flex:1 1 20em"><b>{name}</b><div style="white-space:pre-wrap">{words}</div></div>'


def _short(value: float) -> float:
    return float(f"{value:.4g}")

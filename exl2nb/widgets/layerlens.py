"""LayerLens: what a model would predict after each layer, at several bitrates side by side, and where they diverge."""

from __future__ import annotations

import html
import threading
from typing import TYPE_CHECKING, Any

import traitlets as t

from exl2nb.widgets import static
from exl2nb.widgets.protocol import LayerLensState, LensResult
from exl2nb.widgets.sides import InsideWidget, passes

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from exl2nb.eval.trace import Trace

TOP_TOKENS = 3
PROBABILITY_SCALE = 10_000  # of a probability of 1, as it travels
_PICTURE_PX = 8


class LayerLens(InsideWidget):
    """The logit lens: the model's head on the residual stream after every layer, to see the answer form, at each bitrate.

    The map has layers up and tokens across; its colour is the KL between the reference and another model at the same depth. For the chosen
    token the curves show the probability of the token that the reference finds most likely in the end, and the table the best three
    tokens after every layer.

    Args:
        models: one to four bitrates or caches of one model by label, the reference first: loaded models, or pairs (model, {"cache": mode}).
        prompt: text that is read, 2 to 128 tokens.
        result: what `to_dict` gave, in place of models.
        wait: False = return at once and measure in the background; `.wait()` waits for it.

    Traits, also keywords (synced with the page both ways):
        prompt: as above.
        side: index of the model that the map compares with the reference. Default 1.
        token: the chosen token, whose successor is predicted; -1 = the last one. Default -1.

    Raises:
        OptionError: no bitrates or caches of one model, or a prompt that is too short or too long.

    Example:
        >>> LayerLens({"16 bits": llm, "4 bits": low}, "It was a dark")  # doctest: +SKIP
        LayerLens(5 tokens, 12 layers; 4 bits: top-1 differs at 7 of 60 places)
    """

    _bundle, _state_type = "layerlens", LayerLensState
    _empty = LensResult(labels=[], layers=0, texts=[], words=[], top=[], prob=[], target=[], chance=[], kl=[])
    _least = 1
    _most_tokens = 128

    token = t.Int(-1).tag(sync=True, option=True)

    def _measure(self, ids: list[int], stop: threading.Event) -> dict[str, Any] | None:
        first, tokenizer = self.sides[0], self.sides[0].llm.tokenizer
        layers = first.llm.config.num_layers
        final = first.trace(ids, ["logits"])
        target, numbers = final.logits.argmax(-1), dict[int, int]()
        result = LensResult(
            labels=[side.label for side in self.sides], layers=layers, texts=list(final.texts), words=[],
            top=[[] for _ in self.sides], prob=[[] for _ in self.sides], target=[], chance=[[] for _ in self.sides],
            kl=[[] for _ in self.sides[1:]],
        )  # fmt: skip
        result["target"] = [numbers.setdefault(int(i), len(numbers)) for i in target]
        for some, names in passes(first, ("hook_resid_post",), len(ids)):
            capture = [*names, *(["blocks.0.hook_resid_pre"] if some[0] == 0 else [])]
            traces = [side.trace(ids, capture) for side in self.sides]
            for layer in ([-1] if some[0] == 0 else []) + list(some):
                if stop.is_set():
                    return None
                self._layer(layer, traces, target, numbers, result)
        result["words"] = [tokenizer.piece(i) for i in numbers]
        return {**result}

    @staticmethod
    def _layer(layer: int, traces: list[Trace], target: Tensor, numbers: dict[int, int], result: LensResult) -> None:
        """Add one depth; -1: the embedding."""
        from exl2nb.eval.trace import divergence

        lenses = [one.lens(0, "hook_resid_pre") if layer < 0 else one.lens(layer) for one in traces]
        for i, logits in enumerate(lenses):
            probs = logits.softmax(-1)
            top = probs.topk(TOP_TOKENS, -1)
            result["top"][i] += [numbers.setdefault(number, len(numbers)) for number in top.indices.flatten().tolist()]
            result["prob"][i] += [round(PROBABILITY_SCALE * value) for value in top.values.flatten().tolist()]
            chance = probs.gather(1, target[:, None])[:, 0]
            result["chance"][i] += [round(PROBABILITY_SCALE * value) for value in chance.tolist()]
            if i:
                result["kl"][i - 1] += [float(f"{value:.3g}") for value in divergence(lenses[0], logits).tolist()]

    # ---- without the page

    def to_frame(self) -> pd.DataFrame:
        """One row per model, layer (-1: the embedding) and token: model, layer, token, text, top, prob, target, chance, kl."""
        import pandas as pd

        shown: Any = self._result
        words, count, rows = shown["words"], len(shown["texts"]), []
        for i, label in enumerate(shown["labels"]):
            for depth in range(shown["layers"] + 1):
                for token, text in enumerate(shown["texts"]):
                    at = depth * count + token
                    row = {"model": label, "layer": depth - 1, "token": token, "text": text, "top": words[shown["top"][i][TOP_TOKENS * at]]}
                    row |= {"prob": shown["prob"][i][TOP_TOKENS * at] / PROBABILITY_SCALE, "target": words[shown["target"][token]]}
                    rows.append({**row, "chance": shown["chance"][i][at] / PROBABILITY_SCALE, "kl": shown["kl"][i - 1][at] if i else 0.0})
        return pd.DataFrame(rows)

    def _parted(self, side: int) -> int:
        """In how many places a model's top-1 token is not the reference's."""
        shown: Any = self._result
        top = shown["top"]
        return sum(a != b for a, b in zip(top[0][::TOP_TOKENS], top[side][::TOP_TOKENS]))

    def _summary(self) -> str:
        shown: Any = self._result
        places, sizes = (shown["layers"] + 1) * len(shown["texts"]), f"{len(shown['texts'])} tokens, {shown['layers']} layers"
        parts = [f"{label}: top-1 differs at {self._parted(i + 1)} of {places} places" for i, label in enumerate(shown["labels"][1:])]
        return f"LayerLens({'; '.join([sizes, *parts])})"

    def _static_body(self) -> str:
        shown: Any = self._result
        count = len(shown["texts"])
        if not count:
            return "<div></div>"
        token = self.token if 0 <= self.token < count else count - 1
        style = ' style="text-align:left;padding:0 8px"'
        head = "".join(f"<th{style}>{html.escape(label)}</th>" for label in shown["labels"])
        rows = []
        for depth in range(shown["layers"] + 1):
            at = depth * count + token
            cells = "".join(
                f"<td{style}>{html.escape(repr(shown['words'][top[TOP_TOKENS * at]]))} "
                f"{static.percent(prob[TOP_TOKENS * at] / PROBABILITY_SCALE)}</td>"
                for top, prob in zip(shown["top"], shown["prob"])
            )
            rows.append(f"<tr><th{style}>{depth - 1 if depth else 'embedding'}</th>{cells}</tr>")
        text = html.escape("".join(shown["texts"][: token + 1])[-60:])
        caption = f"Top-1 token after “{text}”, by layer"
        return f'<table style="font-size:12px"><caption>{caption}</caption><tr><th{style}>layer</th>{head}</tr>{"".join(rows)}</table>'

"""Hessians of experts: few tokens choose one and some choose none, so what they lack comes from a sample of all tokens.

An expert that n tokens chose knows n directions of its K inputs. Below K tokens its Hessian is therefore blended with that of the expert
run on tokens of every kind: (1 - n / K)^2 of the latter, all of it for an expert that nobody chose.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from exl2nb.model import reference
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import layer_linears

SAMPLE_TOKENS = 2048
FLOOR = 0.02  # of the mean: how much every expert counts at least; calibration rows say little about one that they rarely visit


class Sample:
    """Tokens from everywhere in the rows, as the router sees them.

    Args:
        config: the model.
        layer: its index; nothing is kept in a layer without experts.
        tokens: how many will pass.
    """

    def __init__(self, config: ModelConfig, layer: int, tokens: int) -> None:
        self._config, self._layer, self._moe = config, layer, config.experts(layer)
        self._router = config.names.at(layer, "router") if self._moe is not None else ""
        self._stride = max(1, tokens // SAMPLE_TOKENS)
        self._seen: list[Tensor] = []

    def see(self, key: str, value: Tensor) -> None:
        """Keep some tokens of what the router reads; to be called with every captured input."""
        if self._moe is not None and key == self._router:
            self._seen.append(value.detach().flatten(0, -2)[:: self._stride])

    def complete(self, weights: Mapping[str, Tensor], hessians: Mapping[str, Tensor], tokens: Mapping[str, int]) -> dict[str, Tensor]:
        """The Hessians with those of all experts among them.

        Args:
            weights: the layer's dense tensors.
            hessians: input name -> f64 `(K, K)`, of the experts that any token chose.
            tokens: input name -> how many.
        """
        found = dict(hessians)
        if self._moe is None:
            return found
        x = torch.cat(self._seen)
        common = _moment(x)
        for expert in range(self._moe.num_experts):
            gate, down = f"gate.{expert}", f"down.{expert}"
            self._blend(found, gate, tokens.get(gate, 0), common)
            if tokens.get(down, 0) < self._moe.intermediate_size:
                self._blend(found, down, tokens.get(down, 0), _moment(self._inner(weights, x, expert)))
        return found

    def _inner(self, weights: Mapping[str, Tensor], x: Tensor, expert: int) -> Tensor:
        linears, seen = layer_linears(self._config, self._layer), {}

        def capture(key: str, value: Tensor, rows: Tensor | None = None) -> None:
            seen[key] = value

        reference.expert_mlp(self._config, linears, weights, x, f".{expert}", capture, None)
        return seen[linears[f"down.{expert}"].key]

    @staticmethod
    def _blend(found: dict[str, Tensor], name: str, tokens: int, common: Tensor) -> None:
        share = max(0.0, 1.0 - tokens / len(common)) ** 2
        found[name] = common if name not in found else (1.0 - share) * found[name] + share * common


def level(gradients: Mapping[str, Tensor], roles: Mapping[str, str]) -> dict[str, Tensor]:
    """Squared gradients of all linears, those of experts raised by FLOOR of the mean over the experts of the layer.

    Args:
        gradients: linear key -> f64 `(N,)`. roles: linear key -> role.
    """
    means: dict[str, list[float]] = {}
    for key, role in roles.items():
        means.setdefault(role.partition(".")[0], []).append(float(gradients[key].mean()))
    return {
        key: gradients[key] + FLOOR * sum(means[role.partition(".")[0]]) / len(means[role.partition(".")[0]])
        if "." in role
        else gradients[key]
        for key, role in roles.items()
    }


def _moment(x: Tensor) -> Tensor:
    return (x.T @ x).double() / max(len(x), 1)

"""What experts need in a conversion: few tokens choose one and some choose none, so what they lack comes from a sample of all tokens.

An expert that n tokens chose knows n directions of its K inputs. Below K tokens a sample of all tokens joins them, as if it were
(1 - n / K)^2 of what the expert sees; all of it for an expert that no token chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from exl2nb.converter.hessian import Factor, Moments, factorize, strip_expert
from exl2nb.model import reference
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import layer_linears

SAMPLE_TOKENS = 2048
MIN_EXPERT_SHARE = 0.02  # of the mean: how much every expert counts at least; calibration rows say little about one that they rarely visit
Weights = Mapping[str, Tensor]


def share_of_sample(tokens: int, in_features: int) -> float:
    """How much of an expert's Hessian comes from the sample."""
    return max(0.0, 1.0 - tokens / in_features) ** 2


class RoutedSample:
    """Tokens from everywhere in the rows, as the router sees them.

    Args:
        layer: its index; nothing is kept in a layer without experts.
        tokens: how many will pass.
    """

    def __init__(self, config: ModelConfig, layer: int, tokens: int) -> None:
        self._config, self._layer, self._moe = config, layer, config.experts(layer)
        self._router = config.names.at(layer, "router") if self._moe is not None else ""
        self._stride = max(1, tokens // SAMPLE_TOKENS)
        self._seen: list[Tensor] = []

    def see(self, inputs: Mapping[str, Tensor]) -> None:
        """Keep some tokens of what the router reads. inputs: of captured linears, by key."""
        if self._moe is not None:
            self._seen.append(inputs[self._router].detach().flatten(0, -2)[:: self._stride])

    def complete(self, weights: Weights, hessians: Mapping[str, Tensor], tokens: Mapping[str, int]) -> dict[str, Tensor]:
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
        common = _weighted_moment(x)
        for expert in range(self._moe.num_experts):
            gate, down = f"gate.{expert}", f"down.{expert}"
            self._blend(found, gate, tokens.get(gate, 0), common)
            if tokens.get(down, 0) < self._moe.intermediate_size:
                self._blend(
                    found, down, tokens.get(down, 0), _weighted_moment(inner_activations(self._config, self._layer, weights, x, expert))
                )
        return found

    @staticmethod
    def _blend(found: dict[str, Tensor], name: str, tokens: int, common: Tensor) -> None:
        share = share_of_sample(tokens, len(common))
        found[name] = common if name not in found else (1.0 - share) * found[name] + share * common


def level_expert_gradients(gradients: Mapping[str, Tensor], roles: Mapping[str, str]) -> dict[str, Tensor]:
    """Squared gradients of all linears, those of experts raised by MIN_EXPERT_SHARE of the mean over the experts of the layer.

    Args:
        gradients: linear key -> f64 `(N,)`. roles: linear key -> role.
    """
    found: dict[str, list[float]] = {}
    for key, role in roles.items():
        found.setdefault(strip_expert(role), []).append(float(gradients[key].mean()))
    means = {stem: sum(values) / len(values) for stem, values in found.items()}
    return {key: gradients[key] + (MIN_EXPERT_SHARE * means[strip_expert(role)] if "." in role else 0.0) for key, role in roles.items()}


def inner_activations(config: ModelConfig, layer: int, weights: Weights, x: Tensor, expert: int) -> Tensor:
    """What the down matrix of an expert reads for tokens x f32 `(n, H)` -> `(n, I)`."""
    linears, seen = layer_linears(config, layer), {}

    def capture(key: str, value: Tensor, rows: Tensor | None = None) -> None:
        seen[key] = value

    reference.finish(reference.expert_steps(config, linears, weights, x, f".{expert}", capture, None))
    return seen[linears[f"down.{expert}"].key]


def expert_inputs(
    config: ModelConfig,
    layer: int,
    weights: tuple[Weights, Weights],
    streams: tuple[Tensor, Tensor],
    statistics: Mapping[str, Tensor],
    *,
    cross: bool,
) -> Iterator[tuple[str, Factor, Tensor | None]]:
    """Inputs of a layer's experts in turn: name, factor of its Hessian, cross moments (hessian.Factor.stored) where wanted.

    Args:
        weights: dense, and quantised so far; the latter may change between one input and the next.
        streams: what the router reads, f32 `(tokens, H)`: in the dense model, and in what is quantised so far, which routes.
        statistics: token weights of the layer, by "layer.gate" and "layer.down".
    """
    moe, (wanted, found) = config.experts(layer), streams
    assert moe is not None, layer
    chosen, _ = reference.route(config, layer, weights[1], found)
    sample = torch.arange(0, len(found), max(1, len(found) // SAMPLE_TOKENS), device=found.device)
    for expert in range(moe.num_experts):
        rows = (chosen == expert).any(1).nonzero().flatten()
        for name in (f"gate.{expert}", f"down.{expert}"):
            tokens = statistics.get(f"{layer}.{strip_expert(name)}")
            size = config.hidden_size if name.startswith("gate") else moe.intermediate_size
            index, weight = _join_samples(rows, sample, share_of_sample(len(rows), size), tokens)
            made, dense = found[index], wanted[index]
            if name.startswith("down"):
                made, dense = (inner_activations(config, layer, w, x, expert) for w, x in ((weights[1], made), (weights[0], dense)))
            moments = Moments()
            moments.add(name, made, weight)
            if cross:
                moments.add_cross("cross", made, dense - made, weight)
            hessians = moments.hessians()
            yield name, factorize(hessians[name], name=f"layer {layer}, input of {name}"), hessians.get("cross")


def _join_samples(rows: Tensor, sample: Tensor, share: float, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    """An expert's own tokens and, as `share` of the whole, those of the sample: their numbers, and what each counts."""
    own = torch.ones(len(rows), device=rows.device) if tokens is None else tokens.to(rows.device)[rows]
    if share == 0.0:
        return rows, own
    if share == 1.0:
        return sample, torch.ones(len(sample), device=sample.device)
    each = share / (1.0 - share) * float(own.sum()) / len(sample)
    return torch.cat([rows, sample]), torch.cat([own, torch.full((len(sample),), each, device=own.device)])


def _weighted_moment(x: Tensor) -> Tensor:
    return (x.T @ x).double() / max(len(x), 1)

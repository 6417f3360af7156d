"""What plans cost in truth, before one is carried out: KL of quickly rounded models on a few rows. Knows nothing of how plans are made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from exl2nb.converter.gptq import dense, quantize
from exl2nb.converter.hessian import Factor, Moments, advance, batches, factorize, input_of
from exl2nb.converter.options import Groups
from exl2nb.converter.weights import DenseWeights
from exl2nb.model import reference
from exl2nb.model.layout import Linear, head_linear, layer_linears
from exl2nb.quant.exl2 import Exl2Tensors

Choices = Mapping[str, Groups]
Made = dict[tuple[str, Groups], Exl2Tensors]  # packed, and on the host: of a large model there is no room for more


def true_kl(
    weights: DenseWeights, ids: Tensor, judged: Tensor, plans: Sequence[Choices], step: Callable[[str], None] = lambda detail: None
) -> Tensor:
    """KL of the model rounded by each of several plans.

    Every matrix is rounded once for each way in which a plan wants it, for the inputs that the dense model gives it on `ids`; plans run
    together up to the first layer in which they differ. So many plans that differ in little cost little more than one.

    Args:
        weights: the dense model, without experts.
        ids: calibration rows int32 `(R, S)`.
        judged: rows int32 `(J, S')` that share nothing with them.
        plans: module key -> groups.
        step: called with one line for people after every layer and the head.

    Returns:
        f64 `(len(plans), J)`: nats per token, a mean per row.
    """
    config, device, ends = weights.config, weights.device, weights.ends()
    x, wanted = (reference.embed(config, ends, rows.to(device)) for rows in (ids, judged))
    del ends
    streams, place = [wanted], [0] * len(plans)
    for layer in range(config.num_layers):
        linears, tensors = list(layer_linears(config, layer).values()), weights.layer(layer)
        hessians, x = _inputs(weights, layer, tensors, x)
        names, made = input_of({linear.role: linear for linear in linears}), Made()
        for name in dict.fromkeys(names.values()):
            factor = factorize(hessians.pop(name), name=f"layer {layer}, input of {name}")
            made |= _rounded([linear for linear in linears if names[linear.role] == name], tensors, factor, plans)
        ways = [(at, tuple(plan[linear.key] for linear in linears)) for at, plan in zip(place, plans)]
        apart = list(dict.fromkeys(ways))
        place = [apart.index(way) for way in ways]
        streams = [
            advance(config, layer, {**tensors, **_used(made, linears, how, device)}, streams[at], torch.empty_like(streams[at]))
            for at, how in apart
        ]
        wanted = advance(config, layer, tensors, wanted, torch.empty_like(wanted))
        step(f"layer {layer}")
    found = _judged(weights, x, wanted, [streams[at] for at in place], plans)
    step("head")
    return found


def _inputs(weights: DenseWeights, layer: int, tensors: Mapping[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Hessians of a layer's inputs, and the stream behind it."""
    config, moments, out = weights.config, Moments(), torch.empty_like(x)
    roles = {linear.key: role for role, linear in layer_linears(config, layer).items()}
    first = set(input_of(roles.values()).values())

    def capture(key: str, value: Tensor, rows: Tensor | None = None) -> None:
        if roles.get(key) in first:
            moments.add(roles[key], value)

    for part in batches(config, x, 0, len(x)):
        out[part] = reference.block(config, layer, tensors, x[part], capture)
    return moments.hessians(), out


def _rounded(linears: Sequence[Linear], tensors: Mapping[str, Tensor], factor: Factor, plans: Sequence[Choices]) -> Made:
    """Each linear in every way that a plan wants."""
    made = Made()
    for linear in linears:
        weight = tensors[f"{linear.key}.weight"]
        for groups in dict.fromkeys(plan[linear.key] for plan in plans):
            made[linear.key, groups] = quantize(weight, factor, groups)[0]
    return made


def _used(made: Made, linears: Sequence[Linear], how: Sequence[Groups], device: torch.device) -> dict[str, Tensor]:
    """Matrices as the network takes them."""
    return {f"{linear.key}.weight": dense(made[linear.key, groups], linear.out_features, device) for linear, groups in zip(linears, how)}


def _judged(weights: DenseWeights, x: Tensor, wanted: Tensor, streams: Sequence[Tensor], plans: Sequence[Choices]) -> Tensor:
    config, ends, moments = weights.config, weights.ends(embedding=False), Moments()
    linear = head_linear(config)
    for part in batches(config, x, 0, len(x)):
        moments.add("head", reference.final_norm(config, ends, x[part]))
    factor = factorize(moments.hessians()["head"], name="input of the head")
    made = _rounded([linear], ends, factor, plans)
    found = torch.zeros(len(plans), len(wanted), dtype=torch.float64)
    for groups in dict.fromkeys(plan[linear.key] for plan in plans):
        quantised = {**ends, **_used(made, [linear], [groups], weights.device)}
        for i, row in itertools.product([i for i, plan in enumerate(plans) if plan[linear.key] == groups], range(len(wanted))):
            target, got = (
                reference.head(config, tensors, reference.final_norm(config, ends, stream)).log_softmax(-1)
                for tensors, stream in ((ends, wanted[row]), (quantised, streams[i][row]))
            )
            found[i, row] = (target.exp() * (target - got)).sum(-1).mean(dtype=torch.float64).cpu()
    return found

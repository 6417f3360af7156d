"""What plans cost in truth, before one is carried out: KL of quickly rounded models on a few rows. Knows nothing of how plans are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from exl2nb.converter.gptq import dense, quantize
from exl2nb.converter.hessian import Factor, Moments, advance, batches, factorize, input_of
from exl2nb.converter.options import Groups
from exl2nb.converter.weights import DenseWeights
from exl2nb.model import reference
from exl2nb.model.layout import Linear, head_linear, layer_linears

Choices = Mapping[str, Groups]


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
        made = {}
        names = input_of({linear.role: linear for linear in linears})
        for name in dict.fromkeys(names.values()):
            factor = factorize(hessians.pop(name), name=f"layer {layer}, input of {name}")
            made |= _rounded([linear for linear in linears if names[linear.role] == name], tensors, factor, plans)
        apart = dict.fromkeys((at, tuple(plan[linear.key] for linear in linears)) for at, plan in zip(place, plans))
        number = {mark: i for i, mark in enumerate(apart)}
        place = [number[at, tuple(plan[linear.key] for linear in linears)] for at, plan in zip(place, plans)]
        streams = [
            advance(
                config,
                layer,
                {**tensors, **{f"{linear.key}.weight": made[linear.key, groups] for linear, groups in zip(linears, how)}},
                streams[at],
            )
            for at, how in apart
        ]
        wanted = advance(config, layer, tensors, wanted)
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


def _rounded(
    linears: Sequence[Linear], tensors: Mapping[str, Tensor], factor: Factor, plans: Sequence[Choices]
) -> dict[tuple[str, Groups], Tensor]:
    """Each linear in every way that a plan wants: f32 `(N, K)`."""
    made = {}
    for linear in linears:
        weight = tensors[f"{linear.key}.weight"]
        for groups in dict.fromkeys(plan[linear.key] for plan in plans):
            made[linear.key, groups] = dense(quantize(weight, factor, groups)[0], linear.out_features, weight.device)
    return made


def _judged(weights: DenseWeights, x: Tensor, wanted: Tensor, streams: Sequence[Tensor], plans: Sequence[Choices]) -> Tensor:
    config, ends, moments = weights.config, weights.ends(), Moments()
    linear = head_linear(config)
    for part in batches(config, x, 0, len(x)):
        moments.add("head", reference.final_norm(config, ends, x[part]))
    factor = factorize(moments.hessians()["head"], name="input of the head")
    made = _rounded([linear], ends, factor, plans)
    found = torch.zeros(len(plans), len(wanted), dtype=torch.float64)
    for row, source in enumerate(wanted):
        target = reference.head(config, ends, reference.final_norm(config, ends, source)).log_softmax(-1)
        probs = target.exp()
        for i, (plan, stream) in enumerate(zip(plans, streams)):
            quantised = {**ends, f"{linear.key}.weight": made[linear.key, plan[linear.key]]}
            got = reference.head(config, quantised, reference.final_norm(config, ends, stream[row])).log_softmax(-1)
            found[i, row] = (probs * (target - got)).sum(-1).mean(dtype=torch.float64).cpu()
    return found

import dataclasses

import pytest
import torch

from exl2nb.model import reference
from exl2nb.model.archs import parse_config
from exl2nb.model.layout import linears

from .tiny import CASES, ids_of, raw_config, truth, twin


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, seed):
    kind, changes = CASES[case]
    model = twin(kind, seed=seed, **changes)
    config = parse_config(raw_config(model))
    ids = ids_of(config.vocab_size, 2, 75, seed)
    want = truth(model, ids)
    with torch.no_grad():
        got = reference.logits(config, model.state_dict(), ids)
    assert (got - want).abs().max() < 1e-4 * want.std()


def test_capture_sees_the_input_of_every_linear():
    model = twin("qwen2")
    config, weights, seen = parse_config(raw_config(model)), model.state_dict(), {}
    hooks = {name: value for name, value in model.named_modules() if isinstance(value, torch.nn.Linear)}
    want = {}
    for name, module in hooks.items():
        module.register_forward_pre_hook(lambda _, args, name=name: want.__setitem__(name, args[0].detach()))
    ids = ids_of(config.vocab_size, 2, 20)
    truth(model, ids)
    with torch.no_grad():
        x = reference.embed(config, weights, ids)
        for layer in range(config.num_layers):
            x = reference.block(config, layer, weights, x, capture=seen.__setitem__)
        reference.head(config, weights, reference.final_norm(config, weights, x), capture=seen.__setitem__)
    assert list(seen) == [linear.key for linear in linears(config)] == list(want)
    for name, value in want.items():
        torch.testing.assert_close(seen[name], value, atol=1e-4, rtol=1e-4)


def test_gradients_flow_to_weights_and_input():
    model = twin("llama")
    config = parse_config(raw_config(model))
    weights = {name: value.detach().requires_grad_() for name, value in model.state_dict().items()}
    x = torch.randn(1, 9, config.hidden_size, requires_grad=True)
    reference.block(config, 0, weights, x).square().sum().backward()
    assert x.grad is not None
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for name, value in weights.items() if "layers.0" in name)


def test_softcaps():
    model = twin("llama")
    config = dataclasses.replace(parse_config(raw_config(model)), logit_softcap=2.0, attention_softcap=1e4)
    ids = ids_of(config.vocab_size, 1, 30)
    want = 2.0 * torch.tanh(truth(model, ids) / 2.0)
    with torch.no_grad():
        torch.testing.assert_close(reference.logits(config, model.state_dict(), ids), want, atol=1e-3, rtol=0)
    q = torch.randn(1, 2, 5, 8)
    plain, capped = (reference.attend(q, q, q, scale=1.0, softcap=cap) for cap in (1e5, 0.5))
    torch.testing.assert_close(plain, reference.attend(q, q, q, scale=1.0), atol=1e-4, rtol=0)
    assert (plain - capped).abs().max() > 0.05

"""Attention in plain products: the reference's, and its gradients."""

import pytest
import torch

from exl2nb.model import reference
from tests.model.tiny import ids_of


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt2", "qwen3", "mixtral"])
def test_the_same_network_and_gradients(name, opened, monkeypatch):
    config, weights = opened(name)
    monkeypatch.setattr(reference, "QUERIES_PER_BLOCK", 16)  # several blocks of queries, the last one short
    ids, found = ids_of(config.vocab_size, 3, 40), []
    for past in (None, reference.DenseAttention(config, 40, torch.device("cpu"))):
        x = reference.embed(config, weights, ids).requires_grad_(True)
        made = x
        for layer in range(config.num_layers):
            made = reference.block(config, layer, weights, made, past=past)
        found.append((made.detach(), torch.autograd.grad(made.square().sum(), x)[0]))
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)

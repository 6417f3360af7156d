"""Text that a dense model writes: the whole network's logits token by token, samples of its distribution, the same ones again."""

import pytest
import torch

from exl2nb.converter import writing
from exl2nb.converter.writing import rows_at_once, write_rows, writing_bytes
from exl2nb.model import reference
from tests.model.tiny import ids_of


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt2", "starcoder2", "qwen3", "cohere", "phi3", "olmo2", "mixtral"])
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_token_by_token_is_the_whole_network(name, masked, opened):
    config, weights = opened(name)
    ids, length = ids_of(config.vocab_size, 3, 40), 40
    past, found = writing.PastTokens(config, 3, length, torch.device("cpu")), []
    for at in range(length):
        past.positions.fill_(at)
        past.begin(length if masked else at + 1, masked)
        x = reference.embed(config, weights, ids[:, at : at + 1], past.positions)
        for layer in range(config.num_layers):
            x = reference.block(config, layer, weights, x, past=past)
        found.append(reference.head(config, weights, reference.final_norm(config, weights, x[:, 0])))
    torch.testing.assert_close(torch.stack(found, 1), reference.logits(config, weights, ids), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_samples_of_the_model(opened, monkeypatch):
    config, weights = opened("llama")
    begin = torch.tensor([[3, 5]]).expand(2000, 2)
    made = write_rows(config, weights, begin, 4, seed=0)
    assert made.shape == (2000, 4) and made.dtype == torch.int32
    assert torch.equal(made[:, :2], begin.int()), "rows go on from their beginnings"
    probs = reference.logits(config, weights, begin[:1])[0, -1].softmax(-1)
    counts = torch.bincount(made[:, 2].long(), minlength=config.vocab_size)
    expected = 2000 * probs
    large = expected > 5
    chi = ((counts - expected).square() / expected)[large].sum()
    assert chi < 2 * large.sum(), "as often as the model says"
    assert torch.equal(write_rows(config, weights, begin, 4, seed=0), made)
    assert not torch.equal(write_rows(config, weights, begin, 4, seed=1), made)
    assert len(write_rows(config, weights, begin[:0], 4, seed=0)) == 0
    monkeypatch.setitem(writing.WRITING_BYTES, "cpu", 1 << 20)
    rows, steps = rows_at_once(config, 4, torch.device("cpu")), []
    assert 1 < rows < 1000
    assert writing_bytes(config, 4, torch.device("cpu")) <= 1 << 20
    write_rows(config, weights, begin[: 2 * rows + 1], 4, 0, steps.append)
    assert steps == [rows] * 6 + [1] * 3, "tokens that were added"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt2", "mixtral"])
@torch.no_grad()
def test_without_noise_the_best_token_every_time(name, device, opened, monkeypatch):
    """On a GPU in recorded steps, several of them, and for all parts the same ones."""
    config, weights = opened(name)
    on_device = {key: tensor.float().to(device) for key, tensor in weights.items()}
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda noise, generator: noise.fill_(1))
    monkeypatch.setattr(writing, "CACHE_STEP_TOKENS", 16)
    monkeypatch.setattr(writing, "MAX_CONCURRENT_ROWS", 4)
    ids = write_rows(config, on_device, ids_of(config.vocab_size, 11, 3), 40, 0)
    found = reference.logits(config, on_device, ids.to(device))[:, 2:-1]
    chosen = found.gather(-1, ids[:, 3:, None].long().to(device))[..., 0]
    assert (found.amax(-1) - chosen).max() < 0.02 * found.std()

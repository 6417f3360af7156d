"""tools/train_demo_model.py: a few steps on the CPU give a directory that Transformers and exl2nb load, and agree on."""

import json
import os

import pytest
import torch

from exl2nb.eval.rows import logits
from exl2nb.model.loader import load_model
from exl2nb.tokenizer.tokenizer import Tokenizer

SMALL = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "context": 16}


@pytest.fixture(scope="module")
def tool(script):
    return script("tools/train_demo_model.py")


@pytest.fixture(scope="module")
def trained(tool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    (folder / "texts" / "deeper").mkdir(parents=True)
    for n in range(4):
        text = "\r\n\r\n".join(f"Chapter {i}.\r\nThe \u201csea\u201d was calm \u2014 and ship {i * n}\r\nlay still." for i in range(150))
        (folder / "texts" / ("deeper" if n % 2 else "") / f"{n}.txt").write_text(text, encoding="utf-8")
    words = [str(folder / "texts"), str(folder / "model"), "--toy", "--steps", "12", "--vocab-size", "320", "--device", "cpu"]
    assert tool.main(words) == 0
    return folder / "model"


def test_it_learns(tool):
    stream = torch.arange(4000, dtype=torch.int32) % 7 + 3
    shape = tool.Shape(**SMALL)
    recipe = tool.Recipe(steps=40, batch=8, warmup=5, peak_lr=1e-2)
    model, loss, steps = tool.train(stream, shape, recipe, device=torch.device("cpu"), compiled=False)
    assert steps == 40
    assert loss < 0.2, "a cycle of seven tokens is predictable"
    other = torch.randint(3, 16, (4000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    _, apart, _ = tool.train(other, shape, recipe, device=torch.device("cpu"), compiled=False, teacher=model)
    assert apart < 0.2, "it learns what its teacher says, not the text"
    assert tool.train(stream, shape, recipe, device=torch.device("cpu"), compiled=False, seconds=0.0)[2] == 3 * tool.PROBED


def test_a_text_in_pieces_has_the_same_tokens(tool, monkeypatch):
    text = "\n\n".join(f"Chapter {i}. The sea was calm, and ship {i * i} lay still." for i in range(200))
    tokenizer = tool.train_tokenizer([text], 320)
    monkeypatch.setattr(tool, "PIECE", 100)
    assert len(list(tool.pieces(text))) > 50
    assert tool.encode_all(tokenizer, [text, "One."]).tolist() == [
        *tokenizer.encode(text).ids, tool.EOS, *tokenizer.encode("One.").ids, tool.EOS
    ]  # fmt: skip


def test_same_seed_same_weights(tool):
    stream = torch.randint(3, 16, (500,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    shape = tool.Shape(**SMALL)
    one, other = (tool.train(stream, shape, tool.Recipe(steps=3, batch=2), device=torch.device("cpu"), compiled=False)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


def test_transformers_and_exl2nb_agree(trained, monkeypatch):
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    import transformers

    twin = transformers.AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()
    ids = torch.tensor([Tokenizer.load(trained).encode("The sea was calm -- and ship 7 lay still.")])
    assert ids[0, 0] == 1, "BOS is put in front"
    with torch.inference_mode():
        expected = twin(ids).logits
    model = load_model(trained)
    assert (logits(model, ids) - expected).abs().max() < 1e-4 * expected.std()
    model.close()


def test_text_is_cleaned(tool):
    assert tool.clean("One\r\nline\u2019s\r\n\r\n\r\n \u201cTwo\u201d\u2014") == 'One line\'s\n\n"Two"--'


def test_shards_and_index(tool, tmp_path):
    tensors = {f"t{i}": torch.ones(100) for i in range(5)}
    tool.save_shards(tensors, tmp_path, 450)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert index["metadata"]["total_size"] == 1000


def test_learning_rate_shape(tool):
    recipe = tool.Recipe(steps=1000)
    rates = [tool.learning_rate(step, recipe) for step in (0, 99, 100, 550, 1000)]
    assert rates == pytest.approx([2e-5, 2e-3, 2e-3, 1.05e-3, 1e-4])


@pytest.mark.parametrize(
    ("words", "message"), [(["--hidden-size", "65"], "num_heads"), (["--num-kv-heads", "3"], "num_heads"), ([], r"no \.txt file")]
)
def test_refusals(tool, tmp_path, words, message):
    with pytest.raises(SystemExit, match=message):
        tool.main([str(tmp_path), str(tmp_path / "out"), "--toy", *words])


def test_sampling_with_a_cache_is_the_model_itself(tool):
    shape = tool.Shape(**{**SMALL, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2})
    torch.manual_seed(0)
    model, ids = tool.Llama(shape), torch.randint(16, (3, 9))
    past = torch.zeros(2, 2, 3, 2, 16, 8)
    with torch.inference_mode():
        steps = torch.cat([model(ids[:, t : t + 1], start=t, past=past) for t in range(9)], dim=1)
        assert torch.allclose(steps, model(ids), atol=1e-5)

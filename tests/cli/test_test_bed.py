"""tools/train_test_bed.py: both families of models, trained for a moment on the CPU, load here and in Transformers."""

import json
import lzma
import os

import pytest
import torch

from exl2nb.eval.rows import logits
from exl2nb.model.layout import model_linears
from exl2nb.model.loader import load_model, read_model_config
from exl2nb.tokenizer.tokenizer import Tokenizer

TEXT = "\n\n".join(f"Chapter {n}. The sea was calm, and the {n * n % 17} ships lay still in the harbour." for n in range(400))


@pytest.fixture(scope="module")
def tool(script):
    script("tools/train_demo_model.py")
    return script("tools/train_test_bed.py")


@pytest.fixture(scope="module")
def beds(tool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("beds")
    (folder / "text.txt.xz").write_bytes(lzma.compress(TEXT.encode()))
    assert tool.main([str(folder / "text.txt.xz"), str(folder), "--toy", "--steps", "8", "--device", "cpu"]) == 0
    return folder


def test_sizes(tool):
    train = tool.train.__globals__
    for name, millions in (("llama-60m", 60), ("qwen2-40m", 40), ("llama-11m", 11)):
        with torch.device("meta"):
            model = train["Llama"](tool.SHAPES[name])
        count = sum(p.numel() for p in model.parameters())
        assert abs(count / 1e6 - millions) < 2, name
        assert abs(tool.parameters_of(tool.SHAPES[name]) / count - 1) < 0.01, name
        assert model.shape.num_heads > model.shape.num_kv_heads
        assert model.shape.hidden_size % 128 == 0 and model.shape.intermediate_size % 32 == 0


@pytest.mark.parametrize(("name", "biases"), [("llama-60m", False), ("qwen2-40m", True)])
def test_transformers_and_exl2nb_agree(beds, name, biases, monkeypatch):
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    import transformers

    config = read_model_config(beds / name)
    assert {linear.role: linear.bias for linear in model_linears(config) if linear.layer == 0}["q"] is biases
    assert config.num_kv_heads < config.num_heads
    twin = transformers.AutoModelForCausalLM.from_pretrained(beds / name, dtype=torch.float32).eval()
    if biases:
        assert float(twin.model.layers[0].self_attn.q_proj.bias.detach().abs().max()) > 0, "it learned"
    ids = torch.tensor([Tokenizer.load(beds / name).encode("The sea was calm.")])
    with torch.inference_mode():
        expected = twin(ids).logits
    model = load_model(beds / name)
    assert (logits(model, ids) - expected).abs().max() < 1e-4 * expected.std()
    model.close()


def test_what_is_there_stays(tool, beds, capsys):
    facts = json.loads((beds / "llama-60m" / "training.json").read_text())
    assert facts["steps"] == 8
    capsys.readouterr()
    assert tool.main([str(beds / "nothing.txt"), str(beds), "--toy"]) == 0
    assert "every model is there" in capsys.readouterr().out


def test_time_and_passes_limit_the_steps(tool, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(TEXT)
    words = [str(tmp_path / "text.txt"), str(tmp_path), "--toy", "--models", "llama-60m", "--device", "cpu", "--passes", "0.1"]
    assert tool.main(words) == 0
    facts = json.loads((tmp_path / "llama-60m" / "training.json").read_text())
    assert facts["passes"] <= 0.1 or facts["steps"] == 1


def test_a_draft_learns_from_its_target(tool, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    words = [str(tmp_path / "text.txt"), str(tmp_path), "--toy", "--models", "llama-60m", "llama-11m", "--device", "cpu"]
    assert tool.main([*words, "--steps", "4"]) == 0
    facts = json.loads((tmp_path / "llama-11m" / "training.json").read_text())
    assert facts["teacher"] == "llama-60m"
    assert (tmp_path / "llama-11m" / "tokenizer.json").read_text() == (tmp_path / "llama-60m" / "tokenizer.json").read_text()


def test_rows_that_repeat(tool):
    stream, length = torch.arange(5000, dtype=torch.int32), 513
    repeated, chance = tool.train.__globals__["repeated"], torch.Generator().manual_seed(1)
    for longest, shuffled in ((12, False), (200, False), (12, True), (200, True)):
        row = repeated(stream, length, chance, longest=longest, shuffled=shuffled)
        assert row.shape == (length,)
        first = {}
        ahead = [(at, first[token]) for at, token in enumerate(row.tolist()) if first.setdefault(token, at) != at]
        assert len(ahead) >= length / 4, "tokens that stood there before"
        same = [row[at - 1] == row[place - 1] for at, place in ahead if place]
        assert sum(same) >= 0.7 * len(same), "behind the same ones"
        on = sum(int(row[at]) == int(row[at - 1]) + 1 for at in range(1, length))
        assert (on < 10) is shuffled


def test_rows_grow_where_a_model_is_to_copy(tool):
    train = tool.train.__globals__
    shape, recipe = tool.SHAPES["llama-60m"], tool.RECIPE
    lengths = [train["row_length"](done / 100, shape, recipe) for done in range(100)]
    assert lengths == sorted(lengths)
    assert set(lengths) == {64, 256, 1024}
    assert train["row_length"](0.0, shape, train["Recipe"]()) == 1024
    windows = train["draw_rows"](torch.arange(5000, dtype=torch.int32), 64, shape, recipe, torch.Generator().manual_seed(1))
    assert windows.shape == (recipe.batch, 1025)
    unlike = [row[:-1].reshape(-1, 64).sort().values.diff().count_nonzero(dim=1).float().mean() for row in windows]  # of 63
    assert max(unlike[: recipe.batch // 2]) < 50 < min(unlike[recipe.batch // 2 :])


def test_stories(script):
    tool = script("tools/make_stories.py")
    some, others = (list(tool.stories(20000, seed)) for seed in (0, 1))
    assert sum(map(len, some)) > 19000
    assert some == list(tool.stories(20000, 0)) != others
    assert len(set(some)) == len(some)
    assert not any(mark in text for text in some for mark in "{}")


def test_empty_text_is_refused(tool, tmp_path):
    (tmp_path / "text.txt").write_text(" \n ")
    with pytest.raises(SystemExit, match="has no text"):
        tool.main([str(tmp_path / "text.txt"), str(tmp_path), "--toy"])

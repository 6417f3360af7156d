"""A model with more rows of embedding and head than its tokenizer has tokens: the rows beyond are never drawn, and raw logits keep them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import exl2nb as ex
from exl2nb.core.errors import Exl2Error
from exl2nb.eval.rows import logits
from exl2nb.tokenizer.tokenizer import Tokenizer

DEMO = Path(ex.__file__).parent / "demo_model"
ROWS = 37  # of padding
PROMPT = "The old man sat by the fire. The old man sat by the"
KINDS = [
    {"temperature": 0},
    {"temperature": 1.2},
    {"top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.05, "temperature": 0.9},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "top_logprobs": 3},
    {"mirostat": True},
    {"dry_multiplier": 0.8},
    {"typical_p": 0.8},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0, "min_tokens": 3},
    {"regex": "[a-z ]{40}"},
    {"schema": {"type": "object", "properties": {"a": {"enum": ["one", "two"]}}, "required": ["a"]}},
    {"negative_prompt": "It was", "cfg_scale": 1.5},
    {"token_healing": True},
    {"speculation": {"kind": "ngram", "adaptive": False}, "temperature": 0},
    {"speculation": {"kind": "ngram", "adaptive": False}, "top_k": 5},
]


def write_model(folder, rows, seed=0):
    """A random Llama with the demo model's tokenizer; its head prefers the `rows` rows of padding."""
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / file, folder / file)
    tokens = Tokenizer.load(folder).highest_id + 1
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": tokens + rows, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.norm.weight": (64,)}
    for layer in range(2):
        attention = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
        parts = {f"self_attn.{name}": shape for name, shape in attention.items()}
        parts |= {f"mlp.{name}_proj": (64, 64) for name in ("gate", "up", "down")}
        parts |= {"input_layernorm": (64,), "post_attention_layernorm": (64,)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    for name in ("model.embed_tokens", "lm_head"):
        matrix = torch.randn(tokens + ROWS, 64, generator=generator)
        matrix[tokens:] *= 50
        weights[f"{name}.weight"] = matrix[: tokens + rows].clone()
    save_file({name: weight.half() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The padded model, and the same one without padding."""
    parent = tmp_path_factory.mktemp("models")
    return [write_model(parent / str(rows), rows) for rows in (ROWS, 0)]


@pytest.fixture(scope="module")
def models(folders):
    with ex.load(folders[0], progress=None) as padded, ex.load(folders[1], progress=None) as plain:
        yield padded, plain


def ids_of(completion):
    return [token.id for token in completion.tokens]


def tokens(llm):
    return llm.tokenizer.highest_id + 1


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_tokens_of_a_model_without_padding(models, kind):
    padded, plain = models
    assert padded.engine.vocab_size == tokens(padded) + ROWS == plain.engine.vocab_size + ROWS
    for seed in range(3):
        options = {"max_tokens": 24, "ignore_eos": True, "seed": seed, **kind}
        found, wanted = padded.generate(PROMPT, **options), plain.generate(PROMPT, **options)
        assert ids_of(found) == ids_of(wanted)
        assert ids_of(found)
        assert max(ids_of(found)) < tokens(padded)
        assert found.text == wanted.text


@pytest.mark.cpu  # a GPU's fp16 products differ by more than these bounds
def test_raw_logits_are_those_of_the_model(models):
    """As evaluation computes them; log probability, rank and alternatives count the padding."""
    llm = models[0]
    done = llm.generate(PROMPT, max_tokens=12, ignore_eos=True, seed=1, return_logits=True, top_logprobs=4)
    before = llm.tokenizer.encode(PROMPT)
    every = logits(llm.engine.shared_model, torch.tensor([before + ids_of(done)]))[0, len(before) - 1 : -1].cpu().numpy()
    assert done.logits.shape == (12, tokens(llm) + ROWS)
    np.testing.assert_allclose(done.logits, every, atol=0.05, rtol=1e-3)
    assert (done.logits.argmax(1) >= tokens(llm)).all()
    for token, row in zip(done.tokens, torch.from_numpy(done.logits).double()):
        assert token.logprob == pytest.approx(float(row.log_softmax(0)[token.id]), abs=1e-3)
        assert token.rank == int((row > row[token.id]).sum()) + 1 > 1
        assert [one.id for one in token.top] == row.argsort(descending=True, stable=True)[:4].tolist()


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_p": 0.9}, {"typical_p": 0.9}], ids=str)
def test_streams_and_batches(models, options, threads):
    """Several requests at once run one step ahead where there are several threads."""
    threads(2)
    padded, plain = models
    prompts = [PROMPT[at:] for at in range(6)]
    more = {"max_tokens": 20, "ignore_eos": True, "seed": 3, **options}
    found, wanted = ([ids_of(one) for one in llm.generate(prompts, **more)] for llm in (padded, plain))
    assert found == wanted
    assert max(map(max, found)) < tokens(padded)
    with padded.stream(PROMPT, **more) as stream:
        streamed = [token.id for chunk in stream for token in chunk.tokens]
    assert streamed == found[0]


def test_beams(models):
    llm = models[0]
    for beam in llm.generate(PROMPT, beams=2, n=2, max_tokens=16, ignore_eos=True):
        assert len(ids_of(beam)) == 16
        assert max(ids_of(beam)) < tokens(llm)


def test_draft_tokens(folders, models):
    """The draft model has padding, too. It is the same model, so every draft token is accepted."""
    padded, plain = models
    with ex.load(folders[0], draft=folders[0], progress=None) as llm:
        for options in ({"temperature": 0}, {"seed": 4, "top_k": 30}, {"seed": 4, "typical_p": 0.9}):
            more = {"max_tokens": 30, "ignore_eos": True, **options}
            found = llm.generate(PROMPT, speculation={"kind": "draft", "adaptive": False}, **more)
            assert ids_of(found) == ids_of(padded.generate(PROMPT, **more)) == ids_of(plain.generate(PROMPT, **more))
            assert found.speculation.accepted == found.speculation.proposed > 0


def test_explanations_and_edits(models):
    padded, plain = models
    found, wanted = (llm.explain(PROMPT, at=2, seed=5, top_p=0.9) for llm in models)
    assert found.token == wanted.token < tokens(padded)
    assert found.steps[1].name == "padding"
    assert padded.patch({}).generate(PROMPT, max_tokens=8) == plain.patch({}).generate(PROMPT, max_tokens=8)
    with pytest.raises(Exl2Error, match="no token is left"):
        padded.generate(PROMPT, allowed_tokens=[tokens(padded) + 1])


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["1", "0"])
def test_the_gpu_draws_no_padding(folders, graphs, monkeypatch):
    """Captured steps, steps kernel by kernel, draft rounds: the tokens that the host draws from the GPU's logits."""
    monkeypatch.setenv("EXL2NB_CUDA_GRAPHS", graphs)
    kinds = [
        {"temperature": 0},
        {"temperature": 1.2},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "top_logprobs": 3},
        {"repetition_penalty": 1.3},
        {"banned_tokens": [5, 9]},
    ]
    with ex.load(folders[0], draft=folders[0], device="cuda", deterministic=True, progress=None) as llm:
        for kind in kinds:
            more = {"max_tokens": 40, "ignore_eos": True, "seed": 3, **kind}
            for kind_of_drafts in ("off", "ngram", "draft"):
                speculation = {"kind": kind_of_drafts, "adaptive": False}
                device = llm.generate(PROMPT, speculation=speculation, **more)
                host = llm.generate(PROMPT, speculation="off", min_tokens=1, **more)
                assert ids_of(device) == ids_of(host)
                assert max(ids_of(device)) < tokens(llm)
                assert [token.rank for token in device.tokens] == [token.rank for token in host.tokens]
            together = [ids_of(one) for one in llm.generate([PROMPT, PROMPT[4:], PROMPT[8:]], **more)]
            assert together[0] == ids_of(host)
            assert max(map(max, together)) < tokens(llm)
        with pytest.raises(Exl2Error, match="no token is left"):
            llm.generate(PROMPT, allowed_tokens=[tokens(llm) + 1])

"""GPTQ checkpoints of every architecture against Transformers running the dequantised weights."""

import json
from itertools import cycle

import pytest
import torch
from safetensors.torch import load_file as load_tensors

import exl2nb as ex
from exl2nb.cli import main
from exl2nb.core.errors import ConfigError, ConversionError, FormatError
from exl2nb.io.safetensors import save as save_tensors
from exl2nb.model import reference
from exl2nb.model.inspection import inspect
from exl2nb.model.layout import model_linears
from exl2nb.model.loader import load_model, read_model_config
from exl2nb.model.sources import ReconstructedWeights
from exl2nb.model.store import open_store

from .gptq_maker import Recipe, on_grid, put_on_grid, split_experts, write_gptq
from .test_model import error, run
from .tiny import configure, edit, ids_of, save, truth, twin
from .zoo import ZOO, build_wide, config_of, write, write_tokenizer

RECIPES = {
    "4-bit": Recipe(),
    "4-bit act-order v2": Recipe(act_order=True, sym=False, version="gptq_v2"),
    "8-bit whole": Recipe(bits=8, group_size=-1, sym=False),
    "3-bit act-order": Recipe(bits=3, act_order=True, sym=False, separate_config=True),
    "2-bit": Recipe(bits=2, group_size=64, sym=False, quantizer="gptqmodel:7.3.4", scale_type=torch.bfloat16),
    "4-bit old": Recipe(g_idx=False, separate_config=True, zero_biases=True),
    "8-bit v2": Recipe(bits=8, group_size=16, version="gptq_v2", scale_type=torch.float32),
}
NAMES = list(ZOO)


@pytest.mark.parametrize(("name", "recipe"), list(zip(NAMES, cycle(RECIPES.values()))), ids=NAMES)
def test_gptq_equals_transformers(name, recipe, tmp_path):
    model = build_wide(name)
    put_on_grid(model, recipe)
    dense = write(name, model, tmp_path / "dense")
    if name.startswith("dbrx"):  # the tools quantise a copy whose experts are linears of their own
        dense = split_experts(dense, tmp_path / "split")
    directory = write_gptq(dense, tmp_path / "gptq", recipe)
    loaded, ids = load_model(directory), ids_of(config_of(directory).vocab_size, 1, 40)
    want = truth(model, ids)[0]
    assert error(run(loaded, ids[0]), want) < (2e-3 if loaded.config.post_norm else 1e-3)
    assert error(run(load_model(directory, weights="fp32"), ids[0]), want) < 1e-4
    assert {matrix.key for matrix in inspect(directory).decoder if matrix.format == "gptq"} == {
        linear.key for linear in model_linears(loaded.config) if linear.role != "head"
    }


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_recipe_on_llama(recipe, tmp_path):
    model = twin("llama", attention_bias=True, num_key_value_heads=1)
    put_on_grid(model, recipe)
    directory = write_gptq(save(model, tmp_path / "dense"), tmp_path / "gptq", recipe, shards=2)
    loaded, ids = load_model(directory), ids_of(131, 1, 60)
    want = truth(model, ids)[0]
    assert error(run(loaded, ids[0]), want) < 1e-3
    once = run(loaded, ids[0], mode="fp16")
    assert torch.equal(run(loaded, ids[0], mode="fp16", forward="forward_by_ops"), once)
    config = read_model_config(directory)
    with open_store(config, directory) as store, torch.no_grad():
        weights = ReconstructedWeights(config, store)
        assert set(weights) == {f"{linear.key}.weight" for linear in model_linears(config)} | {
            name for name in store.names() if name.endswith((".bias", "norm.weight", "embed_tokens.weight"))
        }
        assert error(reference.logits(config, weights, ids)[0], want) < 1e-4
    found = inspect(directory)
    assert found.layers == 2
    stored = {path: load_tensors(path) for path in directory.glob("*.safetensors")}
    assert found.total_bytes == sum(tensor.nbytes for tensors in stored.values() for tensor in tensors.values())
    q = next(matrix for matrix in found.decoder if matrix.name == "self_attn.q_proj")
    parts = [t for tensors in stored.values() for key, t in tensors.items() if "layers.0.self_attn.q_proj" in key]
    assert (q.in_features, q.out_features, sum(rows for _, rows in q.groups)) == (64, 64, 64)
    assert abs(q.nbytes - sum(t.nbytes for t in parts)) <= 16  # 3-bit zeros fill whole words


def test_a_quantised_head(tmp_path):
    model, recipe = twin("llama"), Recipe(sym=False, quantizer="gptqmodel:7.7.0", version="gptq_v2")
    put_on_grid(model, recipe)
    with torch.no_grad():
        model.lm_head.weight.copy_(on_grid(model.lm_head.weight, recipe))
    directory = write_gptq(save(model, tmp_path / "dense"), tmp_path / "gptq", recipe, head=True)
    ids = ids_of(131, 1, 30)
    assert error(run(load_model(directory), ids[0]), truth(model, ids)[0]) < 1e-3
    found = inspect(directory).head
    assert found is not None and found.format == "gptq" and found.out_features == 131


def test_some_matrices_may_stay_plain(tmp_path):
    """`dynamic` excludes modules, and gives others a width of their own."""
    model = twin("llama")
    narrow, wide = Recipe(bits=4, extra={"dynamic": {"-:.*v_proj": {}}}), Recipe(bits=8)
    put_on_grid(model, narrow)
    one, two = (write_gptq(save(model, tmp_path / f"d{r.bits}"), tmp_path / f"g{r.bits}", r) for r in (narrow, wide))
    name = "gptq_model-4bit.safetensors"
    mixed, other, dense = load_tensors(one / name), load_tensors(two / name), model.state_dict()
    for layer in range(2):
        stem = f"model.layers.{layer}."
        mixed = {key: value for key, value in mixed.items() if f"{stem}self_attn.v_proj" not in key}
        mixed[f"{stem}self_attn.v_proj.weight"] = dense[f"{stem}self_attn.v_proj.weight"].half()
        mixed |= {key: value for key, value in other.items() if f"{stem}mlp.down_proj" in key}
    save_tensors(one / name, mixed)
    ids = ids_of(131, 1, 30)
    assert error(run(load_model(one), ids[0]), truth(model, ids)[0]) < 1e-3
    configure(one, quantization_config={"quant_method": "gptq", **Recipe(bits=4).settings()})
    with pytest.raises(
        FormatError, match=r"2 problems: .*layers.0.mlp.down_proj.qweight': found 24 rows of words, expected 12 for 96 rows at 4"
    ):
        load_model(one)


@pytest.fixture
def checkpoint(tmp_path):
    model = twin("llama")
    recipe = Recipe(act_order=True)
    put_on_grid(model, recipe)
    return write_gptq(save(model, tmp_path / "dense"), tmp_path / "gptq", recipe)


Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
DAMAGE = {
    "g_idx too high": ({f"{Q}.g_idx": torch.full((64,), 7).int()}, [f"tensor '{Q}': found g_idx with groups from 7 to 7, expected 0 to 1"]),
    "g_idx negative": ({f"{Q}.g_idx": torch.full((64,), -1).int()}, ["from -1 to -1, expected 0 to 1"]),
    "g_idx short": ({f"{Q}.g_idx": torch.zeros(63, dtype=torch.int32)}, [f"'{Q}.g_idx': found 63 entries, expected 64"]),
    "no groups": ({f"{Q}.scales": torch.zeros(0, 64).half()}, [f"'{Q}.scales': found zero groups, expected at least one"]),
    "infinite scale": ({f"{Q}.scales": torch.full((2, 64), torch.inf).half()}, ["128 values of scales that are NaN or infinite"]),
    "wrong zeros": ({f"{Q}.qzeros": torch.zeros(2, 9, dtype=torch.int32)}, ["found shape (2, 9), expected (2, 8)"]),
    "wrong dtype": ({f"{Q}.qweight": torch.zeros(8, 64)}, [f"'{Q}.qweight': found dtype torch.float32, expected int32"]),
    "missing scales": ({f"{Q}.scales": None}, [f"'{Q}.scales': found none, expected it beside qweight"]),
    "5 bits": ({f"{Q}.qweight": torch.zeros(10, 64, dtype=torch.int32)}, ["found 10 rows of words, expected 8 for 64"]),
    "awq": ({f"{Q}.qweight": torch.zeros(64, 8, dtype=torch.int32)}, ["which is AWQ's", "take a GPTQ or EXL2 version"]),
    "real bias": ({f"{Q}.bias": torch.ones(64)}, ["found 1 tensors", f"{Q}.bias"]),
    "several": (
        {
            **dict.fromkeys(f"{UP}.{end}" for end in ("qweight", "qzeros", "scales", "g_idx")),
            **dict.fromkeys(("model.norm.weight", "model.layers.0.mlp.down_proj.qzeros")),
            f"{Q}.scales": torch.zeros(0, 64).half(),
        },
        ["3 problems", "none of 2 tensors", f"{UP}.weight, model.norm.weight", "zero groups", "down_proj.qzeros': found none"],
    ),
    "two formats": ({f"{UP}.q_weight": torch.zeros(1)}, [f"tensor '{UP}.q_"]),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(case, checkpoint):
    changes, words = DAMAGE[case]
    with pytest.raises(FormatError) as caught:
        load_model(edit(checkpoint, changes))
    assert all(word in str(caught.value) for word in (*words, str(checkpoint))), caught.value


@pytest.mark.parametrize(
    ("changes", "error_type", "words"),
    [
        ({"bits": 5}, ConfigError, "bits is 5; expected one of 2, 3, 4, 8"),
        ({"group_size": 0}, ConfigError, "group_size is 0; expected a positive number of rows, or -1"),
        ({"checkpoint_format": "marlin"}, ConfigError, "checkpoint_format is 'marlin'; expected gptq or gptq_v2: take a version"),
        ({"pack_dtype": "int16"}, ConfigError, "pack_dtype is 'int16'; expected int32"),
        ({"desc_act": "yes"}, ConfigError, "desc_act is 'yes'; expected true or false"),
        ({"group_size": 128}, FormatError, "found 2 groups, expected 1: 64 rows in groups of 128"),
        ({"bits": 8}, FormatError, "found 8 rows of words, expected 16 for 64 rows at 8 bits"),
        ({"quant_method": "exl2"}, FormatError, "in gptq, expected exl2 as quantization_config says"),
    ],
)
def test_settings_that_do_not_fit(changes, error_type, words, checkpoint):
    settings = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    configure(checkpoint, quantization_config=settings | changes)
    with pytest.raises(error_type, match=words):
        load_model(checkpoint)


def test_zeros_of_the_head_of_index_models(tmp_path):
    model, recipe = build_wide("index"), Recipe()
    put_on_grid(model, recipe)
    directory = write_gptq(write("index", model, tmp_path / "dense"), tmp_path / "gptq", recipe)
    head = load_tensors(next(directory.glob("*.safetensors")))
    edit(directory, {f"lm_head.{end}": head[f"model.layers.0.self_attn.q_proj.{end}"] for end in ("qweight", "qzeros", "scales")})
    with pytest.raises(FormatError, match="lm_head"):
        load_model(directory)


def test_load_and_generate(checkpoint):
    write_tokenizer(checkpoint)
    with ex.load(checkpoint, progress=None, device="cpu") as llm:
        done = llm.generate("w1 w2 w3", max_tokens=4, temperature=0, ignore_eos=True)
        assert len(done.tokens) == 4
        assert 4.5 < llm.bpw < 6  # scales, zeros and g_idx weigh much in a small matrix
        assert llm.config.quant_method == "gptq"


def test_converting_one_is_refused(checkpoint, tmp_path, capsys):
    write_tokenizer(checkpoint)
    with pytest.raises(ConversionError, match="GPTQ model, expected a dense one; convert the model it was made from"):
        ex.convert(checkpoint, tmp_path / "out", bpw=4.0, calibration=["w1 w2 " * 400], rows=1, length=16, progress=None)
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), "--bpw", "4", "--quiet"]) == 1
    assert "GPTQ" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    model = twin("llama", hidden_size=256, head_dim=64, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
    recipe = Recipe(act_order=True, sym=False)
    put_on_grid(model, recipe)
    directory = write_gptq(save(model, tmp_path / "dense"), tmp_path / "gptq", recipe)
    write_tokenizer(directory)
    texts = []
    for device in ("cpu", "cuda"):
        with ex.load(directory, progress=None, device=device) as llm:
            texts.append(llm.generate([5, 6, 7, 8], max_tokens=1, temperature=0, ignore_eos=True, top_logprobs=3).tokens)
    assert [t.id for t in texts[0]] == [t.id for t in texts[1]]

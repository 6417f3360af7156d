"""Architectures that we do not have, converted linear by linear and read back by Transformers; EXL2 directories of our own table too."""

import json
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import exl2nb as ex
import exl2nb.integrations.transformers
from exl2nb.converter import generic
from exl2nb.converter.quantization import Rounding
from exl2nb.core.errors import ConfigError, ConversionError, OptionError, UnknownArchitecture
from exl2nb.integrations import hf_quantizer
from exl2nb.integrations.hf_quantizer import Exl2Config, Exl2Linear, register
from tests.converter.test_conversion_job import TEXT, output, write_model
from tests.model.zoo import write_tokenizer

pytestmark = pytest.mark.cpu
DEMO = Path(ex.__file__).parent / "demo_model"
EXL2 = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
# none is in our table: fused and separate projections, ALiBi, learned positions, partial rotation, parallel blocks, tied heads
FOREIGN = {
    "gpt_neox": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "opt": {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "word_embed_proj_dim": 64},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 2},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 16, "n_positions": 128, "n_ctx": 128},
}  # fmt: skip
OPTIONS = {"rows": 12, "length": 48, "calibration": TEXT, "report_rows": 6}
IDS = torch.randint(3, 90, (3, 24), generator=torch.Generator().manual_seed(0))


def dense_model(kind, folder):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**FOREIGN[kind], vocab_size=97, initializer_range=0.1, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Held-out KL over predicted KL of a tiny Llama on our own path."""
    folder = tmp_path_factory.mktemp("ours")
    done = ex.convert(write_model(folder / "dense"), folder / "out", bpw=4.0, progress=None, **OPTIONS)
    return done.quality.kl / done.predicted_kl


@pytest.fixture(scope="module", params=FOREIGN)
def pair(request, tmp_path_factory):
    folder, lines = tmp_path_factory.mktemp(request.param), []
    source = dense_model(request.param, folder / "dense")
    done = ex.convert(source, folder / "exl2", bpw=4.0, progress=lambda event: lines.append(event.detail), **OPTIONS)
    assert any("is not in exl2nb's table: converting it linear by linear" in (line or "") for line in lines)
    read = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (source, done.path)]
    return done, *read


def test_parity_with_the_dense_model_within_the_noise_of_exl2(pair, ours):
    """The quantised model computes exactly with its matrices, and they cost what the measurement predicts, as on our own path."""
    done, dense, made = pair
    quantised = {name: module for name, module in made.named_modules() if isinstance(module, Exl2Linear)}
    assert set(quantised) == {matrix.key for matrix in done.matrices} and len(quantised) >= 9
    assert done.bpw <= 4.0 and done.bpw > 3.9
    linears = {name for name, module in dense.named_modules() if isinstance(module, torch.nn.Linear)}
    assert linears == set(quantised), "no linear is left dense"
    with torch.no_grad():
        before = dense(IDS).logits.log_softmax(-1)
        after = made(IDS).logits.log_softmax(-1)
        twin = dense  # from here on with the reconstructed matrices
        for name, module in quantised.items():
            linear = twin.get_submodule(name)
            linear.weight = torch.nn.Parameter(module.weight.contiguous())
            if module.bias is not None:
                linear.bias = torch.nn.Parameter(module.bias)
        torch.testing.assert_close(made(IDS).logits, twin(IDS).logits, atol=2e-3, rtol=1e-3)
    kl = float((before.exp() * (before - after)).sum(-1).mean())
    assert kl > 0 and done.quality.kl / done.predicted_kl < 1.5 * ours
    assert json.loads((done.path / "config.json").read_text())["quantization_config"]["quant_method"] == "exl2"


def test_generate_and_gradients_of_the_input(pair):
    _, _, made = pair
    text = made.generate(IDS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        assert int(text[0, 24]) == int(made(IDS[:1]).logits[0, -1].argmax())
    embedded = made.get_input_embeddings()(IDS[:1]).detach().requires_grad_(True)
    made(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad.abs().sum() > 0
    with pytest.raises((ValueError, NotImplementedError), match="exl2|serializ|quantiz"):
        made.save_pretrained("/nowhere/at/all")


def test_on_an_architecture_of_our_table_it_does_what_our_own_path_does(tmp_path):
    """The same KL, within a tenth, where our own path leaves out what this one does not do."""
    source, found = write_model(tmp_path / "dense"), []
    for linear_by_linear in (False, True):
        rounding = Rounding(refresh=False, folded=False, residual=0.0)
        done = ex.convert(
            source, tmp_path / f"{linear_by_linear}", bpw=4.0, generic=linear_by_linear, rounding=rounding, progress=None, **OPTIONS
        )
        found.append(done.quality.kl)
    assert found[1] == pytest.approx(found[0], rel=0.1)
    with ex.load(tmp_path / "True", progress=None) as llm:
        assert len(llm.generate([1, 5, 6], max_tokens=3, ignore_eos=True).tokens) == 3


def test_a_measurement_serves_other_bitrates(tmp_path):
    source = dense_model("gpt_neox", tmp_path / "dense")
    measured = ex.measure(source, tmp_path / "m.json", progress=None, rows=6, length=32, calibration=TEXT)
    for bpw in (3.0, 6.0):
        done = ex.convert(source, tmp_path / f"{bpw}", bpw=bpw, measurement=tmp_path / "m.json", progress=None, **OPTIONS)
        assert bpw - 0.2 < done.bpw <= bpw
        assert done.predicted_kl == pytest.approx(measured.solve(bpw).predicted_kl)


KILLED = """
import os, signal, sys
import exl2nb as ex
src, dst, text, stage, steps = sys.argv[1:]
def sink(event):
    if event.stage == stage and event.done >= int(steps):
        os.kill(os.getpid(), signal.SIGKILL)
ex.convert(src, dst, bpw=4.0, progress=sink, rows=4, length=24, report_rows=1, calibration=[text])
"""


def test_killed_conversions_go_on_and_give_the_same_bytes(tmp_path, monkeypatch):
    source = dense_model("gpt_neox", tmp_path / "dense")
    monkeypatch.setattr(generic, "STATISTICS_BYTES", 1)  # every layer is a part of its own
    whole = ex.convert(source, tmp_path / "whole", bpw=4.0, progress=None, rows=4, length=24, report_rows=1, calibration=TEXT[:1])
    assert whole.resumed_layers == 0
    child = f"from exl2nb.converter import generic\ngeneric.STATISTICS_BYTES = 1\n{KILLED}"
    for stage, steps in (("measure", 9), ("quantize", 1)):  # behind the first layer each
        done = subprocess.run([sys.executable, "-c", child, source, tmp_path / "out", TEXT[0], stage, str(steps)])
        assert done.returncode == -signal.SIGKILL and not (tmp_path / "out").exists()
    monkeypatch.setattr(generic, "statistics_of", lambda *_: pytest.fail("measured again"))
    made = ex.convert(source, tmp_path / "out", bpw=4.0, progress=None, rows=4, length=24, report_rows=1, calibration=TEXT[:1])
    assert made.resumed_layers == 1
    assert output(made.path) == output(whole.path)
    assert (made.path / "conversion.json").read_bytes() == (whole.path / "conversion.json").read_bytes()
    assert not list(tmp_path.glob(".*")), "work in progress is removed"


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_a_model_and_its_quantised_twin_share_16_bits_of_memory(stored, tmp_path):
    """The dense one computes as before to the bit, and matrices that are 16 bits in the files are so in memory."""
    model = AutoModelForCausalLM.from_pretrained(dense_model("opt", tmp_path / "dense"), dtype=stored).float()
    with torch.no_grad():
        before, linears = model(IDS[:1]).logits, generic.find_linears(model, IDS[:1])
        weights = [one.weight for one in linears]
        twin = generic.HubWeights(model, linears, IDS[:1])
        assert torch.equal(twin.logits(IDS[:1], quantised=False), before)
        assert {one.module.weight.dtype for one in linears[:-1]} == {stored}  # the head's is the embedding's
        assert linears[-1].module.weight.dtype == torch.float32
        assert all(map(torch.equal, weights, (one.weight for one in linears)))
        assert torch.equal(twin.logits(IDS[:1], quantised=True), before), "nothing is quantised yet"


def test_directories_of_our_own_path_are_read_too(llm):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        made = AutoModelForCausalLM.from_pretrained(EXL2, dtype=torch.float32)
        ids = torch.tensor([llm.tokenizer.encode("It was a dark and stormy night")])
        with ex.load(EXL2, progress=None, cache="fp32") as own:
            want = [token.id for token in own.generate(ids[0].tolist(), max_tokens=8, temperature=0).tokens]
        assert made.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist() == want
    assert isinstance(made.lm_head, Exl2Linear) and "in_features=256" in repr(made.lm_head)


@pytest.mark.parametrize("kind", ["qwen3", "tied"])
def test_head_norms_and_heads_that_were_tied(kind, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = CONFIG_MAPPING["qwen3" if kind == "qwen3" else "llama"](
        **sizes, head_dim=32, vocab_size=97, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.1
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "dense")
    write_tokenizer(tmp_path / "dense")
    ex.convert(tmp_path / "dense", tmp_path / "exl2", bpw=6.0, progress=None, **OPTIONS)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "exl2", dtype=torch.float32)
    assert isinstance(made.lm_head, Exl2Linear)
    with torch.no_grad(), ex.load(tmp_path / "exl2", progress=None) as own:
        wanted = own.score(IDS[0].tolist())
        logprobs = made(IDS[:1]).logits.log_softmax(-1)[0, :-1].gather(-1, IDS[0, 1:, None])[:, 0]
    torch.testing.assert_close(logprobs, torch.tensor(wanted.logprobs[-23:]), atol=5e-3, rtol=0)


def test_refusals(tmp_path, pair):
    done, _, made = pair
    dense = dense_model("bloom", tmp_path / "dense")
    for options, error, message in (
        ({"generic": False}, UnknownArchitecture, "BloomForCausalLM"),
        ({"polish": True}, OptionError, "polish is True, which needs an architecture of exl2nb's own table"),
        ({"calibration": "self"}, OptionError, "calibration is 'self', which needs"),
        ({"generic": 1}, OptionError, "generic is 1"),
    ):
        with pytest.raises(error, match=message):
            ex.convert(dense, tmp_path / "out", bpw=4.0, progress=None, **{**OPTIONS, **options})
    with pytest.raises(ConversionError, match="found a quantised model"):
        ex.convert(done.path, tmp_path / "out", bpw=4.0, progress=None, **OPTIONS)
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(
        json.dumps(
            {
                **config,
                "model_type": "new",
                "architectures": ["NewForCausalLM"],
                "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
            }
        )
    )
    (dense / "evil.py").write_text("raise SystemExit('a stranger ran')")
    with pytest.raises(UnknownArchitecture, match="code in its repository is never run"):
        ex.convert(dense, tmp_path / "out", bpw=4.0, progress=None, **OPTIONS)
    assert not (tmp_path / "out").exists()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for path in done.path.iterdir():
        (foreign / path.name).write_bytes(path.read_bytes())
    config = json.loads((EXL2 / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="load it with exl2nb.integrations.transformers.Exl2ForCausalLM"):
        AutoModelForCausalLM.from_pretrained(foreign)
    with pytest.raises(ValueError, match="pre-quantized"):
        AutoModelForCausalLM.from_pretrained(DEMO, quantization_config=Exl2Config(bits=4))
    register()
    hf_quantizer.exl2_expected.set(True)  # as after an EXL2 model that failed early: a plain one is read as ever
    assert not any(isinstance(module, Exl2Linear) for module in AutoModelForCausalLM.from_pretrained(DEMO).modules())
    layer = next(module for module in made.modules() if isinstance(module, Exl2Linear))
    layer.blob, blob = None, layer.blob
    with pytest.raises(OptionError, match="cannot be moved between CPU and GPU"):
        layer(torch.zeros(1, layer.in_features))
    layer.blob = blob

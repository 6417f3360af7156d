"""Block-wise learning: what an error costs, less of it on rows that nobody learned from, the same bytes after an interruption."""

import dataclasses
import json

import pytest
import torch

from exl2nb.converter import blockwise, quantization, tuning
from exl2nb.converter.blockwise import Metric
from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.converter.memory_estimate import Asked, plan_cpu_memory, plan_gpu_memory
from exl2nb.converter.quantization import Rounding
from exl2nb.converter.tuning import Tuning, fit_to_device
from exl2nb.core.errors import ConversionError, Interrupted, OptionError
from exl2nb.io.shards import TensorStore
from exl2nb.model.archs import parse_config
from exl2nb.model.loader import read_model_config
from exl2nb.model.reference import logits

from .test_conversion_job import CONFIG, convert, output
from .test_tuning import TEXT, read_back

pytestmark = pytest.mark.usefixtures("short_second_text")
NOTHING = {"descent": 0, "codes": False, "scales": False, "vectors": False, "embedding": False}
OPTIONS = {"bpw": 3.0, "calibration": TEXT, "rows": 48, "length": 32}
LEARNED = {**OPTIONS, "tuning": Tuning(**NOTHING, blocks=6)}
EIGHT_B = {
    **CONFIG,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}


@pytest.fixture(scope="module")
def learned(source, tmp_path_factory):
    return convert(source, tmp_path_factory.mktemp("out") / "learned", **LEARNED)


def test_what_an_error_costs(source):
    config, generator = read_model_config(source), torch.Generator().manual_seed(0)
    gradients = torch.randn(500, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    products, tokens = (gradients.T @ gradients / 500)[None], torch.rand(3 * 5, generator=generator)
    statistics = {"model.layers.1.mlp.down_proj.coupling": products, "1.down": tokens}
    error = torch.randn(2, 5, 64, generator=generator)
    metric = Metric.of(config, 1, statistics, coupled=True, weighted=True)
    mean = products.diagonal(dim1=1, dim2=2).mean()
    damped = (products[0] / mean + blockwise.GRADIENT_DAMPING * torch.eye(64)) / (1 + blockwise.GRADIENT_DAMPING)
    each = torch.einsum("bsi,ij,bsj->bs", error, damped, error).flatten() / 64
    torch.testing.assert_close(metric.cost(error, 1), (each * tokens[5:]).sum(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(metric.cost(error, 3), each.sum(), rtol=1e-4, atol=1e-4)  # rows without weights
    plain = Metric.of(config, 1, statistics, coupled=False, weighted=False)
    torch.testing.assert_close(plain.cost(error, 0), error.square().mean(-1).sum())


def test_layers_are_closer_on_rows_that_nobody_learned_from(learned, source, tmp_path):
    found = learned.blocks
    assert (found.passes, found.alone, len(found.layers)) == (6, "", CONFIG["num_hidden_layers"])
    assert learned.tuned is None
    assert all(layer.history[0] == (1, 1) for layer in found.layers)
    assert sum(layer.history[layer.chosen][1] for layer in found.layers) < 0.97 * len(found.layers)
    plain = convert(source, tmp_path / "plain", **{**LEARNED, "tuning": Tuning(**NOTHING)})
    assert plain.blocks is None
    assert plain.nbytes == learned.nbytes, "learning costs no byte"
    with TensorStore(plain.path) as before, TensorStore(learned.path) as after:
        for name in (
            "model.layers.0.post_attention_layernorm.weight",
            "model.layers.2.self_attn.q_proj.bias",
            "model.layers.1.mlp.up_proj.q_weight",
        ):
            assert not torch.equal(before.read(name), after.read(name)), name
        assert torch.equal(before.read("model.norm.weight"), after.read("model.norm.weight")), "it belongs to no layer"
    report = json.loads((learned.path / "conversion.json").read_text())
    assert [layer["chosen"] for layer in report["blocks"]["layers"]] == [layer.chosen for layer in found.layers]
    assert "layer by layer: " in str(learned)


def test_the_report_is_about_what_is_on_disk(learned, source):
    config, ids = read_model_config(source), torch.randint(3, 90, (8, 32), generator=torch.Generator().manual_seed(9))
    made = read_back(learned.path, config)
    with TensorStore(source) as store:
        dense = {name: store.read(name).float() for name in store.names()}
    wanted, found = (logits(config, weights, ids).log_softmax(-1) for weights in (dense, made))
    kl = float((wanted.exp() * (wanted - found)).sum(-1).mean())
    assert kl == pytest.approx(learned.quality.kl, rel=0.3), "random tokens, not those of the report"


def test_the_same_bytes_after_an_interruption(learned, source, tmp_path):
    job = ConversionJob(source, tmp_path / "out", **LEARNED, work_dir=tmp_path / "work")
    events = []

    def stop(event):
        events.append(event)
        if event.stage == "quantize" and event.done > 1.5:
            job.cancel()

    with pytest.raises(Interrupted):
        job.run(stop)
    assert len(list((tmp_path / "work").glob("layer-*.safetensors"))) == 1
    parts = [event for event in events if event.stage == "quantize"]
    assert "layer 1, error " in parts[-2].detail
    assert [event.done for event in parts] == sorted(event.done for event in parts)
    again = convert(source, tmp_path / "out", **LEARNED, work_dir=tmp_path / "work")
    assert again.resumed_layers == 1
    assert output(again.path) == output(learned.path)
    assert (again.path / "conversion.json").read_bytes() == (learned.path / "conversion.json").read_bytes()


def test_never_worse_than_rounding(source, tmp_path, monkeypatch):
    monkeypatch.setattr(blockwise, "LEARNING_RATES", {**blockwise.LEARNING_RATES, "scales": 1e4})  # a way on which everything gets worse
    tuned = dataclasses.replace(LEARNED["tuning"], blocks=1)
    worse = convert(source, tmp_path / "worse", **{**LEARNED, "tuning": tuned}, work_dir=tmp_path / "work")
    plain = convert(source, tmp_path / "plain", **{**LEARNED, "tuning": Tuning(**NOTHING)}, work_dir=tmp_path / "work")
    assert [layer.chosen for layer in worse.blocks.layers] == [0, 0, 0]
    assert output(worse.path) == output(plain.path)


def test_where_the_whole_model_does_not_fit_its_layers_learn(source, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "PER_WEIGHT", 1 << 50)
    monkeypatch.setattr(tuning, "BLOCKWISE_ONLY_PASSES", 2)
    done = convert(source, tmp_path / "large", **{**OPTIONS, "rows": 12, "effort": "tuned"})
    assert done.tuned is None
    assert (done.blocks.passes, done.descent) == (2, 0)
    assert "GiB of memory, found" in done.blocks.alone
    assert "to learn all at once needs" in str(done)
    assert json.loads((done.path / "conversion.json").read_text())["blocks"]["alone"] == done.blocks.alone
    with pytest.raises(ConversionError, match="blocks is 0, and to tune all layers at once needs"):
        fit_to_device(Tuning(blocks=0), read_model_config(source), torch.device("cpu"), 32)


def test_layers_that_learn_alone_take_the_rows_of_the_cpu(source, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "PER_WEIGHT", 1 << 50)
    monkeypatch.setattr(tuning, "BLOCKWISE_ONLY_PASSES", 1)
    job = ConversionJob(source, tmp_path / "large", **{**OPTIONS, "effort": "tuned"})
    job.settings = dataclasses.replace(job.settings, rows=12, least_rows=6)  # as on a GPU
    assert job.run().calibration["split"]["hessians"] + job.result.calibration["split"]["sensitivity"] == 6


def test_both_stages_follow_each_other(source, tmp_path):
    both = Tuning(descent=0, blocks=2, rows=24, passes=1, written=0)
    done = convert(source, tmp_path / "both", **{**OPTIONS, "rows": 12, "tuning": both})
    assert done.tuned.before.kl > 0
    assert done.blocks.passes == 2


def test_an_8b_shape_fits_24_gb():
    config, options = parse_config(EIGHT_B), {"rows": 128, "length": 512, "report_rows": 8, "descent": True}
    for plan in (plan_cpu_memory, plan_gpu_memory):
        assert plan(config, Asked(**options)).nbytes < plan(config, Asked(**options, blocks=True)).nbytes < 24e9


def test_o_and_down_make_up_for_the_stream(source, tmp_path, monkeypatch):
    """What is left of the stream's error after the layers, on the rows calibrated on."""
    left = []
    head = quantization.quantize_head

    def seen(config, ends, streams, *args):
        left.append(float((streams.dense[: streams.used] - streams.made[: streams.used]).square().mean()))
        return head(config, ends, streams, *args)

    monkeypatch.setattr(quantization, "quantize_head", seen)
    for residual in (0.0, 1.0):
        convert(source, tmp_path / f"{residual}", **OPTIONS, rounding=Rounding(residual=residual), work_dir=tmp_path / "work")
    assert left[1] < 0.97 * left[0]


def test_wrong_options_are_named():
    for blocks in (-1, 65, 1.5, True):
        with pytest.raises(OptionError, match="Tuning: blocks is"):
            Tuning(blocks=blocks)
    with pytest.raises(OptionError, match="residual"):
        Rounding(residual=2)

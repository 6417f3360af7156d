"""Tuning: weights as the loader has them, gradients, less KL on rows that nobody learned from, the same bytes after an interruption."""

import dataclasses
import json
import threading

import pytest
import torch

from exl2nb.cli import main
from exl2nb.converter import conversion_job as job_module
from exl2nb.converter import pipeline, quantization
from exl2nb.converter import tuning as stage
from exl2nb.converter.calibration import calibration_rows, tuning_rows
from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.converter.grid import Grid
from exl2nb.converter.tuning import Tuning, mean_kl, needed_bytes, rows_per_step, with_rows_seen
from exl2nb.core.errors import Interrupted, OptionError
from exl2nb.io.shards import TensorStore
from exl2nb.model import reference
from exl2nb.model.layout import model_linears, vector_shapes
from exl2nb.model.loader import read_model_config
from exl2nb.ops import gpu, memory_ops
from exl2nb.ops.gpu import fast_products
from exl2nb.quant.exl2 import Exl2Tensors, encode
from exl2nb.tokenizer.tokenizer import Tokenizer

from .test_conversion_job import CONFIG, OPTIONS, convert, output, write_model

pytestmark = pytest.mark.usefixtures("short_second_text")
TEXT = [" ".join(f"w{(i * i + 7 * i + i // 90) % 90}" for i in range(9000))]
TUNED = {
    "bpw": 3.0,
    "effort": "tuned",
    "calibration": TEXT,
    "rows": 12,
    "length": 32,
    "tuning": Tuning(rows=128, passes=5, written=128, travel=0.2, hidden=0.5),
}


@pytest.fixture
def packed():
    generator = torch.Generator().manual_seed(0)
    groups = [(5, 32), (3, 32), (2, 32)]
    codes = torch.cat([torch.randint(1 << bits, (rows, 40), generator=generator, dtype=torch.uint8) for bits, rows in groups])
    index = torch.randint(16, (3, 40), generator=generator, dtype=torch.uint8)
    scale_max = torch.tensor([0.1, 0.003, 0.05], dtype=torch.float16)
    bias = torch.randn(40, generator=generator).half()
    return encode(codes, index, scale_max, groups, torch.randperm(96, generator=generator), bias=bias)


@pytest.fixture(scope="module")
def tuned(source, tmp_path_factory):
    return convert(source, tmp_path_factory.mktemp("out") / "tuned", **TUNED)


def test_a_grid_computes_what_the_loader_computes(packed):
    grid = Grid(packed, 40, torch.device("cpu"))
    assert torch.equal(grid.weight(), packed.reconstruct()[:, :40].T.float())
    again = grid.packed(grid.keep())
    for name, tensor in packed.tensors("m").items():
        assert torch.equal(again.tensors("m")[name], tensor), name
    grid.latent += 100  # beyond the ends of every grid
    grid.scale_max *= 1e9
    assert torch.isfinite(grid.packed(grid.keep()).reconstruct()).all()
    assert torch.equal(grid.packed(grid.keep()).reconstruct()[:, :40].T.float(), grid.weight())


def test_gradients_of_codes_and_scales(packed):
    grid = Grid(packed, 40, torch.device("cpu"))
    with torch.enable_grad():
        grid.latent.requires_grad_(True), grid.scale_max.requires_grad_(True)
        weight = grid.weight()
        upper = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        to_latent, to_scale = torch.autograd.grad(weight, [grid.latent, grid.scale_max], upper)
    steps = grid.steps(grid.scale_max.detach())[:, grid.rows]
    torch.testing.assert_close(to_latent, upper * steps)
    exact = torch.stack([(upper * weight.detach())[:, grid.rows == g].sum() / grid.scale_max[g].detach() for g in range(3)])
    torch.testing.assert_close(to_scale, exact, rtol=5e-3, atol=5e-3)
    with torch.enable_grad():
        at_the_end = (grid.latent.detach() + 100).requires_grad_(True)
        grid.latent = at_the_end
        assert not torch.autograd.grad(grid.weight().sum(), at_the_end)[0].any()


def test_tuned_is_closer_on_rows_that_nobody_learned_from(tuned, source, tmp_path):
    assert tuned.tuned.chosen > 0
    first, *_, last = tuned.tuned.history
    assert first[0] == 0
    assert last[0] == TUNED["tuning"].steps(128, 32, torch.device("cpu")) == (5 * 128 + 128) / 32
    assert tuned.quality.kl < 0.9 * tuned.tuned.before.kl
    plain = convert(source, tmp_path / "plain", **{**TUNED, "effort": "full", "tuning": None})
    assert plain.tuned is None
    assert "tuned" not in plain.to_dict()
    report = json.loads((tuned.path / "conversion.json").read_text())
    assert report["tuned"]["history"][0]["choosing_kl"] == pytest.approx(first[2])
    assert report["tuned"]["report_kl_before"] > report["quality"]["kl"]
    assert (report["calibration"]["split"]["tuning"], report["tuned"]["written"]) == (128, 128)
    assert "tuned: KL" in str(tuned)
    assert tuned.nbytes == plain.nbytes, "tuning costs no byte"


def read_back(path, config):
    """All tensors of a converted model, f32, as the loader computes them."""
    with TensorStore(path) as store:
        made = {name: store.read(name).float() for name in vector_shapes(config)}
        for linear in model_linears(config):
            matrix = Exl2Tensors.read(store, linear.key, in_features=linear.in_features, out_features=linear.out_features)
            made[f"{linear.key}.weight"] = matrix.reconstruct()[:, : linear.out_features].T.float()
            if linear.bias:
                made[f"{linear.key}.bias"] = matrix.bias.float()
    return made


def test_the_report_is_about_what_is_on_disk(tuned, source):
    config, ids = read_model_config(source), torch.randint(3, 90, (4, 32), generator=torch.Generator().manual_seed(9))
    with TensorStore(source) as store:
        dense = {name: store.read(name).float() for name in store.names()}
    made = read_back(tuned.path, config)
    tokenizer = Tokenizer.load(source)
    _, learned, choosing, report = tuning_rows(
        tokenizer, "\n".join(TEXT), rows=12, tuning=128, choosing=stage.VALIDATION_ROWS, extra=8, length=32
    )
    assert mean_kl(config, dense, made, report) == pytest.approx(tuned.quality.kl, rel=1e-3)
    assert mean_kl(config, dense, made, choosing) == pytest.approx(tuned.tuned.history[tuned.tuned.chosen][2], rel=1e-3)
    assert not {tuple(row) for row in learned.tolist()} & {tuple(row) for row in (*choosing.tolist(), *report.tolist())}
    assert mean_kl(config, dense, made, ids) > 0


def stop_in(stage_name, job):
    """Run a job and cancel it when a third of a stage is done."""

    def stop(event):
        if event.stage == stage_name and event.done >= 0.3 * event.total:
            job.cancel()

    with pytest.raises(Interrupted):
        job.run(stop)


def test_the_same_bytes_after_an_interruption(tuned, source, tmp_path):
    for stage_name, kind in (("write text", "layer"), ("tune", "tune")):
        stop_in(stage_name, ConversionJob(source, tmp_path / "out", **TUNED, work_dir=tmp_path / "work"))
        assert list((tmp_path / "work").glob(f"{kind}-*.safetensors"))
    assert not (tmp_path / "out").exists()
    begun = []
    again = convert(source, tmp_path / "out", **TUNED, work_dir=tmp_path / "work", sink=lambda event: begun.append(event))
    assert output(again.path) == output(tuned.path)
    assert (again.path / "conversion.json").read_bytes() == (tuned.path / "conversion.json").read_bytes()
    steps = [event for event in begun if event.stage == "tune"]
    assert (steps[-1].done, steps[-1].state) == (steps[-1].total, "done")
    assert not [path for path in (tmp_path / "work").iterdir() if path.name.startswith(("tune-", "layer-"))], "nothing is left of it"
    shares = [event.work_share for event in begun if event.work_share is not None]
    assert shares[-1] == pytest.approx(1, abs=1e-6)


def test_parts_can_be_turned_off(tuned, source, tmp_path, monkeypatch):
    quick = dataclasses.replace(TUNED["tuning"], passes=1, written=0, hidden=0.0, codes=False, embedding=False)
    floats = convert(source, tmp_path / "floats", **{**TUNED, "tuning": quick}, work_dir=tmp_path / "work")
    plain = convert(
        source, tmp_path / "plain", **{**TUNED, "tuning": dataclasses.replace(quick, vectors=False)}, work_dir=tmp_path / "work"
    )
    with TensorStore(tuned.path) as all_of_it, TensorStore(floats.path) as some, TensorStore(plain.path) as least:
        code, embedding, norm = "model.layers.0.mlp.up_proj.q_weight", "model.embed_tokens.weight", "model.norm.weight"
        assert torch.equal(some.read(code), least.read(code))
        assert not torch.equal(some.read(code), all_of_it.read(code))
        assert not torch.equal(some.read(norm), least.read(norm))
        assert torch.equal(some.read(embedding), least.read(embedding))
        assert not torch.equal(some.read(embedding), all_of_it.read(embedding))
        assert not torch.equal(some.read("model.layers.0.self_attn.q_proj.bias"), least.read("model.layers.0.self_attn.q_proj.bias"))
    monkeypatch.setitem(stage.LEARNING_RATES, "scales", 1e6)  # a way on which everything gets worse
    worse = convert(
        source, tmp_path / "worse", **{**TUNED, "tuning": dataclasses.replace(quick, vectors=False, rows=64)}, work_dir=tmp_path / "work"
    )
    assert worse.tuned.chosen == 0
    assert worse.quality.kl == pytest.approx(worse.tuned.before.kl, rel=1e-3)


def test_rows_of_a_short_text(source):
    tokenizer = Tokenizer.load(source)
    options = {"rows": 6, "choosing": 32, "length": 32}
    ids, learned, choosing, report = tuning_rows(tokenizer, " ".join(f"w{i % 90}" for i in range(400)), tuning=100, extra=2, **options)
    assert len(ids) == 6 <= len(learned) < 10
    assert (len(choosing), len(report)) == (2, 2)
    assert {tuple(row) for row in ids.tolist()} <= {tuple(row) for row in learned.tolist()}
    text, many = " ".join(f"w{i % 90}" for i in range(400)), {**options, "rows": 100}
    ids, learned, _, _ = tuning_rows(tokenizer, text, tuning=100, extra=2, **many, least=6)
    assert 6 <= len(ids) == len(learned) < 10
    with pytest.raises(OptionError, match="rows of 32 tokens need"):
        tuning_rows(tokenizer, text, tuning=100, extra=2, **many)
    with pytest.raises(OptionError, match="rows of 32 tokens need"):
        tuning_rows(tokenizer, "w1 w2 w3", tuning=100, extra=2, **options)
    assert [rows_per_step(1600, 512, torch.device(kind)) for kind in ("cpu", "cuda")] == [8, 16]
    assert rows_per_step(4, 512, torch.device("cpu")) == 1
    assert len(calibration_rows(tokenizer, " ".join(f"w{i % 90}" for i in range(400)), rows=3, length=32)) == 3


def test_a_gpu_rounds_on_more_rows(source, tmp_path, monkeypatch):
    def asked(device, **options):
        monkeypatch.setattr(job_module, "pick_device", lambda name, **_: device)
        found = ConversionJob(source, tmp_path / "out", bpw=4.0, **options).settings
        return found.rows, found.least_rows

    assert asked("cuda", effort="tuned") == (512, 128)
    assert asked("cpu", effort="tuned") == (256, 128)
    assert asked("cuda", effort="tuned", rows=40) == (40, None)
    assert asked("cuda", effort="tuned", tuning=Tuning(rows=200)) == (200, 128)
    assert asked("cuda", effort="tuned", tuning=Tuning(rows=100)) == (128, None)
    assert asked("cuda", effort="full") == (80, None)


def test_a_large_model_sees_fewer_rows_on_a_gpu(source, monkeypatch):
    config, cpu, gpu = read_model_config(source), torch.device("cpu"), torch.device("cuda")
    weights = sum(linear.in_features * linear.out_features for linear in model_linears(config))
    assert [with_rows_seen(Tuning(), config, device, 32).seen for device in (cpu, gpu)] == [5760, 18432]
    monkeypatch.setattr(stage, "MAX_WORK", 100.5 * 32 * weights)
    assert [with_rows_seen(Tuning(), config, device, 32).seen for device in (cpu, gpu)] == [5760, 100]
    assert with_rows_seen(Tuning(seen=7), config, gpu, 32).to_write(3, gpu) == 4
    with pytest.raises(OptionError, match="seen is 0"):
        Tuning(seen=0)


@pytest.mark.parametrize(
    ("device", "settings", "name"),
    [("cuda", torch.backends.cuda.matmul, "allow_tf32"), ("cpu", getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision")],
)
def test_settings_of_fast_products_are_left_as_they_were(device, settings, name, monkeypatch):
    if not hasattr(settings, name):
        pytest.skip("torch before 2.9 cannot choose on the CPU")
    monkeypatch.setattr(gpu, "cpu_may_round", lambda: False)
    before, other = getattr(settings, name), torch.device("cpu" if device == "cuda" else "cuda")

    def fail():
        with fast_products(torch.device(device)):
            assert getattr(settings, name) != before
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert getattr(settings, name) == before
    with fast_products(other):
        assert getattr(settings, name) == before
    if settings.fp32_precision == "none":  # and it follows the setting above it, as before
        try:
            torch.backends.fp32_precision = "ieee"
            assert settings.fp32_precision == "ieee"
            with pytest.raises(KeyError):
                fail()
            torch.backends.fp32_precision = "tf32"
            assert settings.fp32_precision == "tf32"
        finally:
            torch.backends.fp32_precision = "none"


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_fast_products_end_with_their_last_user(kind, monkeypatch):
    ended, begun = [], []

    def begin(kind):
        begun.append(kind)
        return lambda: ended.append(kind)

    monkeypatch.setattr(gpu, "begin_fast_products", begin)
    first, second, third = (fast_products(torch.device(kind)) for _ in range(3))
    first.__enter__()
    thread = threading.Thread(target=second.__enter__)  # does not wait
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    first.__exit__(None, None, None)
    assert (begun, ended) == ([kind], [])
    second.__exit__(None, None, None)
    assert (begun, ended) == ([kind], [kind])
    with third:
        assert (begun, ended) == ([kind] * 2, [kind])
    assert ended == [kind] * 2


def test_the_cpu_measures_rounds_and_judges_with_fast_products(source, tmp_path, monkeypatch):
    """And a GPU does not: TF32 has an error that Hessians and judgements would feel."""
    users = []
    for module, name in ((pipeline, "measure_linear"), (quantization, "quantize_stored"), (stage, "row_divergence")):
        kept = getattr(module, name)

        def seen(*args, name=name, kept=kept, **options):
            users.append((name, gpu.fast_product_kinds(), memory_ops.memory_is_kept()))
            return kept(*args, **options)

        monkeypatch.setattr(module, name, seen)
    convert(source, tmp_path / "out", **TUNED | {"tuning": Tuning(rows=8, written=0), "device": "cpu"})
    assert {name for name, _, _ in users} == {"measure_linear", "quantize_stored", "row_divergence"}
    assert all(kinds == ["cpu"] for _, kinds, _ in users)
    assert all(kept == (name == "row_divergence") for name, _, kept in users), "memory is kept while it learns"
    assert not gpu.fast_product_kinds() and not memory_ops.memory_is_kept()
    with gpu.fast_products_on_cpu(torch.device("cuda")):
        assert not gpu.fast_product_kinds()


def test_products_on_the_cpu_are_not_rounded(monkeypatch):
    """Neither where oneDNN computes them, nor where it would round, nor with a torch that cannot choose."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(300, 256, generator=generator), torch.randn(256, 300, generator=generator)
    exact, cpu = x.double() @ y.double(), torch.device("cpu")

    def off():
        with fast_products(cpu):
            return float((x @ y - exact).norm() / exact.norm())

    assert off() < 1e-6
    monkeypatch.setattr(gpu, "cpu_may_round", lambda: True)
    before = getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", None)
    with fast_products(cpu):
        assert getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", None) == before
    monkeypatch.setattr(gpu, "cpu_may_round", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "matmul", None, raising=False)
    assert off() < 1e-6


def test_another_switch_of_fast_products_stays(monkeypatch):
    """torch refuses to tell what was chosen through its newer one."""

    class Mixed:
        @property
        def allow_tf32(self):
            raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch.backends.cuda, "matmul", Mixed())
    with fast_products(torch.device("cuda")):
        pass


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"tuning": "much"}, OptionError, "expected a Tuning"),
        ({"effort": "tuned", "generic": True}, OptionError, "effort is 'tuned' and generic is True"),
        ({"effort": "heroic"}, OptionError, "quick, full, thorough, tuned"),
    ],
)
def test_wrong_options_are_named(source, tmp_path, options, error, says):
    with pytest.raises(error, match=says):
        ConversionJob(source, tmp_path / "out", bpw=4.0, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rows": 0}, "rows"),
        ({"passes": 1.5}, "passes"),
        ({"travel": 0}, "travel"),
        ({"codes": 1}, "codes"),
        ({"hidden": 1.5}, "hidden"),
    ],
)
def test_wrong_tuning_is_named(options, says):
    with pytest.raises(OptionError, match=says):
        Tuning(**options)


def test_what_cannot_be_tuned_is_refused_before_the_work(tmp_path):
    experts = {**CONFIG, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
    experts["attention_bias"] = False
    with pytest.raises(OptionError, match="the model has experts"):
        convert(write_model(tmp_path / "sparse", **experts), tmp_path / "out", **{**OPTIONS, "effort": "tuned"})


@pytest.mark.parametrize("larger", [1, 30])
def test_the_price_of_an_error_is_the_kl_that_it_causes(weights, larger):
    """Random errors of the stream after each layer, small enough for the second order; also where some tokens' streams are far larger."""
    config, weights = weights.config, stage.dense_weights(weights)
    table = weights[f"{config.names.embed}.weight"] = weights[f"{config.names.embed}.weight"].clone()
    table[5:9] *= larger
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (48, 32), generator=generator)
    found = stage.stream_prices(config, weights, ids, seed=0)
    assert len(found) == config.num_layers
    for layer, price in enumerate(found):
        x = reference.embed(config, weights, ids)
        for at in range(layer + 1):
            x = reference.block(config, at, weights, x)
        error = 0.01 * x.square().mean(-1, keepdim=True).sqrt() * torch.randn(x.shape, generator=generator)
        relative = stage.relative_error(error, x, config)
        streams = [x, x + error]
        for at in range(layer + 1, config.num_layers):
            streams = [reference.block(config, at, weights, stream) for stream in streams]
        wanted, got = (reference.head(config, weights, reference.final_norm(config, weights, x)).log_softmax(-1) for x in streams)
        kl = float((wanted.exp() * (wanted - got)).sum(-1).mean())
        told = float(stage.priced_error(relative, price)) / ids.numel()
        assert told == pytest.approx(kl, rel=0.25), layer
    assert all(torch.equal(one, other) for one, other in zip(found, stage.stream_prices(config, weights, ids, seed=0)))


def test_what_a_cpu_does_otherwise():
    cpu, gpu = Tuning().on(torch.device("cpu")), Tuning().on(torch.device("cuda"))
    assert (cpu.hidden, gpu.hidden) == (0.6, 0.25)
    assert [Tuning(hidden=0.0, passes=5).on(torch.device(kind)).hidden for kind in ("cpu", "cuda")] == [0.0, 0.0]
    seen = [
        (one.repeated(rows, torch.device(kind)), one.to_write(rows, torch.device(kind)))
        for one, kind in ((cpu, "cpu"), (gpu, "cuda"))
        for rows in (2491, 500)
    ]
    assert seen == [(5760, 0), (2000, 560), (2491, 18432 - 2491), (500, 18432 - 500)]
    assert Tuning(passes=3).on(torch.device("cpu")).steps(80, 512, torch.device("cpu")) == 2 * 2560 // 16


@pytest.mark.parametrize(
    ("length", "kind", "pieces", "each"), [(512, "cpu", 2, 256), (512, "cuda", 1, 512), (32, "cpu", 1, 32), (515, "cpu", 3, 171)]
)
def test_rows_are_cut_into_equal_pieces(length, kind, pieces, each):
    assert stage.row_pieces(length, torch.device(kind)) == (pieces, each)
    text = torch.arange(3 * length).view(3, length)
    found = stage.learned_rows(text, 5, text[:1] + 10000, torch.device(kind))
    assert found.shape == (6 * pieces, each)
    assert torch.equal(found[:pieces].flatten(), text[0, : pieces * each])
    assert torch.equal(found[-1], text[0, (pieces - 1) * each : pieces * each] + 10000)
    second = found[3 * pieces + pieces : 5 * pieces]  # but for the row that the end of the text begins
    assert (second[:, 1:] - second[:, :-1] == 1).all() and not {int(row[0]) for row in second} & {
        int(row[0]) for row in found[: 3 * pieces]
    }


def test_the_divergence_is_the_kl_and_its_gradient():
    wanted, found = torch.randn(2, 2, 3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    with torch.enable_grad():
        found.requires_grad_(True)
        kl = stage.row_divergence(wanted, found)
        plain = (wanted.softmax(-1) * (wanted.log_softmax(-1) - found.log_softmax(-1))).sum(-1)
        weights = torch.arange(6.0, dtype=torch.float64).view(2, 3)
        gradients = [torch.autograd.grad((one * weights).sum(), found)[0] for one in (kl, plain)]
    torch.testing.assert_close(kl, plain)
    torch.testing.assert_close(*gradients)


def test_no_token_counts_for_more_than_the_mean():
    with torch.enable_grad():
        kl = torch.tensor([-1e-9, 0.0, 1.0, 2.0, 12.0], requires_grad=True)
        loss = stage.levelled(kl)
        (gradient,) = torch.autograd.grad(loss.sum(), kl)
    torch.testing.assert_close(loss.detach(), torch.tensor([-1e-9, 0.0, 1.0, 2.0, 3.0]))
    torch.testing.assert_close(gradient, torch.tensor([1.0, 1.0, 1.0, 1.0, 0.25]))


def test_codes_are_damped_less_where_tokens_are_many(source, tmp_path, monkeypatch):
    assert [stage.damping_of(tokens) for tokens in (0, 1000, 10**7)] == [1, 1, stage.CODE_DAMPING]
    assert stage.damping_of(int(stage.DAMPING_TOKENS / 2)) == pytest.approx(2 * stage.CODE_DAMPING, rel=1e-5)

    class Enough(Exception):
        pass

    found = []

    def adam(*args, damping, **options):
        found.append(damping)
        raise Enough

    monkeypatch.setattr(stage, "Adam", adam)
    monkeypatch.setattr(stage, "DAMPING_TOKENS", 4096)
    for passes in (1, 4, 8):  # of 32 rows of 32 tokens
        quick = Tuning(rows=32, passes=passes, written=0)
        with pytest.raises(Enough):
            convert(source, tmp_path / str(passes), **{**TUNED, "tuning": quick}, work_dir=tmp_path / "work")
    assert found == pytest.approx([4 * stage.CODE_DAMPING, stage.CODE_DAMPING, stage.CODE_DAMPING])


def test_memory_grows_with_the_model(source):
    config = read_model_config(source)
    twice = dataclasses.replace(config, num_layers=2 * config.num_layers, windows=config.windows * 2)
    cpu = torch.device("cpu")
    assert needed_bytes(config, cpu, 64) < needed_bytes(twice, cpu, 64) < 3 * needed_bytes(config, cpu, 64)
    job = ConversionJob(source, source.parent / "never", **TUNED)
    assert job.memory().tune == needed_bytes(config, cpu, 32)
    assert job.gpu_memory().tune > 0
    assert ConversionJob(source, source.parent / "never", **OPTIONS, bpw=4.0).memory().tune == 0


def test_command_line(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(stage.MAX_ROWS_SEEN, "cpu", 64)
    text = tmp_path / "text.txt"
    text.write_text(TEXT[0][:4000])
    options = ["--bpw", "3", "--effort", "tuned", "--calibration", str(text), "--rows", "8", "--length", "16", "--device", "cpu"]
    assert main(["convert", str(source), str(tmp_path / "out"), *options, "--json", "--quiet"]) == 0
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["tuned"]["options"]["codes"] is True
    assert json.loads(capsys.readouterr().out)["tuned"]["chosen"] >= 0

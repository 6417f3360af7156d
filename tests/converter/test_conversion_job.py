"""A tiny random model from dense to EXL2 and back: budget, bytes, resumption, cancellation, errors by name."""

import json
import threading
import time

import pytest
import torch

from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.converter.measurement import Measurement
from exl2nb.converter.rounding import dense_weight
from exl2nb.converter.settings import describe_device
from exl2nb.converter.work import Work
from exl2nb.core.errors import ConversionError, Interrupted, ModelNotFound, OptionError
from exl2nb.core.show import bits_cell
from exl2nb.io import safetensors
from exl2nb.io.shards import TensorStore
from exl2nb.model.archs import parse_config
from exl2nb.model.inspection import inspect
from exl2nb.model.layout import model_linears, vector_shapes
from exl2nb.model.reference import logits
from exl2nb.quant.exl2 import Exl2Tensors
from tests.model.zoo import write_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
TEXT = [" ".join(f"w{(i * i + 7 * i) % 90}" for i in range(3000))]
FILES = ["config.json", "conversion.json", "output.safetensors", "tokenizer.json", "tokenizer_config.json"]
OPTIONS = {"calibration": TEXT, "rows": 6, "length": 32}


def write_model(directory, **changes):
    """A random model of CONFIG with a word tokenizer; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = {**CONFIG, **changes}
    config = parse_config(raw)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: 1 + 0.1 * torch.randn(shape, generator=generator) for name, shape in vector_shapes(config).items()}
    for linear in model_linears(config):
        if linear.role == "head" and config.tie_word_embeddings:
            continue
        tensors[f"{linear.key}.weight"] = torch.randn(linear.shape, generator=generator) * linear.in_features**-0.5
        if linear.bias:
            tensors[f"{linear.key}.bias"] = 0.1 * torch.randn(linear.out_features, generator=generator)
    tensors["model.embed_tokens.weight"] = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    safetensors.save(directory / "model.safetensors", {name: tensor.half() for name, tensor in tensors.items()})
    (directory / "config.json").write_text(json.dumps(raw))
    write_tokenizer(directory)
    return directory


def convert(source, out, sink=None, **options):
    """A conversion with OPTIONS, at 4 bits per weight where nothing else is asked for."""
    return ConversionJob(source, out, **{"bpw": 4.0, **OPTIONS, **options}).run(sink)


@pytest.fixture(scope="module")
def done(source, tmp_path_factory):
    return convert(source, tmp_path_factory.mktemp("out") / "5bpw", bpw=5.0)


def output(directory):
    return (directory / "output.safetensors").read_bytes()


def test_result_is_what_is_on_disk(done, source):
    assert done.bpw <= 5.0
    assert done.bpw > 4.9
    assert done.nbytes == (done.path / "output.safetensors").stat().st_size
    assert set(done.seconds) == {"calibrate", "measure", "allocate", "quantize", "write"}
    assert sorted(p.name for p in done.path.iterdir()) == FILES
    assert [p.name for p in done.path.parent.iterdir()] == [done.path.name]  # no work folder is left
    written = json.loads((done.path / "config.json").read_text())["quantization_config"]
    assert (written["quant_method"], written["bits"], written["head_bits"]) == ("exl2", 5.0, 6)
    assert written["calibration"] == {"rows": 6, "length": 32, "dataset": "1 strings"}
    assert len(done.to_frame()) == 3 * 7 + 1
    assert str(done).count("\n") == 11
    lines = done.map().splitlines()
    assert [line.split()[0] for line in lines] == ["layer", "q", "k", "v", "o", "gate", "up", "down", "head"], (
        "matrices down, layers across"
    )
    assert lines[0].split()[1:] == ["0", "1", "2"]
    first = done.matrices[0].bpw
    assert bits_cell(first, done.matrices[0].mix, "padding:1px 4px;text-align:center") in done._repr_html_(), "the colours of BitMap"
    report = json.loads((done.path / "conversion.json").read_text())
    assert report == json.loads(json.dumps(done.to_dict()))
    assert report["bytes"] == done.nbytes
    assert sum(m["share"] for m in report["matrices"]) == pytest.approx(1)
    assert report["quality"]["kl_low"] < report["quality"]["kl"] < report["quality"]["kl_high"]
    assert report["quality"]["rows"] == 8
    assert "<table" in done._repr_html_()
    bits = {matrix.key: matrix.bpw for matrix in done.matrices}
    with TensorStore(done.path) as store:
        for key, bpw in bits.items():
            assert Exl2Tensors.read(store, key).bpw == pytest.approx(bpw)
    inspect(done.path)


def test_one_report_row_has_no_interval(source, tmp_path):
    quality = convert(source, tmp_path / "m", report_rows=1).quality
    assert quality.to_dict()["kl_low"] is None
    assert "nan" not in str(quality)
    assert str(quality).endswith(", 1 row of 32 tokens")


def test_two_conversions_to_one_place(source, tmp_path):
    """The second is refused while the first is at work, and harms nothing."""
    refused = []

    def second(event):
        if event.stage == "measure" and not refused:
            with pytest.raises(ConversionError, match="another conversion is at work in it; wait for its end or cancel it") as caught:
                convert(source, tmp_path / "m")
            refused.append(str(caught.value))

    convert(source, tmp_path / "m", second)
    assert len(refused) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    Work(tmp_path / "w").close()
    Work(tmp_path / "w").close()


def test_the_files_hold_what_the_stream_was_run_on(done, source):
    """Reconstructing the files gives a model close to the source, and closer with more bits."""
    config = parse_config(CONFIG)
    ids = torch.randint(3, 90, (2, 48), generator=torch.Generator().manual_seed(3))
    with TensorStore(source) as store:
        plain = {name: store.read(name).float() for name in store.names()}
    wanted = logits(config, plain, ids).log_softmax(-1)

    def kl(path):
        with TensorStore(path) as store:
            weights = {}
            for linear in model_linears(config):
                weights[f"{linear.key}.weight"] = dense_weight(Exl2Tensors.read(store, linear.key), linear.out_features)
                if linear.bias:
                    weights[f"{linear.key}.bias"] = store.read(f"{linear.key}.bias").float()
                    assert linear.role == "v" or torch.equal(weights[f"{linear.key}.bias"], plain[f"{linear.key}.bias"])  # v is scaled
            for name in vector_shapes(config):
                weights[name] = store.read(name).float()
                assert torch.equal(weights[name], plain[name])
        got = logits(config, weights, ids).log_softmax(-1)
        return float((wanted.exp() * (wanted - got)).sum(-1).mean())

    small = convert(source, done.path.parent / "4bpw", bpw=4.0, head_bits=4, measurement=done.measurement)
    assert kl(done.path) < kl(small.path) < 0.5
    assert small.nbytes < done.nbytes
    assert small.seconds["measure"] < done.seconds["measure"]


def test_same_bytes_again_and_from_a_saved_measurement(done, source, tmp_path):
    done.measurement.save(tmp_path / "m.json")
    loaded = Measurement.load(tmp_path / "m.json")
    assert loaded.linears == done.measurement.linears
    table = json.loads((tmp_path / "m.json").read_text())
    assert set(table["measurement"]) >= {"model.layers.0.self_attn", "model.layers.2.mlp", "lm_head.linear"}
    assert all(0 < o["accuracy"] < 1 and o["total_bits"] > 0 for o in table["measurement"]["model.layers.1.mlp"])
    for name, options in (("again", {}), ("loaded", {"measurement": tmp_path / "m.json"})):
        other = convert(source, tmp_path / name, bpw=5.0, **options)
        assert output(other.path) == output(done.path)


def test_measurement_of_something_else_is_refused(done, source, tmp_path):
    other = write_model(tmp_path / "other", rms_norm_eps=1e-6)
    with pytest.raises(ConversionError, match="belongs to another model"):
        convert(other, tmp_path / "x", bpw=5.0, measurement=done.measurement)
    (tmp_path / "m.json").write_text('{"measurement": {}}')
    with pytest.raises(ConversionError, match="measure again"):
        convert(source, tmp_path / "x", bpw=5.0, measurement=tmp_path / "m.json")
    assert not (tmp_path / "x").exists()


class Stop(Exception):
    pass


@pytest.mark.parametrize("stage", ["measure", "quantize", "write"])
def test_resumes_to_the_same_bytes(done, source, tmp_path, stage):
    def bomb(event):
        if event.stage == stage and event.done >= event.total * 0.7:
            raise Stop

    with pytest.raises(Stop):
        convert(source, tmp_path / "out", bomb, bpw=5.0)
    assert not (tmp_path / "out").exists()
    result = convert(source, tmp_path / "out", bpw=5.0)
    assert output(result.path) == output(done.path)
    assert (result.resumed_layers > 0) == (stage != "measure")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_biases_that_f16_does_not_hold_resume_to_the_same_bytes(tmp_path):
    """Later layers see the biases that are filed, in a run that was never broken too."""
    source = write_model(tmp_path / "dense", attention_bias=True)
    with TensorStore(source) as store:
        tensors = {name: store.read(name).float() for name in store.names()}
    generator = torch.Generator().manual_seed(3)
    tensors |= {name: tensor + 100 * torch.rand(tensor.shape, generator=generator) for name, tensor in tensors.items() if ".bias" in name}
    safetensors.save(source / "model.safetensors", tensors)
    whole = convert(source, tmp_path / "whole", bpw=5.0)

    def bomb(event):
        if event.stage == "quantize" and event.done >= event.total * 0.7:
            raise Stop

    with pytest.raises(Stop):
        convert(source, tmp_path / "out", bomb, bpw=5.0)
    again = convert(source, tmp_path / "out", bpw=5.0)
    assert again.resumed_layers > 0
    assert output(again.path) == output(whole.path)


def test_a_damaged_layer_file_is_made_again(done, source, tmp_path):
    def bomb(event):
        if event.stage == "write":
            raise Stop

    with pytest.raises(Stop):
        convert(source, tmp_path / "out", bomb, bpw=5.0, work_dir=tmp_path / "work")
    victim = sorted((tmp_path / "work").glob("layer-*.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:-100])
    result = convert(source, tmp_path / "out", bpw=5.0, work_dir=tmp_path / "work")
    assert output(result.path) == output(done.path)
    assert result.resumed_layers == 3
    stays = ["measurement", "scales", *["statistics"] * 3]
    assert sorted(p.name.split("-")[0] for p in (tmp_path / "work").iterdir()) == stays


def test_cancel(source, tmp_path):
    job = ConversionJob(source, tmp_path / "out", bpw=5.0, work_dir=tmp_path / "work", **OPTIONS)
    states = []

    def sink(event):
        states.append(event.state)
        if event.stage == "quantize" and event.done == 1:
            threading.Thread(target=job.cancel).start()
            time.sleep(0.05)

    with pytest.raises(Interrupted, match="run it again to continue"):
        job.run(sink)
    assert states[-1] == "cancelled"
    assert not (tmp_path / "out").exists()


def test_tied_head_and_odd_vocabulary(tmp_path):
    source = write_model(tmp_path / "tied", tie_word_embeddings=True, vocab_size=99)
    result = convert(source, tmp_path / "out", bpw=4.0)
    with TensorStore(result.path) as store:
        assert store.info("lm_head.q_weight").shape[1] == 128
        assert store.info("model.embed_tokens.weight").shape == (99, 64)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"bpw": 1.9}, OptionError, "bpw"),
        ({"bpw": 8.1}, OptionError, "bpw"),
        ({"bpw": float("nan")}, OptionError, "bpw"),
        ({"head_bits": 7}, OptionError, "head_bits"),
        ({"rows": 0}, OptionError, "rows"),
        ({"length": 8}, OptionError, "length"),
        ({"seed": -1}, OptionError, "seed"),
        ({"effort": "heroic"}, OptionError, "quick, full, thorough"),
        ({"bpw": None, "target": {"byte": "5MB"}}, OptionError, "did you mean 'bytes'"),
        ({"bpw": None, "target": "5MB"}, OptionError, "target is '5MB'; expected a dict"),
        ({"bpw": None, "target": {"bytes": "9" * 400 + "GB"}}, OptionError, "expected bytes, or text such as"),
        ({"bpw": None, "target": {"fits": "1GiB", "cache": "zz"}}, OptionError, "unknown cache mode 'zz'"),
        ({"overrides": "v=5"}, OptionError, "overrides is 'v=5'; expected a dict"),
        ({"overrides": {5: 5}}, OptionError, "expected a dict"),
    ],
)
def test_options_out_of_range(source, tmp_path, options, error, text):
    with pytest.raises(error, match=text):
        ConversionJob(source, tmp_path / "out", **{"bpw": 4.0, **OPTIONS, **options})


def test_unreachable_target_names_the_range(source, tmp_path, done):
    with pytest.raises(ConversionError, match=r"reaches 2\.\d+ to 8\.\d+"):
        convert(source, tmp_path / "out", bpw=2.0, measurement=done.measurement)


def test_bad_places(source, tmp_path, done):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConversionError, match="not empty"):
        ConversionJob(source, tmp_path / "full", bpw=4.0)
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        ConversionJob(tmp_path / "nothing", tmp_path / "out", bpw=4.0).run()
    with pytest.raises(ConversionError, match="dense"):
        convert(done.path, tmp_path / "out", bpw=4.0)
    with pytest.raises(ConversionError, match="cannot be made"):
        convert(source, tmp_path / "full" / "file" / "out", bpw=4.0)
    deep = convert(source, tmp_path / "a" / "b" / "out", bpw=5.0, measurement=done.measurement)
    assert output(deep.path) == output(done.path)
    (tmp_path / "empty").mkdir()
    assert convert(source, tmp_path / "empty", bpw=5.0, measurement=done.measurement).path.is_dir()


def test_shapes_the_format_cannot_hold(tmp_path):
    source = write_model(tmp_path / "odd", intermediate_size=72)
    with pytest.raises(ConversionError, match="multiples of 32"):
        convert(source, tmp_path / "out", bpw=4.0)


def test_files_of_others_and_links_stay(source, done, tmp_path):
    """In the folder of work in progress, and where the destination is a link to a folder."""
    work, there = tmp_path / ".out.work", tmp_path / "there"
    work.mkdir(), there.mkdir()
    (work / "precious.txt").write_text("mine")
    out = tmp_path / "out"
    out.symlink_to(there)
    convert(source, out, bpw=5.0)
    assert out.is_symlink()
    assert output(there) == output(done.path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.work", "out", "there"]
    assert [path.name for path in work.iterdir()] == ["precious.txt"]


# ---- The device


def test_the_cpu_has_a_name():
    assert describe_device(torch.device("cpu")) == "the CPU"

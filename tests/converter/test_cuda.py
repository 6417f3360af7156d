"""Conversions on a GPU: the same bytes every time, as near to the source as the CPU's, and going on where one stopped."""

import pytest
import torch

from exl2nb.converter.conversion_job import ConversionJob, measure
from exl2nb.core.errors import FormatError, Interrupted
from exl2nb.io import safetensors
from tests.model.tiny import edit

from .test_conversion_job import OPTIONS, convert, output, write_model
from .test_tuning import TUNED, stop_in

pytestmark = pytest.mark.gpu
MORE = {**OPTIONS, "rows": 24}


def test_the_same_bytes_twice_and_as_good_as_the_cpus(source, tmp_path):
    first, second, cpu = (convert(source, tmp_path / str(i), device=device, rows=24) for i, device in enumerate(("cuda", "cuda", "cpu")))
    assert output(first.path) == output(second.path)
    assert (first.path / "conversion.json").read_bytes() == (second.path / "conversion.json").read_bytes()
    assert (first.device, cpu.device) == ("cuda", "cpu")
    assert first.quality.kl == pytest.approx(cpu.quality.kl, rel=0.25)
    assert first.predicted_kl == pytest.approx(cpu.predicted_kl, rel=0.15)


def test_tuned_with_the_same_bytes_twice_and_as_well_as_the_cpus(source, tmp_path):
    first, second, cpu = (convert(source, tmp_path / str(i), **TUNED, device=device) for i, device in enumerate(("cuda", "cuda", "cpu")))
    assert output(first.path) == output(second.path)
    assert (first.path / "conversion.json").read_bytes() == (second.path / "conversion.json").read_bytes()
    assert first.tuned.chosen > 0
    assert first.quality.kl == pytest.approx(cpu.quality.kl, rel=0.25)
    assert first.quality.kl < 0.9 * first.tuned.before.kl


def test_measured_alike(source):
    found = [measure(source, device=device, progress=None, **MORE) for device in ("cuda", "cuda", "cpu")]
    assert found[0].linears == found[1].linears
    for key, linear in found[0].linears.items():
        assert linear.power == pytest.approx(found[2].linears[key].power, rel=0.1)
        for anchor, losses in linear.anchors.items():
            assert sum(losses) == pytest.approx(sum(found[2].linears[key].anchors[anchor]), rel=0.2)


@pytest.mark.parametrize("stop", [2, 5, 9])
def test_goes_on_with_the_same_bytes(source, tmp_path, stop):
    whole = convert(source, tmp_path / "whole", device="cuda", rows=24)
    job, count = ConversionJob(source, tmp_path / "cut", bpw=4.0, device="cuda", **MORE), []

    def sink(event):
        count.append(event)
        if len(count) == stop:
            job.cancel()

    with pytest.raises(Interrupted):
        job.run(sink)
    assert output(convert(source, tmp_path / "cut", device="cuda", rows=24).path) == output(whole.path)


def test_weights_that_are_not_finite_are_named(tmp_path):
    broken = write_model(tmp_path / "broken")
    name = "model.layers.1.mlp.gate_proj.weight"
    with safetensors.SafetensorsFile(broken / "model.safetensors") as file:
        weight = file.read(name).clone()
    weight[3, 5] = torch.inf
    edit(broken, {name: weight})
    with pytest.raises(FormatError, match=r"layers\.1\.mlp\.gate_proj.*NaN or infinity"):
        convert(broken, tmp_path / "out", device="cuda", rows=24)


def test_tuned_goes_on_with_the_same_bytes(source, tmp_path):
    options = {**TUNED, "device": "cuda"}
    whole = convert(source, tmp_path / "whole", **options)
    stop_in("tune", ConversionJob(source, tmp_path / "out", **options, work_dir=tmp_path / "work"))
    assert output(convert(source, tmp_path / "out", **options, work_dir=tmp_path / "work").path) == output(whole.path)

"""What a disk may do to a conversion: bits that flip in files of work in progress, and power that is lost between any two writes."""

import json
import os
import random
import shutil

import pytest
import torch

from exl2nb.converter import pipeline
from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.converter.measurement import Measurement
from exl2nb.core.errors import ConversionError, OptionError
from exl2nb.model.writer import write_model as write_directory

from .power_loss import Disk, put
from .test_conversion_job import OPTIONS, convert, output


class Stop(Exception):
    pass


def stopped(source, out, stage, done):
    """A conversion that ends after some steps of a stage; its work folder stays."""

    def bomb(event):
        if event.stage == stage and event.done == done:
            raise Stop

    with pytest.raises(Stop):
        convert(source, out, bomb)
    return out.parent / f".{out.name}.work"


def flip(path, rng):
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


@pytest.fixture(scope="module")
def quantizing(source, tmp_path_factory):
    """Work of a conversion that was stopped while it quantised: a measurement, statistics, two layers."""
    return stopped(source, tmp_path_factory.mktemp("work") / "out", "quantize", 2)


def resumed(source, work, tmp_path, damage):
    """The conversion that goes on from damaged work: its result, and the numbers of files that were written anew."""
    mine = tmp_path / ".out.work"
    shutil.copytree(work, mine)
    damage(mine)
    job = ConversionJob(source, tmp_path / "out", bpw=4.0, work_dir=mine, **OPTIONS)
    before = {path.name: path.stat().st_mtime_ns for path in mine.iterdir()}
    kept = {}

    def watch(event):
        if event.stage == "write" and event.done == 1:
            kept.update({path.name: path.stat().st_mtime_ns for path in mine.iterdir()})

    job.run(watch)
    return {name.rsplit("-", 1)[-1].split(".")[0] for name, when in kept.items() if before.get(name) != when}


@pytest.mark.cpu
@pytest.mark.parametrize("kind", ["layer-*-0000*", "layer-*-0001*"])
@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_in_a_layer_is_noticed_and_that_layer_alone_made_again(source, whole, quantizing, tmp_path, kind, seed):
    (path,) = quantizing.glob(kind)
    again = resumed(source, quantizing, tmp_path, lambda work: flip(work / path.name, random.Random(f"{kind} {seed}")))
    assert again == {path.stem.rsplit("-", 1)[-1], "0002", "head"}  # it, and what had not been made
    assert output(tmp_path / "out") == output(whole.path)


@pytest.mark.cpu
@pytest.mark.parametrize("kind", ["statistics-*-0001*", "measurement-*"])
def test_a_flipped_bit_in_statistics_or_in_the_measurement_is_noticed(source, whole, quantizing, tmp_path, kind):
    (path,) = quantizing.glob(kind)
    again = resumed(source, quantizing, tmp_path, lambda work: flip(work / path.name, random.Random(kind)))
    assert path.stem.rsplit("-", 1)[-1] in again
    assert "0000" in again or kind.startswith("statistics")
    assert output(tmp_path / "out") == output(whole.path)


@pytest.mark.cpu
def test_a_flipped_digit_in_a_measured_layer_is_noticed_and_that_layer_alone_measured_again(source, whole, tmp_path, monkeypatch):
    work = stopped(source, tmp_path / "first" / "out", "measure", 6)  # of 7: three passes forward, the head, two layers backward
    (path,) = work.glob("measure-*-0002.json")
    others = [other for other in work.glob("measure-*") if other != path]
    assert others
    text = path.read_text()
    at = text.index(".", len(text) // 2) + 1
    path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])  # still valid JSON, still a plausible number
    measured = []
    plain = pipeline.measure_linear
    monkeypatch.setattr(pipeline, "measure_linear", lambda linear, *rest: measured.append(linear.layer) or plain(linear, *rest))
    convert(source, tmp_path / "first" / "out")
    assert 2 in measured
    assert -1 not in measured
    assert output(tmp_path / "first" / "out") == output(whole.path)


def test_every_flipped_bit_of_a_measurement_is_noticed(whole, tmp_path):
    path, rng, noticed = tmp_path / "m.json", random.Random(0), 0
    whole.measurement.save(path)
    good = path.read_bytes()
    for _ in range(60):
        path.write_bytes(good)
        flip(path, rng)
        try:
            assert Measurement.load(path).linears == whole.measurement.linears  # 1e-5 may have become 1E-5
        except ConversionError:
            noticed += 1
    assert noticed > 55
    path.write_bytes(good)
    content = json.loads(good)
    del content["exl2nb"]["sha256"]
    path.write_text(json.dumps(content))
    assert Measurement.load(path).linears == whole.measurement.linears  # a file of version 0.1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overrides": {"*.no_such_proj": 4}}, "matches no matrix"),
        ({"overrides": {"layer 99": (3, 4)}}, "matches no matrix"),
        ({"overrides": {"v": "four"}}, "expected bits, a range"),
        ({"overrides": {"v": ((4, 31),)}}, "multiples of 32"),
        ({"frozen": {"model.layers.77.mlp.down_proj": ((4, 96),)}}, "frozen.*matches no matrix"),
    ],
)
def test_overrides_that_cannot_hold_are_refused_before_anything_is_measured(source, tmp_path, options, words):
    stages = []
    with pytest.raises(OptionError, match=words):
        convert(source, tmp_path / "out", lambda event: stages.append(event.stage), **options)
    assert stages == []


def lose_power(source, whole, tmp_path, monkeypatch, moments):
    """Convert on a disk that forgets, then go on from each state that it may have left."""
    expected = {path.name: path.read_bytes() for path in whole.path.iterdir()}
    root = tmp_path / "disk"
    root.mkdir()
    with monkeypatch.context() as patch:
        disk = Disk(root, moments, patch)
        convert(source, root / "out")
    for (at, kind), state in disk.states.items():
        left = tmp_path / f"{kind}-{at}"
        put(state, left)
        if not (left / "out").exists():
            convert(source, left / "out")
        assert {path.name: path.read_bytes() for path in (left / "out").iterdir()} == expected, (at, kind)
        shutil.rmtree(left)
    return disk.operations


@pytest.mark.cpu
def test_power_is_lost_at_a_few_moments(source, whole, tmp_path, monkeypatch):
    """The last ones are those of the finished directory."""
    (tmp_path / "dry").mkdir()
    with monkeypatch.context() as patch:
        disk = Disk(tmp_path / "dry", (), patch)
        convert(source, tmp_path / "dry" / "out")
    count = disk.operations
    renamed = [count - back for back in range(6, 14)]
    assert lose_power(source, whole, tmp_path, monkeypatch, [count // 3, 2 * count // 3, *renamed[::3], count]) == count


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_power_is_lost_at_every_moment(source, whole, tmp_path, monkeypatch):
    assert lose_power(source, whole, tmp_path, monkeypatch, range(1, 10_000)) < 10_000


@pytest.mark.parametrize("kind", ["eager", "lazy", "mixed"])
def test_power_is_lost_while_a_directory_is_replaced(tmp_path, monkeypatch, kind):
    """The old one or the new one is there, whole; at no moment neither."""

    def write(value, **options):
        write_directory(
            root / "m", [("a", torch.full((64,), value))], config={"value": value}, extra={"more.txt": b"%d" % value}, **options
        )

    root = tmp_path / "disk"
    root.mkdir()
    write(1)
    os.sync()
    contents = [{path.name: path.read_bytes() for path in (root / "m").iterdir()}]
    with monkeypatch.context() as patch:
        disk = Disk(root, range(1, 1000), patch)
        for directory in (root / "m",):  # it was on the disk before
            for path in directory.iterdir():
                disk.contents[disk.number_of(path)] = path.read_bytes()
            disk.flush_directory(directory)
        disk.flush_directory(root)
        write(2, overwrite=True)
    contents.append({path.name: path.read_bytes() for path in (root / "m").iterdir()})
    for (at, which), state in disk.states.items():
        if which == kind:
            places = {name.split("/")[0] for name in state if "/" in name}
            found = [{name.split("/")[1]: data for name, data in state.items() if name.startswith(f"{place}/")} for place in places]
            assert any(one in contents for one in found), (at, sorted(state))

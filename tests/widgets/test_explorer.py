"""BitrateExplorer's Python half: solving live, the curve, making a copy beside the original (with a fake converter), the twin."""

import re
import threading
from types import SimpleNamespace

import pytest
from fakes import FakeModel

import exl2nb as ex
from exl2nb.core.errors import ConversionError, Exl2Error, OptionError
from exl2nb.core.progress import Progress
from exl2nb.widgets import BitrateExplorer
from tests.widgets.page import state, tell


@pytest.fixture(scope="module")
def explorer(measurement):
    """For tests that leave it as they found it, but for the bitrate."""
    return BitrateExplorer(measurement)


class Original(FakeModel):
    path, context = "somewhere", 4096


@pytest.fixture
def converter(monkeypatch):
    """Stands in for converting and loading; remembers what was asked."""
    asked = SimpleNamespace(bpw=[], kl=0.25, gate=None, problem=None)

    def convert(src, dst, *, bpw, measurement, progress, **options):
        asked.bpw.append(bpw)
        for i in range(3):
            progress(Progress(stage="quantize", done=i, total=3, unit="layers", elapsed_s=0.1))
            if asked.gate is not None:
                asked.gate.wait(5)
        if asked.problem:
            raise asked.problem
        return SimpleNamespace(quality=SimpleNamespace(kl=asked.kl))

    monkeypatch.setattr(ex, "convert", convert)
    monkeypatch.setattr(ex, "load", lambda path, **options: Closing([" the", " copy"]))
    return asked


class Closing(FakeModel):
    shut = 0

    def close(self):
        Closing.shut += 1


def test_moving_solves_anew(measurement, sent):
    explorer = BitrateExplorer(measurement, bpw=4.0)
    assert explorer.solved == 4.0
    before = (explorer.nbytes, explorer.predicted_kl, list(state(explorer, "_cells")))
    tell(explorer, {"type": "solve", "bpw": 2.5})
    assert (explorer.bpw, explorer.solved) == (2.5, 2.5)
    assert explorer.nbytes < before[0]
    assert explorer.predicted_kl > before[1]
    assert state(explorer, "_cells") != before[2]
    plan = measurement.solve(bpw=2.5)
    assert explorer.plan.groups() == plan.groups()
    assert explorer.nbytes == plan.nbytes
    explorer.bpw = 6.0
    assert explorer.solved == 6.0


def test_the_edges_are_met_and_nonsense_is_shown(measurement):
    explorer = BitrateExplorer(measurement, bpw=2.0)
    assert measurement.range[0] <= explorer.solved < 2.3
    assert explorer.solve(99).bpw <= 8.0001
    assert explorer.solved == state(explorer, "_high")
    for nonsense in ("4", None, float("nan"), True):
        tell(explorer, {"type": "solve", "bpw": nonsense})
        assert explorer.status == "error"
        assert "expected a number" in explorer.error


def test_a_size_moves_the_slider_to_the_largest_that_fits(measurement, explorer):
    tell(explorer, {"type": "solve_size", "kind": "bytes", "size": 7_000_000, "context": 0, "cache": "fp16"})
    assert explorer.nbytes <= 7_000_000 < measurement.solve(bpw=explorer.solved + 0.05).nbytes
    assert explorer.bpw == explorer.solved
    alone = explorer.solve(fits="9MB").bpw
    tell(explorer, {"type": "solve_size", "kind": "fits", "size": 9_000_000, "context": 512, "cache": "q8"})
    assert explorer.plan.bpw < alone, "the cache takes its share"
    assert explorer.nbytes + measurement.cache.nbytes(512, "q8") <= 9_000_000
    assert explorer.solve(fits="24GiB").bpw == pytest.approx(state(explorer, "_high"), abs=0.05)


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ({"kind": "bytes", "size": 1000}, "bytes is 1000"),
        ({"kind": "weight", "size": 7_000_000}, "expected bytes or fits"),
        ({"kind": "bytes", "size": "7MB"}, "a whole number"),
        ({"kind": "fits", "size": 9_000_000, "context": -1}, "context is -1"),
        ({"kind": "fits", "size": 9_000_000, "cache": "q5"}, "cache is 'q5'|q5"),
    ],
)
def test_a_size_that_cannot_be_is_shown_and_forgotten(explorer, message, match):
    before = explorer.solved
    tell(explorer, {"type": "solve_size", **message})
    assert explorer.status == "error"
    assert re.search(match, explorer.error), explorer.error
    assert explorer.solved == before
    tell(explorer, {"type": "solve", "bpw": 5.0})
    assert (explorer.status, explorer.error) == ("idle", "")


def test_curve_falls(measurement):
    frame = BitrateExplorer(measurement, measured=[(3.0, 0.27)]).to_frame()
    assert frame.predicted_kl.is_monotonic_decreasing
    assert frame.nbytes.is_monotonic_increasing
    assert len(frame) == 25


def test_make_reads_both_and_marks_the_measured_point(measurement, converter):
    original = Original([" the", " original"])
    explorer = BitrateExplorer(measurement, original, bpw=3.0, measured=[(4.0, 0.06)])
    explorer.make().wait()
    assert (explorer.status, explorer.original, explorer.made) == ("done", " the original", " the copy")
    assert explorer.made_bpw == 3.0
    assert state(explorer, "_marks") == [[4.0, 0.06, "4 bpw"], [3.0, 0.25, "3 bpw, made here"]]
    explorer.make().wait()
    assert converter.bpw == [3.0], "a bitrate is made once"
    assert "the original" in explorer._repr_mimebundle_()[0]["text/html"]
    before = Closing.shut
    explorer.close()
    assert Closing.shut == before + 1, "the copy is freed, the original is the caller's"


def test_stop_while_converting(measurement, converter):
    converter.gate = threading.Event()
    explorer = BitrateExplorer(measurement, Original(), bpw=3.0)
    explorer.make()
    with pytest.raises(ConversionError, match="a conversion is running"):
        explorer.make()
    tell(explorer, {"type": "stop"})
    converter.gate.set()
    explorer.wait(10)
    assert explorer.status == "stopped"


def test_a_failure_is_shown_and_raised(measurement, converter):
    converter.problem = ConversionError("the disk is full")
    explorer = BitrateExplorer(measurement, Original())
    tell(explorer, {"type": "make", "bpw": 3.0, "prompt": "<b>It was"})
    with pytest.raises(Exl2Error, match="disk is full"):
        explorer.wait(10)
    assert explorer.status == "error"
    assert "disk is full" in explorer.error


def test_without_an_original_nothing_is_made(measurement, tmp_path):
    measurement.save(tmp_path / "m.json")
    explorer = BitrateExplorer(tmp_path / "m.json")
    assert not state(explorer, "_can_make")
    with pytest.raises(OptionError, match=r"BitrateExplorer\(measurement, llm\)"):
        explorer.make()


@pytest.mark.parametrize("bad", [{"measured": [(1,)]}, {"measured": [(3, -1)]}, {"max_tokens": 0}, {"bqw": 3}])
def test_bad_options(measurement, bad):
    with pytest.raises((OptionError, TypeError)):
        BitrateExplorer(measurement, **bad)


def test_static_twin_and_export(measurement):
    explorer = BitrateExplorer(measurement, prompt="<script>alert(1)</script>")
    explorer.original = explorer.made = "<img src=x>"
    data, _ = explorer._repr_mimebundle_()
    assert "<script" not in data["text/html"]
    assert "<img" not in data["text/html"]
    assert data["text/plain"] == f"BitrateExplorer(4 bpw: {explorer.nbytes / 2**20:.2f} MiB, predicted KL {explorer.predicted_kl:.4g})"
    assert len(explorer.to_html()) < 200_000


def test_a_conversion_with_fewer_tokens_is_expected_to_lose_more(measurement):
    """As measured on the demo model: 1,024 tokens make twice the predicted KL, the tokens of the measurement about what is predicted."""

    def expected(**options):
        explorer = BitrateExplorer(measurement, bpw=3.0, convert=options)
        return explorer.expected_kl / explorer.predicted_kl

    assert expected(rows=8, length=128) == pytest.approx(2.0, abs=0.1)
    assert expected(rows=32, length=512) == expected() == pytest.approx(1.0)
    assert expected(effort="thorough") < 1 < expected(rows=16, length=256) < 1.4


def test_the_twin_without_scripts_shows_the_curve(measurement):
    explorer = BitrateExplorer(measurement, bpw=3.0, measured=[(3.0, 0.26), (4.0, 0.07)])
    page = explorer._repr_mimebundle_()[0]["text/html"]
    assert page.count("<circle") == 3 and "rings: measured" in page
    points = re.search(r'<polyline points="([^"]+)"', page)[1].split()
    heights = [float(point.split(",")[1]) for point in points]
    assert len(points) == len(state(explorer, "_curve")) and heights == sorted(heights), "more bits, less KL: further down"

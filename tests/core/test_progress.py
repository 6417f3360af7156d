import io

import pytest

from exl2nb.core.errors import Interrupted
from exl2nb.core.progress import Forecast, Meter, Phase, Progress, SilentSink, TextSink


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_line_reads_as_plain_text():
    event = Progress(stage="measure", done=3, total=12, unit="layers", detail="model.layers.3", elapsed_s=2.0, eta_s=6.0)
    assert event.line() == "measure: 3/12 layers (2.0 s, 6 s left)  model.layers.3"
    assert event.fraction == 0.25
    assert Progress(stage="load", done=5, unit="tensors").line() == "load: 5 tensors (0.0 s)"
    assert Progress(stage="load", done=5).fraction == 0


def test_meter_counts_and_estimates():
    seen = []
    with Meter("measure", total=4, unit="layers", sink=seen.append) as meter:
        meter.step(detail="a", kl=0.5)
        meter.at(4)
    assert [(e.done, e.state) for e in seen] == [(0, "running"), (1, "running"), (4, "running"), (4, "done")]
    assert seen[1].data == {"kl": 0.5}
    assert seen[1].eta_s == pytest.approx(3 * seen[1].elapsed_s)
    assert seen[2].eta_s == 0
    assert seen[-1].eta_s is None
    assert seen[-1].elapsed_s >= seen[1].elapsed_s


def test_a_forecast_weighs_steps_by_their_cost(monkeypatch):
    """Twelve cheap steps of 0.1 s before twelve of 4 s and another stage: 52 % of the steps are 2 % of the work."""
    clock, seen = [0.0], []
    monkeypatch.setattr("exl2nb.core.progress.time.monotonic", lambda: clock[0])
    phases = [Phase("measure", 12, 0.1, "forward"), Phase("measure", 12, 3.0, "backward"), Phase("write", 2, 1.0)]
    with Meter("measure", total=24, sink=seen.append, forecast=Forecast(phases)) as meter:
        for phase, seconds in (("forward", 0.1), ("backward", 4.0)):
            for _ in range(12):
                clock[0] += seconds
                meter.step(phase=phase)
    half, later, last = seen[12], seen[13], seen[-2]
    assert (half.eta_s, half.work_eta_s) == (pytest.approx(36), pytest.approx(38))
    assert half.fraction == half.work_share == pytest.approx(1.2 / 39.2)
    assert later.eta_s == pytest.approx(44), "what a step took replaces what was expected"
    assert (last.eta_s, last.share) == (0, 1)
    assert last.work_eta_s == pytest.approx(2 * 49.2 / 37.2)
    assert seen[-1].left_s is None


def test_a_forecast_takes_skipped_stages_as_finished():
    forecast = Forecast([Phase("measure", 9, 5.0), Phase("quantize", 4, 1.0)])
    assert (forecast.left_s(), forecast.share()) == (None, 0)
    forecast.took("quantize", 2.0)
    forecast.took("download", 9.0)
    assert (forecast.left_s(), forecast.share()) == (6.0, 0.25)


@pytest.mark.parametrize(("error", "state"), [(KeyboardInterrupt, "cancelled"), (Interrupted, "cancelled"), (ValueError, "error")])
def test_meter_says_how_it_ended_and_lets_the_error_through(error, state):
    seen = []
    with pytest.raises(error), Meter("quantize", total=2, sink=seen.append):
        raise error
    assert seen[-1].state == state


def test_meter_without_sink_is_silent(capsys):
    with Meter("x") as meter:
        meter.step()
    SilentSink()(Progress(stage="x"))
    assert capsys.readouterr() == ("", "")


def test_text_sink_in_a_log_writes_one_line_per_stage():
    out = io.StringIO()
    sink = TextSink(out)
    for stage in ("load", "measure"):
        with Meter(stage, total=100, unit="rows", sink=sink) as meter:
            for _ in range(100):
                meter.step()
    lines = out.getvalue().splitlines()
    assert [line.split(" (")[0] for line in lines] == ["load: 100/100 rows", "measure: 100/100 rows"]


def test_text_sink_on_a_terminal_rewrites_its_line():
    out = Terminal()
    with Meter("load", total=3, unit="rows", sink=TextSink(out)) as meter:
        meter.step(3, detail="a long detail that must be wiped out by the shorter line after it")
    text = out.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert "[####################] load: 3/3 rows" in text
    shown = text.rstrip("\n").split("\r")
    assert len(shown[-1]) >= len(shown[-2].rstrip()) or len(shown) == 2


def test_steps_that_are_known_later():
    forecast = Forecast([Phase("read", 1, 1.0), Phase("tune", 100, 1.0)])
    forecast.took("read", 2.0)
    assert forecast.left_s() == 200
    forecast.expect("tune", 10)
    assert forecast.left_s() == 20

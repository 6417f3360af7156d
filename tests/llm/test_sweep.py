"""Sweeps over bitrates and caches: in one process, in several, on Ray; interrupted, continued, and with workers that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import exl2nb as ex
from exl2nb.core.errors import ConversionError, OptionError
from exl2nb.llm import sweep as sweeps
from tests.converter.test_conversion_job import OPTIONS, TEXT, write_model

RATES, MODES = [3.0, 5.0], ["fp16", "q4"]
ASKED = {"cache": MODES, "text": TEXT[0], "text_rows": 2, "text_length": 64, "progress": None, **OPTIONS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sweep") / "tiny")


@pytest.fixture(scope="module")
def swept(model: Path, tmp_path_factory: pytest.TempPathFactory) -> sweeps.Sweep:
    return ex.sweep(model, RATES, tmp_path_factory.mktemp("swept"), **ASKED)


def numbers(found: sweeps.Sweep) -> list[dict[str, object]]:
    """The rows without their folders."""
    return [{name: value for name, value in row.items() if name != "directory"} for row in found.rows]


def test_every_pair_is_measured(swept: sweeps.Sweep, model: Path) -> None:
    frame = swept.to_frame()
    assert [*zip(frame["bpw"], frame["cache"])] == [(rate, mode) for rate in RATES for mode in MODES]
    assert frame["bytes"][0] < frame["bytes"][2]
    assert frame["kl_mean"][0] > frame["kl_mean"][2] > 0
    assert frame["kl_mean"][3] > frame["kl_mean"][2], "the cache costs something on top"
    row = frame.iloc[2]
    again = ex.compare(model, row["directory"], TEXT[0], rows=2, length=64, cache="fp16", progress=None)
    assert (row["kl_mean"], row["ppl"], row["top1"]) == (again.kl_mean, again.ppl, again.top1)
    assert "same top token" in str(swept)
    assert "<table" in swept._repr_html_()
    assert json.loads(json.dumps(swept.to_dict()))["rows"][0]["bpw"] == 3.0


def test_a_sweep_continues_where_it_was(swept: sweeps.Sweep, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Path(swept.rows[0]["directory"]).parent
    monkeypatch.setattr("exl2nb.llm.functions.convert", lambda *_, **__: pytest.fail("converted again"))
    assert ex.sweep(model, RATES, out, **ASKED).rows == swept.rows
    with pytest.raises(ConversionError, match="was not made by this sweep"):
        ex.sweep(model, RATES, out, **{**ASKED, "seed": 9})


def test_events_count_bitrates(model: Path, swept: sweeps.Sweep) -> None:
    seen = []
    ex.sweep(model, RATES, Path(swept.rows[0]["directory"]).parent, **{**ASKED, "progress": seen.append})
    assert [event.done for event in seen if event.stage == "sweep"][-1] == 2


def test_processes_give_the_same_and_one_may_die(swept: sweeps.Sweep, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Watched(sweeps.SweepProcess):
        def __init__(self, task: sweeps.Task) -> None:
            super().__init__(task)
            started.append(self.popen)
            if len(started) == 1:
                threading.Timer(1.0, self.popen.kill).start()

    monkeypatch.setattr(sweeps, "SweepProcess", Watched)
    assert numbers(ex.sweep(model, RATES, tmp_path, workers=2, **ASKED)) == numbers(swept)
    assert len(started) == 3, "one was started again"
    assert all(process.poll() is not None for process in started)


def test_a_task_that_fails_says_why(model: Path, tmp_path: Path) -> None:
    (tmp_path / "3bpw").mkdir()
    (tmp_path / "3bpw" / "mine.txt").write_text("mine")
    for workers in (1, 2):
        with pytest.raises(ConversionError, match="was not made by this sweep"):
            ex.sweep(model, RATES, tmp_path, workers=workers, **ASKED)
    assert (tmp_path / "3bpw" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"on": "moon"}, "sweep: on is 'moon'"),
        ({"workers": 0}, "sweep: workers is 0"),
        ({"cache": []}, "expected a list of each"),
        ({"cache": "q4"}, "expected a list of each"),
        ({"cache": ["q5"]}, "sweep: .*q5"),
        ({"bpw": [1.0]}, "sweep: bpw is 1"),
        ({"bpw": 4.0}, "expected a list of each"),
        ({"effort": "none"}, "effort"),
        ({"bits": 4}, "bits"),
    ],
)
def test_bad_options_are_named(changes: dict[str, object], message: str, model: Path, tmp_path: Path) -> None:
    asked = {"bpw": RATES, **ASKED, **changes}
    with pytest.raises((OptionError, TypeError), match=message):
        ex.sweep(model, asked.pop("bpw"), tmp_path, **asked)
    assert not any(tmp_path.iterdir())


# ---- Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}},
    )
    yield
    ray.shutdown()


def test_ray_gives_the_same_and_a_worker_may_die(swept: sweeps.Sweep, model: Path, tmp_path: Path, cluster: None) -> None:
    killed = threading.Event()

    def kill_one() -> None:
        while not killed.is_set():
            for found in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    busy = b"ray::_ray_task" in found.read_bytes()
                except OSError:
                    continue
                if busy:
                    os.kill(int(found.parent.name), signal.SIGKILL)
                    killed.set()
                    return
            time.sleep(0.05)

    thread = threading.Thread(target=kill_one)
    thread.start()
    try:
        found = ex.sweep(model, RATES, tmp_path, on="ray", **ASKED)
        died = killed.is_set()
    finally:
        killed.set()
        thread.join()
    assert died, "a worker was killed"
    assert numbers(found) == numbers(swept)


def test_a_failure_on_ray_says_why(model: Path, tmp_path: Path, cluster: None) -> None:
    (tmp_path / "5bpw").mkdir()
    with pytest.raises(ConversionError, match="was not made by this sweep"):
        ex.sweep(model, RATES, tmp_path, on="ray", **ASKED)


def test_without_ray_it_says_what_to_install(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(OptionError, match=r"pip install 'exl2nb\[ray\]'"):
        ex.sweep(model, RATES, tmp_path, on="ray", **ASKED)

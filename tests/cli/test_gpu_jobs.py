"""tools/gpu_jobs.py: which job begins where, and how jobs end."""

import json
import string
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import gpu_jobs
from gpu_jobs import Job, Queue, run


@pytest.fixture
def words(tmp_path):
    return {"python": sys.executable, "models": str(tmp_path / "models with space")}


def queue(gpus, cores, **jobs):
    return Queue(gpus=gpus, cores=cores, jobs=jobs)


def spans(out, name):
    """When a job began and ended, of its log."""
    return [float(word) for word in (out / name / "log").read_text().split()]


CLOCK = "date +%s.%N; sleep {}; date +%s.%N"


def test_timed_jobs_have_a_gpu_for_themselves_and_others_share(tmp_path, words):
    jobs = {name: Job(command=CLOCK.format(0.5), limit_s=30, cores=1) for name in ("a", "b", "c")}
    jobs |= {name: Job(command="echo $CUDA_VISIBLE_DEVICES; sleep 1", limit_s=30, cores=1, timed=False) for name in ("x", "y")}
    rows = run(queue((3, 5), 8, **jobs), ["x", "a", "y", "b", "c"], tmp_path, words, 60)
    assert {row["name"]: row["exit"] for row in rows} == dict.fromkeys("abcxy", 0)
    where = {row["name"]: row["gpus"] for row in rows}
    assert where["x"] == where["y"] == [3]
    assert where["a"] == [5]
    times = sorted(spans(tmp_path, name) for name in "abc" if where[name] == [5])
    assert all(before[1] <= after[0] for before, after in pairwise(times))
    assert json.loads((tmp_path / "jobs.json").read_text()) == rows


def test_jobs_wait_for_cores(tmp_path, words):
    jobs = {name: Job(command=CLOCK.format(0.4), limit_s=30, cores=3) for name in ("a", "b")}
    run(queue((0, 1), 4, **jobs), list(jobs), tmp_path, words, 60)
    (_, first), (second, _) = sorted(spans(tmp_path, name) for name in jobs)
    assert first <= second


def test_a_job_that_asks_for_more_than_there_is_runs_alone(tmp_path, words):
    jobs = {"wide": Job(command="echo $CUDA_VISIBLE_DEVICES", limit_s=30, gpus=0, cores=64), "two": Job(command="true", limit_s=30, gpus=2)}
    rows = run(queue((0,), 4, **jobs), list(jobs), tmp_path, words, 60)
    assert [(row["name"], row["exit"], row["gpus"]) for row in rows] == [("wide", 0, [0]), ("two", 0, [0])]


def test_limits_end_a_job_with_all_that_it_started(tmp_path, words, capsys):
    started = tmp_path / "started"
    jobs = {
        "slow": Job(command=f"(sleep 1000 & echo $! >{started}; wait)", limit_s=6),
        "fails": Job(command="echo why; exit 3", limit_s=30),
    }
    rows = {row["name"]: row for row in run(queue((0,), 4, **jobs), list(jobs), tmp_path, words, 60)}
    assert rows["slow"]["ended"] and rows["slow"]["exit"] != 0
    assert (rows["fails"]["exit"], rows["fails"]["ended"]) == (3, False)
    assert "    why" in capsys.readouterr().out
    status = Path(f"/proc/{int(started.read_text())}/stat")
    deadline = time.monotonic() + 10
    while status.exists() and status.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_what_found_no_time_is_named(tmp_path, words):
    jobs = {"first": Job(command="sleep 30", limit_s=60), "second": Job(command="true", limit_s=60)}
    rows = {row["name"]: row for row in run(queue((0,), 4, **jobs), list(jobs), tmp_path, words, 1)}
    assert rows["first"]["ended"] and rows["second"]["exit"] is None


@pytest.mark.parametrize("name", gpu_jobs.JOBS)
def test_every_command_names_files_that_exist(name):
    command = gpu_jobs.JOBS[name].command
    assert {field for _, field, _, _ in string.Formatter().parse(command) if field} <= {"python", "out", "models", "corpus", "text"}
    scripts = [word for word in command.replace(";", " ").split() if word.startswith(("tools/", "benchmarks/", "tests/"))]
    assert scripts
    assert all((gpu_jobs.ROOT / script).exists() for script in scripts)


def test_jobs_without_their_texts_are_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_jobs, "visible_gpus", lambda: (0,))
    monkeypatch.setattr(gpu_jobs, "JOBS", {"needs": Job(command="cat {corpus}", limit_s=9), "runs": Job(command="true", limit_s=9)})
    monkeypatch.setattr(
        sys, "argv", ["gpu_jobs.py", str(tmp_path), "--only", "needs", "runs", "--models", str(tmp_path / "m"), "--seconds", "30"]
    )
    assert gpu_jobs.main() == 0
    assert "left out, for want of --corpus or --text: needs" in capsys.readouterr().out
    assert [row["name"] for row in json.loads((tmp_path / "jobs.json").read_text())] == ["runs"]

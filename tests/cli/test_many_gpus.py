"""The benchmark of several GPUs, which runs unattended: a part that hangs ends with all that it has started; its order and summary."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def many(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return script("benchmarks/many_gpus.py")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by /proc")
def test_what_a_part_has_started_ends_with_it(many: Any, tmp_path: Path) -> None:
    """Also what has a session of its own and holds the part's output open, as ranks do."""
    asleep = "[sys.executable, '-c', 'import time; time.sleep(300)']"
    child = f"import subprocess, sys, time; print(subprocess.Popen({asleep}, start_new_session=True).pid, flush=True); time.sleep(300)"
    said, mark = tempfile.TemporaryFile(), f"test-{os.getpid()}"  # noqa: SIM115 - closed by finish
    process = subprocess.Popen([sys.executable, "-c", child], stdout=said, stderr=said, env={**os.environ, many.MARK: mark})
    running = many.Running({"part": "test"}, process, said, mark, time.perf_counter())
    while not os.pread(said.fileno(), 100, 0).endswith(b"\n"):
        time.sleep(0.01)
    grandchild = int(os.pread(said.fileno(), 100, 0))
    assert Path(f"/proc/{grandchild}").exists()
    wrong = running.finish(tmp_path / "out", limit=0.0, stall=60.0)
    assert wrong.startswith("no end within 0 s; ") and str(grandchild) in wrong
    assert process.returncode is not None
    state = Path(f"/proc/{grandchild}/stat")
    for _ in range(6000):
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.01)
    raise AssertionError("it goes on")


def test_the_summary_compares_with_one_gpu(many: Any) -> None:
    about = {"part": "decode", "model": "llama2-70b/10:2.55", "context": 1024, "batch": 1, "repeats": True, "read_bytes": 3 * 10**9}
    about["cache_bytes"] = 3 * 10**8
    one = about | {"way": "one", "gpus": 1, "tok_s": 100.0, "step_ms": 10.0, "ids": [1, 2, 3, 4]}
    two = about | {
        "way": "tensor",
        "gpus": 2,
        "tok_s": 160.0,
        "step_ms": 6.25,
        "ids": [1, 2, 7, 4],
        "read_bytes": 15 * 10**8,
        "cache_bytes": 15 * 10**7,
    }
    scores = [
        {"model": about["model"], "way": way, "gpus": n, "score": s, "scored_tokens": 10, "drawn": drawn}
        for way, n, s, drawn in (("one", 1, -30.0, [5, 6, 7]), ("tensor", 2, -30.5, [5, 8, 7]))
    ]
    lines = [
        one,
        two,
        *scores,
        {"read_bytes_s": 3e12},
        *({"gpus": 2, "rows": 1, "kind": kind, "us": us} for kind, us in (("sum", 6.0), ("gather", 4.0))),
    ]
    alone, both = many.summary(lines)
    assert alone["floor_ms"] == 1.1 and "speedup" not in alone
    assert both["speedup"] == 1.6 and (both["same_tokens"], both["of_tokens"]) == (2, 4)
    assert both["floor_ms"] == 0.65 and both["share_in_exchanges"] == 0.016  # ten layers, 10 us each
    assert (both["nats_a_token_apart"], both["same_drawn"]) == (0.05, 1)


def test_parts_are_in_order_of_value(many: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    args = argparse.Namespace(
        shapes=["llama2-70b:2.55", "llama3-8b:4.0"],
        batches=[1, 8, 64],
        contexts=[1024],
        long=[32000],
        ways=["tensor", "layers"],
        tokens=96,
        rounds=2,
        cpu=False,
    )
    parts = [(part["part"], part.get("model", "")[:9], part.get("way"), part.get("gpus")) for part in many.plan_parts(args, [1, 2, 4])]
    first = [("decode", "llama2-70", way, n) for way, n in (("one", 1), ("tensor", 2), ("tensor", 4), ("layers", 2), ("layers", 4))]
    assert parts[:6] == [*first, ("killed", "llama3-8b", "tensor", 4)]
    assert [part[0] for part in parts[6:9]] == ["yardstick", "exchange", "exchange"]
    assert parts[-4:] == [
        *(("long", "llama2-70", way, n) for way, n in (("tensor", 4), ("layers", 4), ("one", 1))),
        ("serve", "llama3-8b", None, None),
    ]

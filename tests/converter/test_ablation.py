"""benchmarks/tuned.py: stages measured one beside the other, nothing twice, and nothing for which there is no time."""

import json

import pytest

from .test_conversion_job import TEXT

pytestmark = pytest.mark.usefixtures("short_second_text")


@pytest.fixture(scope="module")
def bench(script):
    script("benchmarks/convert.py")
    return script("benchmarks/tuned.py")


@pytest.fixture(scope="module")
def words(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablation")
    (folder / "corpus.txt").write_text(TEXT[0])
    (folder / "unseen.txt").write_text(" ".join(f"w{(i * i * 3 + i) % 89}" for i in range(400)))
    sizes = ["--rows", "2", "--length", "16", "--calibration-rows", "8", "--tuning-rows", "16"]
    texts = ["--calibration", str(folder / "corpus.txt"), "--text", str(folder / "unseen.txt")]
    return [str(source), *texts, *sizes, "--bpw", "3", "--json", str(folder / "tuned.json"), "--device", "cpu"], folder


def test_stages_beside_each_other(bench, words, capsys):
    """Two stages; then one more, and what is there is not made again; then what does not fit, which is named."""
    options, folder = words
    table = folder / "table.md"
    assert bench.main([*options, "--stages", "GPTQ", "descent", "--table", str(table), "--work-dir", str(folder / "work")]) == 0
    found = json.loads((folder / "tuned.json").read_text())
    gptq, descent = found["results"]
    assert (gptq["stage"], descent["stage"]) == ("GPTQ", "descent")
    assert gptq["bytes"] == descent["bytes"]
    assert gptq["rows"] == descent["rows"]
    assert gptq["kl"] > 0
    assert gptq["kl"] != descent["kl"]
    assert gptq["choosing_kl"] is None
    assert found["skipped"] == []
    lines = table.read_text().splitlines()
    assert len(lines) == 4
    assert f"{descent['kl'] / gptq['kl']:.3f}" in lines[3]
    assert lines[3] in capsys.readouterr().out

    assert bench.main([*options, "--stages", "GPTQ", "only the text", "--work-dir", str(folder / "work")]) == 0
    after = json.loads((folder / "tuned.json").read_text())["results"]
    assert after[:2] == found["results"]
    assert [one["stage"] for one in after[2:]] == ["only the text"]
    assert after[2]["choosing_kl"] > 0

    assert bench.main([*options, "--stages", "floats", "--seconds", "0"]) == 0
    assert "Skipped: tiny, 3 bits, floats: 0 s left" in capsys.readouterr().out
    last = json.loads((folder / "tuned.json").read_text())
    assert [one["stage"] for one in last["skipped"]] == ["floats"]
    assert last["results"] == after
    assert bench.main([*options, "--bpw", "9", "--stages", "floats"]) == 0
    assert "OptionError: convert: bpw is 9" in capsys.readouterr().out


def test_a_conversion_that_takes_too_long_is_cancelled(bench, words, monkeypatch, capsys):
    options, _ = words
    now = iter([0.0, 0.0, 0.0, *[100.0] * 100_000])
    monkeypatch.setattr(bench, "time", type("Clock", (), {"monotonic": staticmethod(lambda: next(now))}))
    assert bench.main([*options, "--bpw", "4", "--stages", "GPTQ", "--seconds", "50"]) == 0
    assert "cancelled after 50 s" in capsys.readouterr().out

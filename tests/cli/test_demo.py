"""The demo from end to end, with the fixture in the place of a conversion: everything around the converter is real."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from exl2nb.cli import demo
from exl2nb.cli.console import Console
from exl2nb.cli.models import demo_directory
from exl2nb.core.errors import OptionError

FIXTURE = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
SMALL = {"rows": 2, "length": 64, "tokens": 8, "timed_tokens": 8, "passage": 20}


@pytest.fixture
def no_conversion(monkeypatch):
    def copies(options, console):
        made = []
        for bpw in options.bpw:
            target = options.out / f"{bpw:g}bpw"
            shutil.copytree(FIXTURE, target)
            made.append((f"{bpw:g} bpw", target, bpw, 1.0))
        return made

    monkeypatch.setattr(demo, "convert_all", copies)


def test_end_to_end(tmp_path, no_conversion):
    out, err = io.StringIO(), io.StringIO()
    result = demo.run_demo(demo.DemoOptions(bpw=(3.0, 4.0), out=tmp_path / "demo", **SMALL), Console(out=out, err=err))
    assert [entry.name for entry in result.entries] == ["FP16", "4 bpw", "3 bpw"]
    reference, one, other = result.entries
    assert one.kl_mean == other.kl_mean > 0 == reference.kl_mean
    assert one.bytes == sum(path.stat().st_size for path in FIXTURE.glob("*.safetensors"))
    assert 3.9 < one.bpw < 4.1
    assert reference.bpw == 16
    assert one.sample
    assert one.sample in out.getvalue()
    assert len(one.passage_kl) == len(result.passage) == 20
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert f"{one.kl_mean:.4f}" in page
    assert "compare" in err.getvalue()
    json.dumps(result.to_dict())


def test_the_command_in_json(tmp_path, no_conversion, capsys, monkeypatch):
    real = demo.run_demo
    monkeypatch.setattr(demo, "run_demo", lambda options, console: real(replace(options, **SMALL), console))
    from exl2nb.cli import main

    assert main(["demo", "--bpw", "4", "--out", str(tmp_path / "d"), "--json", "--quiet"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in data["entries"]] == ["FP16", "4 bpw"]
    assert Path(data["report"]).is_file()


def test_passage_is_the_text_itself():
    from exl2nb.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(demo_directory())
    text = "The caf\u00e9 was empty; \u65e5 said nothing."
    assert "".join(demo.passage_texts(tokenizer, tokenizer.encode(text))) == text


def test_only_its_own_directory_is_replaced(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    with pytest.raises(OptionError, match="holds other files"):
        demo.prepare(mine)
    assert (mine / "thesis.txt").is_file()
    with pytest.raises(OptionError, match="is a file"):
        demo.prepare(mine / "thesis.txt")
    made = tmp_path / "made"
    demo.prepare(made)
    (made / "4bpw").mkdir()
    (made / "notes.txt").write_text("x")
    demo.prepare(made)
    assert not (made / "4bpw").exists()
    assert (made / "notes.txt").is_file()


@pytest.mark.parametrize(
    ("bpw", "words"), [((1.5,), "from 2 to 8"), ((4.0, 9.0), "from 2 to 8"), ((4.0, 4.0), "twice"), ((), "at least one")]
)
def test_bitrates_are_checked_before_anything_starts(bpw, words):
    with pytest.raises(OptionError, match=words):
        demo.DemoOptions(bpw=bpw)

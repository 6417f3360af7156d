import io
import json

from exl2nb.cli.console import Console, mega, table, to_json, width


def test_columns_line_up():
    text = table(["model", "KL"], [["FP16", "-"], ["caf\u00e9 \u65e5\u672c", "0.1234"]])
    lines = text.splitlines()
    assert lines[0] == "model          KL"
    assert lines[1] == "---------  ------"
    assert lines[2] == "FP16            -"
    assert len({width(line) for line in lines[1:]}) == 1


def test_bytes():
    assert [mega(n) for n in (12, 1500, 7_798_472, 3.2e9)] == ["12 B", "1.50 kB", "7.80 MB", "3.20 GB"]


def test_json_mode_keeps_stdout_clean():
    out, err = io.StringIO(), io.StringIO()
    console = Console(json_mode=True, out=out, err=err)
    console.say("not shown")
    console.result({"a": 1}, "text")
    assert json.loads(out.getvalue()) == {"a": 1}


def test_error_text_cannot_fake_lines():
    err = io.StringIO()
    assert Console(out=io.StringIO(), err=err).fail("X", "first\nsecond\r\x0b third", 2) == 2
    assert err.getvalue() == "exl2nb: first second third\n"


def test_a_terminal_without_the_characters():
    raw = io.BytesIO()
    console = Console(out=io.TextIOWrapper(raw, encoding="ascii"), err=io.StringIO())
    console.write("caf\u00e9\n")
    assert raw.getvalue() == b"caf?\n"
    assert not console.unicode


def test_no_colour_where_nobody_looks():
    console = Console(out=io.StringIO())
    assert not console.colour
    assert console.bold("x") == "x"


def test_json_is_strict():
    assert to_json({"a": [1.5, float("inf")], 3: {"b": float("nan")}}) == '{"a": [1.5, null], "3": {"b": null}}'

"""What happens around a command: help, errors, exit codes, interrupts, and how it writes."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest

import exl2nb
from exl2nb.cli import commands
from exl2nb.cli.console import Console, table, to_json, width
from exl2nb.core import errors
from exl2nb.core.show import size_text


def test_help_of_every_command(cli):
    code, out, _ = cli("--help")
    assert code == 0
    for name in commands.COMMAND_HELP:
        assert f"  {name}" in out
        code, text, _ = cli(name, "--help")
        assert code == 0
        assert "--json" in text


def test_help_loads_nothing_heavy():
    helps = "".join(f"main([{name!r}, '--help']); " for name in commands.COMMAND_HELP)
    code = f"import sys; from exl2nb.cli import main; {helps}print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.splitlines()[-1] == "False"


def test_version(cli):
    assert cli("--version")[:2] == (0, f"exl2nb {exl2nb.__version__}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["eval", "demo"], "--text"),
        (["convert", "a", "b", "--bpw", "many"], "invalid float value: 'many'"),
        (["inspect", "demo", "--josn"], "unrecognized arguments: --josn"),
        (["inspect", "demo", "--js"], "unrecognized arguments: --js"),
    ],
)
def test_usage_errors_are_one_line(cli, words, message):
    code, out, err = cli(*words)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    assert "--help" in err


def test_no_command_shows_help(cli):
    code, out, err = cli()
    assert (code, out) == (2, "")
    assert "COMMAND" in err


def test_error_object(cli):
    code, out, err = cli("inspect", "/no/such/model", "--json")
    assert code == 2
    error = json.loads(out)["error"]
    assert (error["type"], error["exit_code"]) == ("ModelNotFound", 2)
    assert "/no/such/model" in error["message"]
    assert err.startswith("exl2nb: ")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.OptionError("x"), 2),
        (errors.FormatError("x"), 2),
        (errors.ContextOverflow("x"), 2),
        (errors.GenerationError("x"), 1),
        (errors.ConversionError("x"), 1),
        (OSError(28, "No space left on device", "/some/file"), 1),
        (ZeroDivisionError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(cli, monkeypatch, error, code):
    def fail(args, console):
        raise error

    monkeypatch.setattr("exl2nb.cli.inspect.run", fail)
    got, out, err = cli("inspect", "demo")
    assert got == code
    assert out == ""
    assert err.count("\n") == 1
    if isinstance(error, OSError) and not isinstance(error, errors.Exl2Error):
        assert "/some/file: No space left on device" in err


def test_traceback_only_when_asked(cli, monkeypatch):
    monkeypatch.setattr("exl2nb.cli.inspect.run", lambda args, console: 1 / 0)
    assert "Traceback" not in cli("inspect", "demo")[2]
    assert "Traceback" in cli("inspect", "demo", "--traceback")[2]


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m exl2nb.cli inspect demo --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""


def test_ctrl_c_ends_cleanly():
    words = [sys.executable, "-m", "exl2nb.cli", "generate", "demo", "--prompt", "It was", "--max-tokens", "1000", "--quiet"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stdout.read(8).startswith(b"It was"), "generation has begun"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.decode() == "exl2nb: interrupted\n"


# ---- writing


def test_columns_line_up():
    text = table(["model", "KL"], [["FP16", "-"], ["caf\u00e9 \u65e5\u672c", "0.1234"]])
    lines = text.splitlines()
    assert lines[:3] == ["model          KL", "---------  ------", "FP16            -"]
    assert len({width(line) for line in lines[1:]}) == 1


def test_bytes():
    """One unit everywhere: commands, results and widgets."""
    assert [size_text(n) for n in (12, 1536, 7_798_472, 3 << 30)] == ["12 bytes", "1.50 KiB", "7.44 MiB", "3.00 GiB"]


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


def test_ascii_and_no_colour_outside_a_terminal():
    raw = io.BytesIO()
    console = Console(out=io.TextIOWrapper(raw, encoding="ascii"), err=io.StringIO())
    console.write("caf\u00e9\n")
    assert raw.getvalue() == b"caf?\n"
    assert not console.unicode and not console.colour
    assert console.bold("x") == "x"


def test_json_is_strict():
    assert to_json({"a": [1.5, float("inf")], 3: {"b": float("nan")}}) == '{"a": [1.5, null], "3": {"b": null}}'

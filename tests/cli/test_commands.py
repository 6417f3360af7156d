"""What happens around a command: help, errors, exit codes, interrupts."""

import json
import os
import signal
import subprocess
import sys

import pytest

from exl2nb.cli import commands, main
from exl2nb.core import errors


def run(capsys, *words):
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_of_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name in commands.COMMANDS:
        assert f"  {name}" in out
        code, text, _ = run(capsys, name, "--help")
        assert code == 0
        assert "--json" in text


def test_help_loads_nothing_heavy():
    helps = "".join(f"main([{name!r}, '--help']); " for name in commands.COMMANDS)
    code = f"import sys; from exl2nb.cli import main; {helps}print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.splitlines()[-1] == "False"


def test_version(capsys):
    assert run(capsys, "--version")[:2] == (0, "exl2nb 0.1.0\n")


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
def test_usage_errors_are_one_line(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    assert "--help" in err


def test_no_command_shows_help(capsys):
    code, out, err = run(capsys)
    assert (code, out) == (2, "")
    assert "COMMAND" in err


def test_error_object(capsys):
    code, out, err = run(capsys, "inspect", "/no/such/model", "--json")
    assert code == 2
    error = json.loads(out)["error"]
    assert error["type"] == "ModelNotFound"
    assert "/no/such/model" in error["message"]
    assert error["exit_code"] == 2
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
def test_exit_codes(capsys, monkeypatch, error, code):
    def fail(args, console):
        raise error

    monkeypatch.setattr("exl2nb.cli.inspect.run", fail)
    got, out, err = run(capsys, "inspect", "demo")
    assert got == code
    assert out == ""
    assert err.count("\n") == 1
    if isinstance(error, OSError) and not isinstance(error, errors.Exl2Error):
        assert "/some/file: No space left on device" in err


def test_traceback_only_when_asked(capsys, monkeypatch):
    monkeypatch.setattr("exl2nb.cli.inspect.run", lambda args, console: 1 / 0)
    assert "Traceback" not in run(capsys, "inspect", "demo")[2]
    assert "Traceback" in run(capsys, "inspect", "demo", "--traceback")[2]


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

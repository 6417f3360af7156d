import json

import pytest

from exl2nb.cli import main


@pytest.fixture
def cli(capsys):
    """Runs a command: its exit code, what it wrote to stdout and to stderr."""

    def run(*words):
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def cli_json(cli):
    """Runs a command that succeeds and writes nothing but JSON: the value."""

    def run(*words):
        code, out, err = cli(*words, "--json", "--quiet")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


@pytest.fixture
def refused(cli):
    """Runs a command that exits with 2: the message on stderr, without a traceback."""

    def run(*words):
        code, _, err = cli(*words)
        assert code == 2
        assert "Traceback" not in err
        return err

    return run

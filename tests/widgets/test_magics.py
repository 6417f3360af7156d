"""%exl2 and %%ask in a real IPython shell."""

import subprocess
import sys

import pytest

from exl2nb.core.errors import OptionError


@pytest.fixture
def shell(tmp_path, monkeypatch):
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell(config=config)
    shell.run_line_magic("load_ext", "exl2nb")
    yield shell
    shell.run_line_magic("unload_ext", "exl2nb")
    shell.history_manager.end_session()


def run(shell, text):
    """Run a cell as a notebook would; its error is raised."""
    result = shell.run_cell(text)
    if result.error_in_exec is not None:
        raise result.error_in_exec
    return result.result


def test_load_and_ask(shell, capsys):
    run(shell, "%exl2 load demo context=512 cache=q8")
    llm = shell.user_ns["llm"]
    assert (llm.context, llm.engine.spec.mode) == (512, "q8")
    capsys.readouterr()
    run(shell, "%%ask max_tokens=8 temperature=0\nIt was")
    answer = shell.user_ns["answer"]
    assert len(answer.tokens) == 8
    assert capsys.readouterr().out == answer.text + "\n"
    run(shell, "%exl2 set max_tokens=3 temperature=0")
    run(shell, "%%ask --into short seed=5\nIt was")
    assert answer.text.startswith(shell.user_ns["short"].text)
    assert len(shell.user_ns["short"].tokens) == 3
    run(shell, "%exl2")
    assert "max_tokens=3 temperature=0" in capsys.readouterr().out
    run(shell, "%exl2 load demo context=256")
    assert llm.engine.closed, "a second load gives the first one back"
    again = shell.user_ns["llm"]
    run(shell, "%exl2 close")
    assert again.engine.closed
    assert "llm" not in shell.user_ns


def test_a_model_of_the_notebook(shell, llm):
    shell.user_ns["mine"] = llm
    run(shell, "%%ask max_tokens=2 temperature=0\nIt was")
    assert len(shell.user_ns["answer"].tokens) == 2
    shell.user_ns["other"] = Second(llm)
    run(shell, "%%ask --model other max_tokens=2\nIt was")
    assert shell.user_ns["other"].asked == ["It was"]
    run(shell, "%exl2 use other")
    run(shell, "%%ask max_tokens=2\nIt was again\n")
    assert shell.user_ns["other"].asked == ["It was", "It was again"]
    run(shell, "%exl2 close")
    assert not llm.engine.closed, "what the magic did not load is not its to close"
    del shell.user_ns["mine"], shell.user_ns["other"]


class Second:
    def __init__(self, llm):
        self.llm, self.asked = llm, []

    def stream(self, prompt, **options):
        self.asked.append(prompt)
        return self.llm.stream(prompt, **options)


def test_play_shows_the_widget(shell, sent, llm):
    shell.user_ns["llm"] = llm
    run(shell, "%%ask --play max_tokens=4 temperature=0.5\nIt was")
    shell.user_ns["answer"].wait(30)
    assert shell.user_ns["answer"].n_tokens == 4
    del shell.user_ns["llm"]


def test_plan_and_inspect(shell, capsys):
    assert run(shell, "%exl2 plan demo batch=2 free=1000000000").fits
    assert run(shell, "%exl2 inspect demo").layers == 12
    run(shell, "%exl2 help")
    assert "%%ask" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%exl2 fly", "unknown command 'fly'"),
        ("%exl2 load", "the following arguments are required: path"),
        ("%exl2 load demo --fast", "unrecognized arguments: --fast"),
        ("%exl2 load demo context", "'context' is no option"),
        ("%exl2 load demo --into 3", "'3' is not a variable name"),
        ("%exl2 load 'demo", "check the quotes"),
        ("%exl2 use nothing", "holds 'NoneType'"),
        ("%exl2 plan", "expected a model directory"),
        ("%%ask\nIt was", "no model is loaded"),
        ("%%ask --model sys\nIt was", "holds 'NoneType'"),
    ],
)
def test_mistakes_are_one_line(shell, cell, message):
    from IPython.core.error import UsageError

    with pytest.raises(UsageError, match=message):
        run(shell, cell)


def test_wrong_options_are_named(shell, llm):
    with pytest.raises(OptionError, match="temperatur"):
        run(shell, "%exl2 set temperatur=1")
    shell.user_ns["llm"] = llm
    with pytest.raises(OptionError, match="temperatur"):
        run(shell, "%%ask temperatur=1\nIt was")
    del shell.user_ns["llm"]


def test_reloading_changes_nothing(shell):
    from exl2nb.widgets import magics

    first = shell.magics_manager.registry["Exl2Magics"]
    magics.register(shell)
    assert shell.magics_manager.registry["Exl2Magics"] is first
    magics.unregister(shell)
    assert "ask" not in shell.magics_manager.magics["cell"]
    magics.register(shell)


def test_importing_the_package_imports_no_ipython():
    code = "import sys, exl2nb; assert callable(exl2nb.load_ipython_extension); assert 'IPython' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

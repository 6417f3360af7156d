"""`%exl2` and `%%ask`: load a model and ask it in one line each. Made known to IPython by `%load_ext exl2nb`."""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
from dataclasses import fields
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from exl2nb.core.options import check_keywords

ASK_USAGE = "%%ask [--model NAME] [--into NAME] [--chat] [--play] [option=value ...], the prompt in the lines below"
USAGE_TEXT = """\
%exl2                               the current model and its settings
%exl2 load PATH [option=value ...]  load a model directory, hub id or `demo`; --into NAME (default llm) names the variable
%exl2 use NAME                      take a model that a variable holds
%exl2 set option=value ...          settings for every %%ask; `%exl2 set` alone forgets them
%exl2 plan PATH [option=value ...]  what a model will take in memory
%exl2 inspect PATH                  bits per matrix, from the headers alone
%exl2 close                         free the model that %exl2 loaded
%%ask [option=value ...]            continue the text of the cell; the answer is kept as `answer`"""


class _MagicParser(argparse.ArgumentParser):
    """argparse that raises what IPython shows in one line."""

    def __init__(self, prog: str, usage: str) -> None:
        super().__init__(prog=prog, usage=usage, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; usage: {self.usage}")


@magics_class
class Exl2Magics(Magics):
    """State of the two magics in one shell: the current model and the settings of `%exl2 set`."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.settings: dict[str, Any] = {}
        self.model: Any = None
        self._loaded: dict[str, Any] = {}  # variable -> model that `%exl2 load` made and may close

    @property
    def names(self) -> dict[str, Any]:
        """The variables of the notebook."""
        assert self.shell is not None
        return self.shell.user_ns

    @line_magic
    def exl2(self, line: str) -> Any:
        """Load a model and set how it answers; `%exl2 help` lists the commands."""
        words = _words("%exl2", line)
        command, rest = (words[0], words[1:]) if words else ("", [])
        do = {
            "": self._show, "load": self._load, "use": self._use, "set": self._set, "close": self._close, "plan": self._plan,
            "inspect": self._inspect, "help": self._help,
        }.get(command)  # fmt: skip
        if do is None:
            raise UsageError(f"%exl2: unknown command {command[:40]!r}; expected load, use, set, plan, inspect, close or help")
        return do(rest)

    @cell_magic
    def ask(self, line: str, cell: str) -> Any:
        """Continue the text of the cell with the current model, streaming; `%exl2 help` lists the options."""
        parser = _MagicParser("%%ask", ASK_USAGE)
        parser.add_argument("--model")
        parser.add_argument("--into", default="answer")
        parser.add_argument("--chat", action="store_true")
        parser.add_argument("--play", action="store_true")
        parser.add_argument("options", nargs="*")
        found = parser.parse_args(_words("%%ask", line))
        options = {**self.settings, **_options("%%ask", found.options)}
        model, prompt, name = self._model(found.model), cell.rstrip("\n"), _variable("%%ask --into", found.into)
        if not prompt.strip():
            raise UsageError("%%ask: the cell holds no prompt; write it under the %%ask line")
        if found.play:
            if found.chat:
                raise UsageError("%%ask: --play continues a text; expected no --chat with it")
            return self._play(model, prompt, options, name)
        stream = model.chat(prompt, stream=True, **options) if found.chat else model.stream(prompt, **options)
        with stream as chunks:
            for chunk in chunks:
                sys.stdout.write(str(chunk))
                sys.stdout.flush()
        sys.stdout.write("\n")
        self.names[name] = stream.completion
        return None

    def _play(self, model: Any, prompt: str, options: dict[str, Any], name: str) -> Any:
        from exl2nb.widgets.playground import Playground

        self.names[name] = Playground(model, prompt=prompt, **options).start()
        return self.names[name]

    def _model(self, name: str | None) -> Any:
        """The model of variable `name`, else the current one, else the only one that a variable holds."""
        if name is not None:
            model = self.names.get(_variable("%%ask --model", name))
            if not callable(getattr(model, "stream", None)):
                raise UsageError(
                    f"%%ask: variable {name!r} holds {type(model).__name__!r}; expected a loaded model, such as exl2nb.load returns"
                )
            return model
        if self.model is not None:
            return self.model
        from exl2nb.llm.llm import LLM

        held = {id(value): value for key, value in list(self.names.items()) if isinstance(value, LLM) and not key.startswith("_")}
        if len(held) == 1:
            return next(iter(held.values()))
        how = "several variables hold models" if held else "no model is loaded"
        raise UsageError(f"%%ask: {how}; write `%exl2 load demo` or `%exl2 use NAME` first")

    # ---- commands of %exl2

    def _show(self, _: list[str]) -> None:
        sys.stdout.write(f"model: {self.model!r}\n" if self.model is not None else "no model; `%exl2 load demo` loads the packaged one\n")
        settings = " ".join(f"{name}={value!r}" for name, value in self.settings.items())
        sys.stdout.write(f"settings: {settings or 'the defaults'}\n`%exl2 help` lists the commands\n")

    def _help(self, _: list[str]) -> None:
        sys.stdout.write(USAGE_TEXT + "\n")

    def _load(self, words: list[str]) -> Any:
        import exl2nb

        parser = _MagicParser("%exl2 load", "%exl2 load PATH [--into NAME] [option=value ...]")
        parser.add_argument("path")
        parser.add_argument("--into", default="llm")
        parser.add_argument("options", nargs="*")
        found = parser.parse_args(words)
        name, options = _variable("%exl2 load --into", found.into), _options("%exl2 load", found.options)
        before = self._loaded.pop(name, None)
        if before is not None:
            before.close()  # a second run of the cell must not hold two models
        model = exl2nb.demo(**options) if found.path == "demo" else exl2nb.load(found.path, **options)
        self.model = self._loaded[name] = self.names[name] = model
        return model

    def _use(self, words: list[str]) -> Any:
        if len(words) != 1:
            raise UsageError("%exl2 use: expected one name of a variable that holds a model")
        self.model = self._model(words[0])
        return self.model

    def _set(self, words: list[str]) -> None:
        from exl2nb.generator.request import Request
        from exl2nb.sampling.params import SamplingParams

        options = _options("%exl2 set", words)
        known = {field.name for kind in (Request, SamplingParams) for field in fields(kind)} - {"prompt_ids", "sampling", "stream"}
        check_keywords(options, sorted({*known, "schema", "regex", "choice", "grammar"}), where="%exl2 set")
        self.settings = {**self.settings, **options} if options else {}

    def _close(self, _: list[str]) -> None:
        for name, model in self._loaded.items():
            model.close()
            if self.names.get(name) is model:
                del self.names[name]
        if any(model is self.model for model in self._loaded.values()):
            self.model = None
        self._loaded = {}

    def _plan(self, words: list[str]) -> Any:
        import exl2nb

        if not words:
            raise UsageError("%exl2 plan: expected a model directory, hub id or `demo`")
        return exl2nb.plan(_place(words[0]), **_options("%exl2 plan", words[1:]))

    def _inspect(self, words: list[str]) -> Any:
        import exl2nb

        if len(words) != 1:
            raise UsageError("%exl2 inspect: expected one model directory, hub id or `demo`")
        return exl2nb.inspect(_place(words[0]))


def register(shell: Any) -> None:
    """Make the magics known to a shell; a second time changes nothing."""
    if not isinstance(shell.magics_manager.registry.get("Exl2Magics"), Exl2Magics):
        shell.register_magics(Exl2Magics(shell))


def unregister(shell: Any) -> None:
    """Take the magics away and free the model that they loaded."""
    manager = shell.magics_manager
    found = manager.registry.pop("Exl2Magics", None)
    if isinstance(found, Exl2Magics):
        found._close([])
    manager.magics["line"].pop("exl2", None)
    manager.magics["cell"].pop("ask", None)


def _place(path: str) -> str:
    from exl2nb.io.hub import packaged

    return str(packaged(path) or path)


def _words(where: str, line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{where}: {error}; check the quotes") from error


def _variable(where: str, name: str) -> str:
    if not name.isidentifier():
        raise UsageError(f"{where}: {name[:40]!r} is not a variable name")
    return name


def _options(where: str, words: list[str]) -> dict[str, Any]:
    """`temperature=0.7 stop=['.']` as keywords; a value that is no Python literal is a text."""
    found = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"{where}: {word[:60]!r} is no option; write option=value, such as temperature=0.7")
        try:
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            found[name] = text
    return found

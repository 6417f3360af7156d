"""The API pages of the site as Markdown for mkdocstrings, from the public names. tools/site_hooks.py puts them into the site.

Public names load lazily, so each is asked where it is defined. A public name without a docstring is an error.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

PUBLIC = ("exl2nb", "exl2nb.widgets", "exl2nb.sampling", "exl2nb.core.errors")
"""Packages whose `__all__` is public."""
MODULES = {
    "exl2nb.generator.request": "What a request asks for, and what a completion holds.",
    "exl2nb.generator.handle": "A running request: chunks, cancelling, waiting.",
    "exl2nb.llm.conversation": "Conversations with edits and branches.",
    "exl2nb.core.progress": "Progress of loading and converting.",
    "exl2nb.converter.measurement": "Measured options of a model, and allocations.",
    "exl2nb.model.inspection": "What `ex.inspect` returns.",
    "exl2nb.quant.exl2": "EXL2 matrices: read, reconstruct, write.",
}
"""Modules whose classes come back from public calls, with a page of their own each."""
TITLES = {
    "exl2nb": "Load, generate, convert and compare: the names of `import exl2nb as ex`.",
    "exl2nb.widgets": "Widgets: `ex.widgets`.",
    "exl2nb.sampling": "Sampling settings, and what each sampler did: `ex.sampling`.",
    "exl2nb.core.errors": "Errors: `ex.errors`. All derive from `Exl2Error`.",
}


def undocumented(module_name: str) -> list[str]:
    """Public classes and functions of a module that have no docstring; loads the lazy ones on the way."""
    return [f"{module_name}.{name}" for name, value in public(module_name) if callable(value) and not (value.__doc__ or "").strip()]


def public(module_name: str) -> list[tuple[str, Any]]:
    """The public names of a module and what they stand for, modules left out."""
    module = importlib.import_module(module_name)
    found = [(name, getattr(module, name)) for name in getattr(module, "__all__", ())]
    return [(name, value) for name, value in found if not inspect.ismodule(value)]


def defined(module_name: str, name: str, value: Any) -> str:
    """Where a public name is defined: there mkdocstrings finds its docstring."""
    if inspect.isclass(value) or inspect.isfunction(value):
        return f"{value.__module__}.{value.__qualname__}"
    home = getattr(importlib.import_module(module_name), "_PUBLIC", {}).get(name, module_name)
    return f"{home if '.' in home else f'{module_name}.{home}'}.{name}"


def pages() -> dict[str, str]:
    """File name in the folder of the API -> Markdown.

    Raises:
        ValueError: a public name has no docstring; the message lists all of them.
    """
    missing = [name for module in PUBLIC for name in undocumented(module)]
    if missing:
        raise ValueError(f"no docstring: {', '.join(missing)}")
    index = ["# API", "", "Every public name, from its docstring. In a notebook `help(ex.load)` shows the same.", ""]
    made = {}
    for module in (*PUBLIC, *MODULES):
        names = public(module) if module in PUBLIC else []
        title = TITLES.get(module) or MODULES[module]
        index += [f"- [`{module}`]({module}.md) - {title}"]
        index += [
            f"    - [`{name}`]({module}.md#{defined(module, name, value)})" for name, value in names if module != "exl2nb.core.errors"
        ]
        parts = [f"# {module}", "", title, ""]
        if names:
            parts += [line for name, value in names for line in (f"::: {defined(module, name, value)}", "")]
        else:
            parts += [f"::: {module}", "    options:", "      show_root_heading: false", "      show_root_toc_entry: false", ""]
        made[f"{module}.md"] = "\n".join(parts)
    return {"index.md": "\n".join(index) + "\n", **made}

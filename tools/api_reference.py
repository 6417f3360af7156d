"""The API reference as HTML, from the docstrings of the public names, by pdoc.

    python tools/api_reference.py build/api

Public names load lazily, so they are put where pdoc looks for them first. A public name without a docstring is an error.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from pathlib import Path

PUBLIC = ("exl2nb", "exl2nb.widgets", "exl2nb.sampling", "exl2nb.core.errors")
MODULES = ("exl2nb", "exl2nb.core.progress", "exl2nb.generator.request", "exl2nb.generator.handle", "exl2nb.converter.measurement",
           "exl2nb.llm.conversation", "exl2nb.model.inspect", "exl2nb.quant.exl2")  # fmt: skip
"""Modules with pages of their own; those in `PUBLIC` come with the package."""


def undocumented(module_name: str) -> list[str]:
    """Public classes and functions of a module that have no docstring; loads the lazy ones on the way."""
    module = importlib.import_module(module_name)
    missing = []
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        setattr(module, name, value)
        if (inspect.isclass(value) or callable(value)) and not (value.__doc__ or "").strip():
            missing.append(f"{module_name}.{name}")
    return missing


def main() -> int:
    """Exit code 1 where a public name has no docstring."""
    import warnings

    import pdoc

    warnings.filterwarnings("ignore", message="Error parsing type annotation")  # names that only type checkers import
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    missing = [name for module in PUBLIC for name in undocumented(module)]
    if missing:
        print(f"no docstring: {', '.join(missing)}", file=sys.stderr)
        return 1
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*MODULES, output_directory=folder)
    pages = sorted(folder.rglob("*.html"))
    print(f"{folder}: {len(pages)} pages, {sum(p.stat().st_size for p in pages) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""For mkdocstrings: doctests inside docstrings become code blocks. Without this, `>>>` under a heading of its own reads as a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1(?=\S).*|\n\1 +\S.*)*", re.M)


class Doctests(griffe.Extension):
    """Fences each run of lines that begins with `>>>`, up to the next empty line or lesser indentation."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Changes the docstring of one object, as it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", obj.docstring.value)

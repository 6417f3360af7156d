"""The program of every architecture, field by field, against a text in tests/golden.

`EXL2NB_WRITE_GOLDEN=1 pytest tests/model/test_programs.py` writes the text anew; read its diff before it is committed.
"""

import os
from pathlib import Path

import pytest

from exl2nb.model.loader import load_model

from .zoo import ZOO, build, write

GOLDEN = Path(__file__).parents[1] / "golden" / "programs.txt"


def sections(text):
    """Name of an architecture in the zoo -> its program."""
    return dict(part.split("\n", 1) for part in text.split("# ")[1:])


@pytest.mark.parametrize("name", ZOO)
def test_the_program_of_an_architecture_has_not_changed(name, tmp_path):
    _, program = load_model(write(name, build(name), tmp_path)).network_and_program
    known = sections(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("EXL2NB_WRITE_GOLDEN"):
        known[name] = program.dump()
        GOLDEN.write_text("".join(f"# {one}\n{known[one]}" for one in ZOO if one in known))
    assert name in known, f"{name} has no program in {GOLDEN}: write it with EXL2NB_WRITE_GOLDEN=1"
    assert program.dump() == known[name], f"the program of {name} is another one than {GOLDEN} says"

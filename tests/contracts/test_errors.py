"""Every error class is raised by the package and met by a test."""

import inspect
import re
from pathlib import Path

import pytest

from exl2nb.core import errors

ROOT = Path(__file__).parents[2]
CLASSES = [
    name for name, cls in vars(errors).items() if inspect.isclass(cls) and issubclass(cls, errors.Exl2Error) and cls is not errors.Exl2Error
]


def sources(folder: str) -> str:
    return "\n".join(p.read_text() for p in sorted((ROOT / folder).rglob("*.py")) if p.name != "errors.py" and "contracts" not in p.parts)


PACKAGE, TESTS = sources("exl2nb"), sources("tests")


@pytest.mark.parametrize("name", CLASSES)
def test_error_is_raised_somewhere(name):
    # `raise X(...)`, `raise X from`, or handed to something that raises it (a Registry, a helper that builds the message)
    assert re.search(rf"raise (errors\.)?{name}\b|[(,=\[] ?(errors\.)?{name}\b|return {name}\(", PACKAGE), (
        f"nothing raises {name}: delete it or use it"
    )


@pytest.mark.parametrize("name", CLASSES)
def test_error_is_met_by_a_test(name):
    assert re.search(rf"\b{name}\b", TESTS), f"no test meets {name}"


def test_errors_keep_their_builtin_kin():
    """Code that catches ValueError, OSError and the like keeps working."""
    assert issubclass(errors.FormatError, ValueError)
    assert issubclass(errors.OptionError, TypeError) and issubclass(errors.OptionError, ValueError)
    assert issubclass(errors.ModelNotFound, FileNotFoundError)
    assert issubclass(errors.OutOfPages, MemoryError)
    assert all(getattr(errors, name).__doc__ for name in CLASSES)

"""The program's schema is the same in Python and in the compiled library."""

import pytest
import torch

from exl2nb.core.errors import FormatError
from exl2nb.ops.program import SCHEMA, check_schema


def library_schema() -> str:
    return bytes(torch.ops.exl2nb.program_schema(torch.empty(0)).tolist()).decode()


def test_the_library_has_the_same_schema():
    text = library_schema()
    check_schema(text)
    assert {line.split()[0] for line in text.splitlines()} == set(SCHEMA)


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (
            "norm_head 6 norm:address eps:real",
            "norm_head 6 eps:real norm:address",
            "has eps:real in op norm_head where this package has norm:address",
        ),
        ("linear_residual 4", "linear_residual 9", "has 9 in op linear_residual where this package has 4"),
        ("clip:real", "", "has None in op norm_qkv_rope where this package has clip:real"),
    ],
)
def test_a_difference_is_named(ours, theirs, message):
    text = library_schema()
    assert ours in text
    with pytest.raises(FormatError, match=message):
        check_schema(text.replace(ours, theirs))

import pytest
import torch

from exl2nb.core.errors import FormatError
from exl2nb.quant.base import DTYPES, check_dense


@pytest.mark.parametrize("dtype", DTYPES)
def test_good(dtype):
    assert check_dense(torch.ones(8, 16, dtype=dtype), "b.weight", (8, 16)) is None, "it refuses or does nothing"


def test_refusals():
    with pytest.raises(FormatError, match=r"^f: tensor 'b.weight': found shape \(8, 16\), expected \(8, 17\)"):
        check_dense(torch.ones(8, 16), "b.weight", (8, 17), file="f")
    with pytest.raises(FormatError, match=r"'b.weight': found dtype torch.int32, expected float16, bfloat16 or float32"):
        check_dense(torch.ones(8, 16).int(), "b.weight", (8, 16))

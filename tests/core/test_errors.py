import pytest

from exl2nb.core.errors import Exl2Error, FormatError, OptionError


def test_one_root_catches_all():
    with pytest.raises(Exl2Error, match="expected F16"):
        raise FormatError("model.safetensors: tensor x: found F64, expected F16; convert it first")


def test_option_error_is_a_type_error_and_a_value_error():
    assert issubclass(OptionError, TypeError)
    assert issubclass(OptionError, ValueError)

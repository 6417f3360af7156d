import json

import pytest

from exl2nb.core.errors import ConfigError, ModelNotFound
from exl2nb.io.hf_config import LIMIT_BYTES, read_config


def put(directory, value):
    (directory / "config.json").write_text(value if isinstance(value, str) else json.dumps(value))


def test_good(tmp_path):
    put(tmp_path, {"architectures": ["A"], "vocab_size": 4, "head_dim": None, "text_config": {"hidden_size": 3}})
    assert read_config(tmp_path)["vocab_size"] == 4


def test_not_a_model(tmp_path):
    with pytest.raises(ModelNotFound, match="no such directory"):
        read_config(tmp_path / "x")
    with pytest.raises(ModelNotFound, match="it is empty"):
        read_config(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelNotFound, match=r"no config.json \(it has notes.txt\)"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("", "invalid JSON"),
        ("[]", "found a JSON list"),
        ('{"a": 1, "a": 2}', "the key 'a' twice"),
        ('{"a": NaN}', "constant NaN"),
        ('{"a": -Infinity}', "constant -Infinity"),
        ('{"a":' + "[" * 100000, "invalid JSON"),
        ('{"a":' + "9" * 5000 + "}", "invalid JSON"),
        ({}, "architectures is None"),
        ({"architectures": []}, r"architectures is \[\]"),
        ({"architectures": ["A", "B"]}, "exactly one class name"),
        ({"architectures": "A"}, "exactly one class name"),
        ({"architectures": [7]}, "exactly one class name"),
        ({"architectures": ["A"], "hidden_size": "64"}, "hidden_size is '64'; expected a JSON integer"),
        ({"architectures": ["A"], "hidden_size": True}, "hidden_size is 'True'"),
        ({"architectures": ["A"], "tie_word_embeddings": 1}, "expected a JSON boolean"),
        ({"architectures": ["A"], "text_config": []}, "expected a JSON object"),
        ({"architectures": ["A"], "text_config": {"vocab_size": 1.5}}, "vocab_size is '1.5'"),
    ],
)
def test_refusals(tmp_path, value, text):
    put(tmp_path, value)
    with pytest.raises(ConfigError, match=text) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_size_limit(tmp_path):
    (tmp_path / "config.json").write_bytes(b" " * (LIMIT_BYTES + 1))
    with pytest.raises(ConfigError, match="found more than"):
        read_config(tmp_path)

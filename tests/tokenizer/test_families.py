"""Chat formats of families: our rendering against golden texts made by Transformers (families/make_golden.py)."""

import json
from pathlib import Path

import pytest

from exl2nb.core.errors import TokenizerError
from exl2nb.tokenizer.template import render
from exl2nb.tokenizer.tokenizer import Tokenizer

from .makers import byte_level, write

HERE = Path(__file__).parent / "families"
GOLDEN = json.loads((HERE / "golden.json").read_text(encoding="utf-8"))
FAMILIES = sorted({entry["family"] for entry in GOLDEN})


def test_every_family_has_golden_texts():
    assert {path.stem for path in HERE.glob("*.jinja")} == set(FAMILIES)
    assert {entry["family"] for entry in GOLDEN if "error" in entry} == {"mistral", "gemma"}, "other families refuse two users in a row"


@pytest.mark.parametrize("family", FAMILIES)
def test_same_as_golden(family, tmp_path):
    template = (HERE / f"{family}.jinja").read_text(encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    picked = Tokenizer.load(write(tmp_path, byte_level())).templates.pick()
    for entry in (entry for entry in GOLDEN if entry["family"] == family):
        arguments = {"special_tokens": entry["special_tokens"], **entry["options"]}
        if "error" in entry:
            with pytest.raises(TokenizerError, match="alternate"):
                render(entry["messages"], picked, **arguments)
            continue
        assert render(entry["messages"], picked, **arguments) == entry["text"], (entry["talk"], entry["variant"])

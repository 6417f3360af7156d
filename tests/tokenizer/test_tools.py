"""The table of call formats, and the guide that describes it."""

import json
import re
from pathlib import Path

import pytest

from exl2nb.tokenizer.reply import ReplyFormat
from exl2nb.tokenizer.tools import FORMATS, described, taught, tools_of

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "chat.md"
TOOLS = tools_of([{"name": "weather", "description": "The weather"}])


def test_the_guide_names_every_format():
    rows = [line.split("|") for line in GUIDE.read_text(encoding="utf-8").replace("\\|", "¦").splitlines() if line.startswith("|")]
    named = [re.findall(r"`([\w.-]+)`", row[3]) for row in rows if len(row) == 6 and row[1].strip() not in ("family", "---")]
    assert {name for names in named for name in names} == set(FORMATS)
    assert len(named) >= 20


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_can_be_told(name):
    """What we say in words shows the call that we read."""
    form = FORMATS[name]
    text = described(TOOLS, form)
    assert '"description": "The weather"' in text
    assert taught(form) in text
    shown = taught(form).partition("nothing but\n")[2].rpartition("\nwhere NAME")[0]
    reply = ReplyFormat(calls=form, channels=form.layout == "harmony").read_text(shown.replace("{...}", '{"a": 1}'))
    assert [call.name for call in reply.tool_calls] == ["NAME"]


@pytest.mark.parametrize("name", FORMATS)
def test_ids_are_unlike(name):
    form = FORMATS[name]
    assert len({form.new_id("f", number) for number in range(20)}) == 20


def test_a_written_call_is_what_the_arguments_say():
    text = FORMATS["dsml"].written([("f", json.dumps({"a": "x", "b": 1, "c": [True]}))])
    assert 'name="a" string="true">x<' in text
    assert 'name="b" string="false">1<' in text
    assert 'name="c" string="false">[true]<' in text

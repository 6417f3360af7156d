"""Answers on channels, however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2nb.tokenizer.harmony import CLOSING_TEXT, HarmonyParser
from exl2nb.tokenizer.reply import ReplyFormat, collect, think_tags
from exl2nb.tokenizer.tools import FORMATS

THOUGHT = "<|channel|>analysis<|message|>Think < so.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": "<|x"}'
CASES = {
    "final": (THOUGHT + "<|channel|>final<|message|>4 < 5<|return|>", "Think < so.", "4 < 5", []),
    "no reasoning": ("<|channel|>final<|message|>Yes", "", "Yes", []),
    "call": (THOUGHT + CALL + "<|call|>", "Think < so.", "", [("now", {"a": "<|x"})]),
    "two calls": (CALL + "<|end|><|start|>assistant" + CALL + "<|call|>", "", "", [("now", {"a": "<|x"})] * 2),
    "recipient first": (" to=functions.now<|channel|>commentary json<|message|>{}<|call|>", "", "", [("now", {})]),
    "preamble": (
        "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant" + CALL,
        "",
        "Let me look.",
        [("now", {"a": "<|x"})],
    ),
    "preamble and answer": (
        "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant<|channel|>final<|message|>4",
        "",
        "Let me look.\n\n4",
        [],
    ),
    "no format": ("Just words", "", "Just words", []),
    "empty": ("", "", "", []),
    "two thoughts": (THOUGHT + THOUGHT + "<|channel|>final<|message|>x", "Think < so.Think < so.", "x", []),
    "header only": ("<|channel|>fin", "", "", []),
}


def parsed(text, cuts=(), **options):
    parser, found, at = HarmonyParser(lambda name, number: f"{name}{number}", **options), [], 0
    for cut in [*sorted(c for c in cuts if c < len(text)), len(text)]:
        found += parser.feed(text[at:cut])
        at = cut
    return collect([*found, *parser.finish()])


@pytest.mark.parametrize("case", CASES)
@given(cuts=st.lists(st.integers(0, 250), max_size=30))
def test_an_answer_however_it_is_cut(case, cuts):
    text, reasoning, content, calls = CASES[case]
    reply = parsed(text, cuts)
    assert (reply.reasoning, reply.content) == (reasoning, content)
    assert [(call.name, call.parsed) for call in reply.tool_calls] == calls
    assert len({call.id for call in reply.tool_calls}) == len(calls)


def test_a_prompt_that_has_opened_the_reasoning():
    assert parsed("so" + CLOSING_TEXT + "4", thinking=True).message == {"role": "assistant", "content": "4", "reasoning_content": "so"}


def test_the_format_of_a_template_with_channels():
    source = "<|start|><|channel|><|message|>"
    assert think_tags(source) == ("<|channel|>analysis<|message|>", "<|end|>")
    reply = ReplyFormat(calls=FORMATS["harmony"], channels=True, think=think_tags(source))
    assert not reply.plain
    assert reply.read_text(CASES["call"][0]).tool_calls[0].name == "now"
    assert reply.closing == CLOSING_TEXT

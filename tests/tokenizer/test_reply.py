import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2nb.core.errors import OptionError
from exl2nb.tokenizer.reply import ReplyFormat, collect
from exl2nb.tokenizer.template import INSTRUCT_TEMPLATES, render
from exl2nb.tokenizer.tools import FORMATS, tool_format, tools_of

TOOLS = tools_of(
    [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}},
        {"name": "now"},
    ]
)
CALLS = [("weather", {"city": 'a "b" } <c>\n é', "days": 3, "at": {"x": [1, {}]}}), ("now", {})]
THINK = ("<think>", "</think>")


PLAIN_FORMATS = [name for name, form in FORMATS.items() if form.layout != "harmony"]


def written(form, calls):
    """Calls as the family writes them."""
    return form.written([(name, json.dumps(values, ensure_ascii=False)) for name, values in calls])


def parsed(text, cuts=(), **form):
    parser, found, at = ReplyFormat(tools=TOOLS, **form).parser(), [], 0
    for cut in [*sorted(c for c in cuts if c < len(text)), len(text)]:
        found += parser.feed(text[at:cut])
        at = cut
    return collect([*found, *parser.finish()])


@pytest.mark.parametrize("name", PLAIN_FORMATS)
@pytest.mark.parametrize("thinking", [False, True])
@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 400), max_size=30))
def test_calls_of_every_family_however_the_text_is_cut(name, thinking, cuts):
    form = FORMATS[name]
    lead = "Let me look." if form.trigger else ""
    text = ("hm {<tool_call>\n</think>\n\n" if thinking else "") + lead + ("\n" if lead else "") + written(form, CALLS)
    reply = parsed(text, cuts, calls=form, think=THINK if thinking else None, thinking=thinking)
    assert [(call.name, call.parsed) for call in reply.tool_calls] == CALLS
    assert reply.content == lead
    assert reply.reasoning == ("hm {<tool_call>" if thinking else "")
    assert len({call.id for call in reply.tool_calls}) == 2


@pytest.mark.parametrize("name", PLAIN_FORMATS)
@pytest.mark.parametrize("text", ["plain words", "a < b, [x], {y}", "<tool", "", " \n two lines\n", '{"answer": 1}', "```\ncode\n```"])
def test_an_answer_without_calls_stays_as_it_is(name, text):
    assert parsed(text, range(len(text)), calls=FORMATS[name]).content.strip() == text.strip()


@given(text=st.text(alphabet='<>/think{}"[]`ab \n', max_size=60), cuts=st.lists(st.integers(0, 60)))
def test_cuts_never_change_what_is_read(text, cuts):
    for name in ("hermes", "json", "glm"):
        once, cut = (parsed(text, at, calls=FORMATS[name], think=THINK) for at in ((), cuts))
        assert (once.content, once.reasoning, len(once.tool_calls)) == (cut.content, cut.reasoning, len(cut.tool_calls))


def test_what_small_models_write_instead():
    swapped = parsed('<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call> done', calls=FORMATS["hermes"])
    assert (swapped.tool_calls[0].name, swapped.tool_calls[0].parsed, swapped.content) == ("now", {"a": 1}, "done")
    fenced = parsed('```json\n{"name": "now", "parameters": {}}\n```', calls=FORMATS["gemma"])
    assert (fenced.tool_calls[0].name, fenced.content) == ("now", "")
    cut = parsed('<tool_call>\n{"name": "now", "arguments": {"a": ', calls=FORMATS["hermes"])
    assert cut.tool_calls[0].arguments == '{"a": '


def test_arguments_between_tags_are_given_out_one_by_one():
    for name in ("qwen-coder", "glm", "minimax", "dsml"):
        form = FORMATS[name]
        text = written(form, [("weather", {"city": "Oslo", "days": 3})])
        parser = ReplyFormat(tools=TOOLS, calls=form).parser()
        cut = text.index("days")
        first = [delta.text for delta in parser.feed(text[:cut]) if delta.kind == "arguments"]
        assert first == ['{"city": "Oslo"'], name
        rest = [delta.text for delta in [*parser.feed(text[cut:]), *parser.finish()] if delta.kind == "arguments"]
        assert json.loads("".join([*first, *rest])) == {"city": "Oslo", "days": 3}, name


@pytest.mark.parametrize("name", ["qwen-coder", "glm", "seed", "minimax", "dsml"])
def test_a_value_that_is_long_and_full_of_brackets_takes_linear_time(name):
    """Looking for its end again from the beginning with every token took minutes for 10 KB of HTML."""
    value = "<p>x > y</p>\n" * 20_000
    text = written(FORMATS[name], [("weather", {"city": value})])
    reply = parsed(text, range(0, len(text), 40), calls=FORMATS[name])
    assert reply.tool_calls[0].parsed["city"].strip() == value.strip()


@pytest.mark.parametrize("name", ["qwen-coder", "glm", "minimax", "dsml", "gemma-4", "hermes", "kimi"])
def test_a_call_that_was_cut_is_not_complete(name):
    text = written(FORMATS[name], [("weather", {"city": "Oslo and more", "days": 3})])
    for cut in range(text.index("more"), text.index("more") + 4):
        reply = parsed(text[:cut], calls=FORMATS[name])
        assert reply.tool_calls[0].arguments_or_none is None
        assert reply.content == ""


def test_values_between_tags_that_are_odd():
    def value(raw):
        text = f"<tool_call>\n<function=f>\n<parameter=x>\n{raw}\n</parameter>\n</function>\n</tool_call>"
        return parsed(text, calls=FORMATS["qwen-coder"]).tool_calls[0].arguments

    assert value("1e999") == '{"x": 1e999}'
    assert value("12345678901234567.1234") == '{"x": 12345678901234567.1234}'
    assert value("NaN") == '{"x": "NaN"}'
    assert json.loads(value("[" * 3000 + "]" * 3000))["x"].startswith("[[")
    assert value("\ntwo\n\n") == '{"x": "\\ntwo\\n\\n"}'
    glm = parsed("<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>\na\n</arg_value>\n</tool_call>", calls=FORMATS["glm"])
    assert glm.tool_calls[0].parsed == {"x": "\na\n"}


def test_what_models_write_beside_the_arguments():
    with_id = parsed(
        '[TOOL_CALLS][{"name": "now", "arguments": {"a": "}"}, "id": "abc123456"}, {"name": "now", "arguments": {}}] ',
        calls=FORMATS["mistral"],
    )
    assert [call.parsed for call in with_id.tool_calls] == [{"a": "}"}, {}]
    assert with_id.content == ""
    given = parsed('[TOOL_CALLS]now[CALL_ID]abc123456[ARGS]{"a": 1}', calls=FORMATS["mistral-id"])
    assert (given.tool_calls[0].id, given.tool_calls[0].parsed) == ("abc123456", {"a": 1})
    kimi = parsed(written(FORMATS["kimi"], CALLS), calls=FORMATS["kimi"])
    assert [call.id for call in kimi.tool_calls] == ["functions.weather:0", "functions.now:1"]
    bare = parsed('[{"tool_call_id": "0", "tool_name": "now", "parameters": {}}]', calls=FORMATS["cohere-action"])
    assert (bare.tool_calls[0].name, bare.content) == ("now", "")
    typed = parsed(
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter></｜DSML｜invoke>',
        calls=FORMATS["dsml"],
    )
    assert typed.tool_calls[0].parsed == {"a": "1"}


def test_reasoning_that_the_model_opens_itself_and_one_that_never_ends():
    assert parsed("<think>\nso\n</think>\n\nYes.", range(30), think=THINK).message == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "so",
    }
    assert parsed("still going", think=THINK, thinking=True).reasoning == "still going"
    assert parsed("no thought <think>x</think>", think=THINK).content == "no thought <think>x</think>"


def test_tags_that_are_special_tokens_are_read_by_their_id():
    class Token:
        def __init__(self, id, text):
            self.id, self.text = id, text

    form = ReplyFormat(calls=FORMATS["mistral"], tools=TOOLS, special={7: "[TOOL_CALLS]"})
    reply = form.read([Token(1, "Well"), Token(7, ""), Token(2, '[{"name": "now", "arguments": {}}]')])
    assert (reply.content, reply.tool_calls[0].name, len(reply.tool_calls[0].id)) == ("Well", "now", 9)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("<tool_call><arg_key>", "glm"),
        ("<tool_call><function=", "qwen-coder"),
        ("<tool_call>{function-name}<arg_key>", "glm-4.7"),
        ("<seed:tool_call><function=", "seed"),
        ("<minimax:tool_call>", "minimax"),
        ("<｜DSML｜function_calls>", "dsml"),
        ("<｜DSML｜tool_calls>", "dsml-4"),
        ("<function=a></function>", "functionary"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("<|START_ACTION|>", "cohere-action"),
        ("Action: ```json tool_name", "cohere"),
        ("<|tool|>", "phi"),
        ("<|tool_call|>", "granite"),
        ("<TOOLCALL>", "nemotron"),
        ("<tool_calls> <tool_call>", "apriel"),
        ("<|tools_prefix|>", "apertus"),
        ("<|tool_call>call:<tool_call|>", "gemma-4"),
        ("<|start|><|channel|><|message|>", "harmony"),
        ("[TOOL_CALLS] [CALL_ID] [ARGS]", "mistral-id"),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS] [ARGS]", "mistral-args"),
        ("<｜tool▁calls▁begin｜> ```json", "deepseek"),
        ("<｜tool▁calls▁begin｜>", "deepseek-plain"),
        ("<|start_header_id|>", "llama3"),
        ("<start_of_turn>", "gemma"),
        ("anything", "json"),
    ],
)
def test_the_family_follows_from_the_template(template, name):
    assert tool_format(template).name == name


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("look", "expected a list of JSON schemas"),
        ([{"type": "retrieval"}], "of type 'retrieval'"),
        ([{"name": "a b"}], "the name 'a b'"),
        ([{"name": "a", "parameters": []}], r"parameters of 'a' is \[\]"),
        ([{"name": "a"}, {"name": "a"}], "'a' is there twice"),
    ],
)
def test_tools_that_are_none(tools, message):
    with pytest.raises(OptionError, match=message):
        tools_of(tools)


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("chatml", "<s><|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        ("llama2", "<s>[INST] <<SYS>>\nBe.\n<</SYS>>\n\nHi [/INST]"),
        ("mistral", "<s>[INST] Be.\n\nHi [/INST]"),
        ("alpaca", "<s>Be.\n\n### Instruction:\nHi\n\n### Response:\n"),
        ("vicuna", "<s>Be.\n\nUSER: Hi\nASSISTANT:"),
    ],
)
def test_instruct_formats(name, prompt):
    talk = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
    source, special = INSTRUCT_TEMPLATES[name].source, {"bos_token": "<s>", "eos_token": "</s>"}
    assert render(talk, source, special_tokens=special) == prompt
    longer = render([*talk, {"role": "assistant", "content": "Yes"}, talk[1]], source, special_tokens=special)
    assert longer.startswith(prompt)
    assert "Yes" in longer[len(prompt) :]

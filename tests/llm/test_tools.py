import asyncio

import pytest

pytest.importorskip("llguidance")

from exl2nb.core.errors import OptionError

WEATHER = {
    "name": "weather",
    "description": "The weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["city", "days"],
    },
}
KNOWS_TOOLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}\n{% endfor %}{# TAG #}"
)
THINKS = "{{ messages[-1].content }}<think>\n{# </think> #}"


@pytest.mark.parametrize("tag", ["<tool_call>", "<tool_call><arg_key>", "[TOOL_CALLS]", "<|start_header_id|>", "tool"])
def test_a_call_fits_its_schema(llm, tag):
    template = KNOWS_TOOLS.replace("TAG", tag)
    options = {"template": template, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120}
    answer = llm.chat("Weather?", seed=1, **options)
    (call,) = answer.reply.tool_calls
    assert call.name == "weather"
    assert call.parsed["city"] in ("Oslo", "Rome")
    assert 0 <= call.parsed["days"] <= 9
    assert answer.reply.message["tool_calls"][0]["function"]["name"] == "weather"
    with llm.chat("Weather?", seed=1, stream=True, **options) as handle:
        deltas = list(handle.deltas())
    assert [delta.text for delta in deltas if delta.kind == "call"] == ["weather"]
    assert "".join(delta.text for delta in deltas if delta.kind == "arguments") == call.arguments

    async def read():
        handle = llm.chat("Weather?", seed=1, stream=True, **options)
        return "".join([delta.text async for delta in handle.adeltas() if delta.kind == "arguments"])

    assert asyncio.run(read()) == call.arguments


def test_without_tools_an_answer_is_its_text(llm):
    answer = llm.chat("It was", template="{{ messages[0].content }}", max_tokens=4)
    assert answer.reply.content == answer.text
    assert answer.reply.message == {"role": "assistant", "content": answer.text}
    none = llm.chat("It was", template="vicuna", tools=[WEATHER], tool_choice="none", max_tokens=4)
    assert not none.reply.tool_calls


def test_results_go_back_to_the_model(llm):
    talk = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": '{"a": "sunny"}'}}]},
    ]
    assert "sunny" in llm.render_chat(talk, template=KNOWS_TOOLS.replace("TAG", "<tool_call>"))


def test_the_reasoning_is_ended_after_its_budget(llm):
    answer = llm.chat("It was", template=THINKS, reasoning_budget=5, max_tokens=40, seed=1)
    assert answer.text.count("</think>") == 1
    assert len(llm.tokenizer.encode(answer.reply.reasoning, add_special=False)) <= 6
    assert answer.reply.content
    at_once = llm.chat("It was", template=THINKS, reasoning_budget=0, max_tokens=40, seed=1)
    assert at_once.reply.reasoning == ""
    value = llm.chat("It was", template=THINKS, reasoning_budget=5, max_tokens=40, seed=1, schema={"enum": [1, 2]})
    assert value.parsed in (1, 2)
    assert value.reply.content == str(value.parsed)
    unopened = llm.chat(
        "It was", template="{{ messages[-1].content }}{# <think> #}", reasoning_budget=3, max_tokens=12, seed=1, temperature=0
    )
    assert unopened.text == llm.chat("It was", template="{{ messages[-1].content }}", max_tokens=12, temperature=0).text


def test_the_last_message_is_continued(llm):
    talk = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It was "}]
    text = llm.render_chat(talk, template="vicuna", continue_final_message=True)
    assert text.endswith("ASSISTANT: It was ")
    answer = llm.chat(talk, template="vicuna", continue_final_message=True, max_tokens=4, temperature=0)
    ids = llm.tokenizer.encode(text, add_special=False)
    assert answer.text == llm.generate(ids, max_tokens=4, temperature=0, stop=["USER:"]).text


def test_instruct_formats_by_name(llm):
    """Their own stop texts end the answer, beside those of the caller."""
    _, options = llm.chat_request("Hello", {"template": "alpaca", "stop": "x"}, where="chat")
    assert options["stop"] == ["x", "### Instruction:"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [WEATHER], "tool_choice": 5}, "tool_choice is 5"),
        ({"tools": [WEATHER], "tool_choice": "late"}, "tool_choice is 'late'"),
        ({"tool_choice": "required"}, "tool_choice is 'required' and there are no tools"),
        ({"tools": [WEATHER], "schema": {}}, "tools and schema exclude each other"),
        ({"tools": [WEATHER], "parallel_tool_calls": "no"}, "parallel_tool_calls is 'no'"),
        ({"continue_final_message": True}, "the last message is the user's"),
        ({"continue_final_message": 1}, "continue_final_message is 1"),
        ({"reasoning_budget": 5}, "knows no reasoning"),
        ({"template": THINKS, "reasoning_budget": -1}, "reasoning_budget is -1"),
        ({"reply": 5}, "reply is 5"),
    ],
)
def test_refused(llm, options, message):
    with pytest.raises(OptionError, match=message):
        llm.chat("Hello", **{"template": "chatml", **options})
    with pytest.raises(OptionError, match="the assistant's last message out"):
        llm.render_chat([{"role": "assistant", "content": "x"}], template="{{ 1 }}", continue_final_message=True)

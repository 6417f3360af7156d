import json

import pytest

GREEDY = {"temperature": 0, "max_output_tokens": 8}
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
}


def post(client, **body):
    return client.post("/v1/responses", json={"input": "It was", **body})


def fine(response):
    assert response.status_code == 200, response.text
    return response.json()


def test_a_response_is_that_of_the_library(client, llm):
    want = llm.generate("It was\n", temperature=0, max_tokens=8).text.lstrip()
    got = fine(post(client, **GREEDY))
    assert got["output"][0]["content"][0]["text"] == want
    assert (got["status"], got["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert got["usage"]["output_tokens"] == 8
    items = [{"role": "user", "content": [{"type": "input_text", "text": "It was"}]}]
    assert fine(post(client, input=items, **GREEDY))["output"][0]["content"][0]["text"] == want


def test_a_stream(client, events):
    want = fine(post(client, **GREEDY))["output"][0]["content"][0]["text"]
    got = events(post(client, stream=True, **GREEDY))
    assert [one["sequence_number"] for one in got] == list(range(len(got)))
    kinds = [one["type"] for one in got]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert kinds[-1] == "response.incomplete"
    assert "".join(one["delta"] for one in got if one["type"] == "response.output_text.delta") == want
    assert got[-1]["response"]["output"][0]["content"][0]["text"] == want


def test_tools(client, events):
    body = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 80, "temperature": 0}
    (item,) = fine(post(client, **body))["output"]
    assert (item["type"], item["name"]) == ("function_call", "weather")
    assert json.loads(item["arguments"])["city"] in ("Oslo", "Rome")
    got = events(post(client, stream=True, **body))
    done = next(one for one in got if one["type"] == "response.function_call_arguments.done")
    assert "".join(one["delta"] for one in got if one["type"] == "response.function_call_arguments.delta") == done["arguments"]
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "warm"}
    items = [{"role": "user", "content": "?"}, item, output]
    assert fine(post(client, input=items, tools=[TOOL], max_output_tokens=4))["output"]


def test_reasoning_and_schema(client, events):
    body = {"template_options": {"enable_thinking": True}, "reasoning_budget": 4, "max_output_tokens": 60, "seed": 1}
    schema = {"type": "json_schema", "name": "x", "schema": {"enum": [1, 2]}}
    reasoning, message = fine(post(client, text={"format": schema}, **body))["output"]
    assert reasoning["type"] == "reasoning"
    assert message["content"][0]["text"] in ("1", "2")
    kinds = [one["type"] for one in events(post(client, stream=True, **body))]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"previous_response_id": "x"}, "stores nothing"),
        ({"background": True}, "background can only be false"),
        ({"n": 2}, "n can only be 1"),
        ({"input": [{"type": "item_reference"}]}, "'item_reference'"),
        ({"tools": [{"type": "web_search"}]}, "'web_search' is not supported"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ],
)
def test_refused(client, body, words):
    response = post(client, max_output_tokens=4, **body)
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]

import json

import pytest

GREEDY = {"temperature": 0, "max_tokens": 8}
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}}


def post(client, route="messages", **body):
    body.setdefault("messages", [{"role": "user", "content": "It was"}])
    return client.post(f"/v1/{route}", json={"model": "demo_model", **body})


def fine(response):
    assert response.status_code == 200, response.text
    return response.json()


def test_a_message_is_that_of_the_library(client, llm):
    want = llm.generate("It was\n", **GREEDY).text.lstrip()
    got = fine(post(client, **GREEDY))
    assert got["content"] == [{"type": "text", "text": want}]
    assert (got["type"], got["role"], got["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert got["usage"]["output_tokens"] == 8
    stop = want[-3:]
    stopped = fine(post(client, stop_sequences=[stop], **GREEDY))
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
    system = fine(post(client, system=[{"type": "text", "text": "She"}], **GREEDY))
    assert system["usage"]["input_tokens"] + system["usage"]["cache_read_input_tokens"] > 0


def test_a_stream(client, events):
    want = fine(post(client, **GREEDY))["content"][0]["text"]
    got = events(post(client, stream=True, **GREEDY))
    kinds = [one["type"] for one in got]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(one["delta"]["text"] for one in got if one["type"] == "content_block_delta") == want
    assert got[-2]["delta"]["stop_reason"] == "max_tokens"


def test_tools(client, events):
    body = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 80, "temperature": 0}
    got = fine(post(client, **body))
    (block,) = got["content"]
    assert (block["type"], block["name"], got["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert block["input"]["city"] in ("Oslo", "Rome")
    streamed = events(post(client, stream=True, **body))
    (start,) = (one["content_block"] for one in streamed if one["type"] == "content_block_start")
    assert start["name"] == "weather"
    parts = [one["delta"]["partial_json"] for one in streamed if one["type"] == "content_block_delta"]
    assert json.loads("".join(parts))["city"] in ("Oslo", "Rome")
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "?"}]},
        {"role": "assistant", "content": got["content"]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "warm"}]}]},
    ]
    assert fine(post(client, messages=talk, tools=[TOOL], max_tokens=4))["content"]


def test_a_prefilled_answer(client, llm):
    talk = [{"role": "user", "content": "It was"}, {"role": "assistant", "content": "She said that"}]
    want = llm.generate(llm.tokenizer.encode("<s>It was\nShe said that", add_special=False), **GREEDY).text
    assert fine(post(client, messages=talk, **GREEDY))["content"][0]["text"] == want.lstrip()


def test_tokens_are_counted(client, llm):
    count = fine(post(client, "messages/count_tokens"))["input_tokens"]
    assert count == len(llm.tokenizer.encode("<s>It was\n", add_special=False))
    assert fine(post(client, "messages/count_tokens", tools=[TOOL], tool_choice={"type": "any"}))["input_tokens"] > count


@pytest.mark.parametrize(
    ("body", "status", "kind", "words"),
    [
        ({}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 4, "temprature": 1}, 400, "invalid_request_error", "unknown field 'temprature'"),
        ({"max_tokens": 4, "model": "x"}, 404, "not_found_error", "model 'x' is not loaded"),
        ({"max_tokens": 4, "mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers is not supported"),
        ({"max_tokens": 4, "messages": [{"role": "x", "content": "y"}]}, 400, "invalid_request_error", "role is 'x'"),
        ({"max_tokens": 4, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "'image'"),
        ({"max_tokens": 4, "messages": [{"role": "user", "content": "word " * 2000}]}, 400, "invalid_request_error", "the context 1024"),
        ({"max_tokens": 4, "tools": [TOOL], "tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice"),
        ({"max_tokens": 4, "tools": [{"type": "bash_1", "name": "bash"}]}, 400, "invalid_request_error", "'bash_1' is not supported"),
    ],
)
def test_refused(client, body, status, kind, words):
    response = post(client, **body)
    assert response.status_code == status, response.text
    told = response.json()
    assert told["type"] == "error"
    assert told["error"]["type"] == kind
    assert words in told["error"]["message"]

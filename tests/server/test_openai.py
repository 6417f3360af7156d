import base64
import json

import numpy as np
import pytest

GREEDY = {"temperature": 0, "max_tokens": 8}
HELLO = [{"role": "user", "content": "It was"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
    },
}


def post(client, route="chat/completions", **body):
    if route == "chat/completions":
        body.setdefault("messages", HELLO)
    else:
        body.setdefault("prompt", "It was")
    return client.post(f"/v1/{route}", json=body)


def fine(response):
    assert response.status_code == 200, response.text
    return response.json()


def error(response, status=400):
    assert response.status_code == status, response.text
    told = response.json()["error"]
    assert set(told) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    return told


def test_models(client):
    (entry,) = fine(client.get("/v1/models"))["data"]
    assert (entry["id"], entry["object"], entry["max_model_len"]) == ("demo_model", "model", 1024)
    assert fine(client.get("/v1/models/demo_model"))["id"] == "demo_model"
    assert error(client.get("/v1/models/other"), 404)["code"] == "model_not_found"


# ---- completions


def test_a_completion_is_that_of_the_library(client, llm):
    want = llm.generate("It was", **GREEDY)
    got = fine(post(client, "completions", **GREEDY))
    assert got["choices"] == [{"index": 0, "text": want.text, "finish_reason": "length", "logprobs": None}]
    assert got["usage"]["completion_tokens"] == 8
    assert got["usage"]["total_tokens"] == 8 + got["usage"]["prompt_tokens"]
    ids = llm.tokenizer.encode("It was")
    assert fine(post(client, "completions", prompt=ids, **GREEDY))["choices"][0]["text"] == want.text


def test_prompts_and_samples(client, llm):
    got = fine(post(client, "completions", prompt=["It was", "She said"], n=2, seed=3, max_tokens=4))
    want = [one.text for prompt in ("It was", "She said") for one in llm.generate(prompt, n=2, seed=3, max_tokens=4)]
    assert [choice["text"] for choice in got["choices"]] == want
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2, 3]
    assert got["usage"]["completion_tokens"] == 16


def test_completion_logprobs_and_echo(client, llm):
    want = llm.generate("It was", top_logprobs=2, **GREEDY)
    got = fine(post(client, "completions", logprobs=2, **GREEDY))["choices"][0]["logprobs"]
    assert got["tokens"] == [token.text for token in want.tokens]
    assert got["token_logprobs"] == pytest.approx([token.logprob for token in want.tokens], abs=1e-3)
    assert all(len(one) == 2 for one in got["top_logprobs"])
    assert got["text_offset"][1] == len(got["tokens"][0])
    echoed = fine(post(client, "completions", echo=True, logprobs=0, **GREEDY))["choices"][0]
    assert echoed["text"] == "It was" + want.text
    assert "".join(echoed["logprobs"]["tokens"]) == echoed["text"]
    alone = fine(post(client, "completions", echo=True, logprobs=0, max_tokens=0))["choices"][0]
    assert alone["text"] == "It was"
    assert len(alone["logprobs"]["token_logprobs"]) == len(alone["logprobs"]["tokens"])


def test_a_streamed_completion(client, llm, events):
    want = llm.generate("It was", **GREEDY)
    got = events(post(client, "completions", stream=True, stream_options={"include_usage": True}, **GREEDY))
    assert got[-1] == "[DONE]"
    assert "".join(choice["text"] for one in got[:-1] for choice in one["choices"]) == want.text
    assert got[-3]["choices"][0]["finish_reason"] == "length"
    assert got[-2]["usage"]["completion_tokens"] == 8
    assert len({one["id"] for one in got[:-1]}) == 1
    two = events(post(client, "completions", stream=True, n=2, seed=3, max_tokens=4))
    texts = ["", ""]
    for one in two[:-1]:
        for choice in one["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [one.text for one in llm.generate("It was", n=2, seed=3, max_tokens=4)]


def test_samplers_under_everybodys_names(client, llm):
    options = {"seed": 5, "max_tokens": 12}
    for names, mine in [
        ({"rep_pen": 1.3, "repetition_range": -1}, {"repetition_penalty": 1.3}),
        ({"repeat_penalty": 1.3, "repeat_last_n": 64}, {"repetition_penalty": 1.3, "penalty_range": 64}),
        ({"typical": 0.8, "tfs_z": 0.9, "top_k": -1}, {"typical_p": 0.8, "tfs": 0.9}),
        ({"dynatemp_low": 0.5, "dynatemp_high": 1.5, "temperature": 0.7}, {"min_temp": 0.5, "max_temp": 1.5}),
        ({"dynatemp_range": 0.5, "temperature": 1.0}, {"min_temp": 0.5, "max_temp": 1.5}),
        ({"max_temp": 1.0, "min_temp": 1.0, "temperature": 0.8}, {"temperature": 0.8}),
        ({"mirostat": 2, "mirostat_tau": 3.0}, {"mirostat": True, "mirostat_tau": 3.0}),
        ({"mirostat_mode": 0, "mirostat_tau": 3.0}, {}),
        (
            {"dry_multiplier": 0.8, "dry_penalty_last_n": -1, "dry_sequence_breakers": '["a"]'},
            {"dry_multiplier": 0.8, "dry_breakers": ["a"]},
        ),
        ({"logit_bias": {"310": -100}}, {"logit_bias": {310: -100}}),
        ({"custom_token_bans": "310, 311"}, {"banned_tokens": [310, 311]}),
        ({"allowed_token_ids": [310, 311]}, {"allowed_tokens": [310, 311]}),
        ({"ignore_eos": True, "banned_strings": " the"}, {"ignore_eos": True, "banned_strings": [" the"]}),
        ({"negative_prompt": "He", "guidance_scale": 1.5}, {"negative_prompt": "He", "cfg_scale": 1.5}),
        ({"regex": "[a-c]{5}"}, {"regex": "[a-c]{5}"}),
        ({"grammar_string": 'root ::= "a" | "b"'}, {"grammar": 'root ::= "a" | "b"'}),
        ({"json_schema": {"enum": [1, 2]}}, {"schema": {"enum": [1, 2]}}),
        ({"speculative_ngram": True, "stop_sequence": ["."]}, {"stop": ["."], "speculation": "ngram"}),
    ]:
        got = fine(post(client, "completions", **options, **names))["choices"][0]["text"]
        assert got == llm.generate("It was", **options, **mine).text, names


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"temprature": 1}, "unknown field 'temprature'"),
        ({"best_of": 3}, "best_of is not supported"),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"cache_mode": "q4"}, "cache_mode is chosen when the model is loaded"),
        ({"mirostat_mode": 1}, "mirostat_mode is not known"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": "x"}, "top_p"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [99999]}, "ids outside"),
        ({"prompt": [1 << 200]}, "prompt"),
        ({"prompt": "word " * 3000}, "the context 1024"),
        ({"n": 0}, "n: "),
        ({"stream_options": {"x": 1}, "stream": True}, "stream_options.x is not known"),
        ({"stream": True, "echo": True}, "echo and stream"),
        ({"response_format": {"type": "xml"}}, "type 'xml' is not known"),
        ({"response_format": {"type": "json_schema"}}, "there is no schema"),
        ({"json_schema": {"type": "x"}}, "schema"),
        ({"regex": "("}, "regex cannot be used"),
        ({"logit_bias": {"a": 1}}, "logit_bias: expected token ids"),
        ({"skip_special_tokens": False}, "skip_special_tokens can only be true"),
        ({"cfg_scale": 2}, "needs a negative_prompt"),
        ({"preset": "x"}, "preset 'x' is not known"),
        ({"min_tokens": 9, "max_tokens": 2}, "min_tokens is 9"),
    ],
)
def test_refused_completions(client, body, words):
    assert words in error(post(client, "completions", **{"max_tokens": 4, **body}))["message"]


def test_another_model_is_not_the_loaded_one(client):
    assert error(post(client, "completions", model="gpt-9"), 404)["code"] == "model_not_found"
    assert fine(post(client, "completions", model="demo_model", max_tokens=1))["model"] == "demo_model"


# ---- chat


def test_a_chat_is_that_of_the_library(client, llm):
    want = llm.generate("It was\n", **GREEDY)
    got = fine(post(client, **GREEDY))["choices"][0]
    assert got["message"] == {"role": "assistant", "content": want.text.lstrip(), "refusal": None}
    assert got["finish_reason"] == "length"
    stopped = fine(post(client, stop=want.text.strip()[-3:], **GREEDY))["choices"][0]
    assert stopped["finish_reason"] == "stop"


def test_a_streamed_chat(client, events):
    want = fine(post(client, **GREEDY))["choices"][0]["message"]["content"]
    got = events(post(client, stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=2, **GREEDY))
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in got[:-2] if one["choices"]) == want
    assert got[-3]["choices"][0]["finish_reason"] == "length"
    assert got[-2]["usage"]["completion_tokens"] == 8
    found = [token for one in got[:-2] for token in ((one["choices"][0]["logprobs"] or {}).get("content") or [])]
    assert len(found) == 8
    assert all(len(token["top_logprobs"]) == 2 for token in found)


def test_equal_beginnings_are_shared(client):
    long = [{"role": "user", "content": "It was a dark night and the old man went home. " * 30}]
    fine(post(client, messages=long, max_tokens=2))
    assert fine(post(client, messages=long, max_tokens=2))["usage"]["prompt_tokens_details"]["cached_tokens"] > 256


def test_response_format(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    given = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    content = fine(post(client, response_format=given, max_tokens=60, reasoning_budget=0))["choices"][0]["message"]["content"]
    assert json.loads(content)["a"] in (1, 2)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tools(client, events, choice):
    body = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "seed": 1, "max_tokens": 80}
    got = fine(post(client, **body))["choices"][0]
    (call,) = got["message"]["tool_calls"]
    assert got["finish_reason"] == "tool_calls"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    streamed = [one["choices"][0] for one in events(post(client, stream=True, **body))[:-1]]
    parts = [delta for one in streamed for delta in one["delta"].get("tool_calls", [])]
    assert parts[0]["function"]["name"] == "weather"
    assert parts[0]["id"]
    assert "".join(part["function"]["arguments"] for part in parts) == call["function"]["arguments"]
    assert streamed[-1]["finish_reason"] == "tool_calls"
    again = [*HELLO, got["message"], {"role": "tool", "tool_call_id": call["id"], "content": "warm"}]
    assert fine(post(client, messages=again, tools=[TOOL], max_tokens=4))["choices"]
    none = fine(post(client, tools=[TOOL], tool_choice="none", max_tokens=4))["choices"][0]["message"]
    assert "tool_calls" not in none


def test_reasoning(client, events):
    body = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_budget": 4, "max_tokens": 24, "seed": 1}
    message = fine(post(client, **body))["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"]
    assert "think" not in message["content"]
    streamed = [one["choices"][0]["delta"] for one in events(post(client, stream=True, **body))[:-1]]
    assert "".join(one.get("reasoning_content", "") for one in streamed).rstrip() == message["reasoning_content"]
    assert "".join(one.get("content", "") for one in streamed) == message["content"]


def test_a_turn_is_continued(client, llm):
    talk = [*HELLO, {"role": "assistant", "content": "She said that"}]
    ids = llm.tokenizer.encode("<s>It was\nShe said that", add_special=False)
    want = llm.generate(ids, **GREEDY).text
    assert fine(post(client, messages=talk, continue_final_message=True, **GREEDY))["choices"][0]["message"]["content"] == want.lstrip()
    assert fine(post(client, response_prefix="She said that", **GREEDY))["choices"][0]["message"]["content"] == want.lstrip()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "part of type 'image_url'"),
        ({"functions": []}, "functions is not supported; give tools"),
        ({"tool_choice": "required"}, "tool_choice is given without tools"),
        ({"tools": [TOOL], "tool_choice": "late"}, "tool_choice is 'late'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "the name 'a b'"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "tools and schema exclude each other"),
        ({"modalities": ["audio"]}, 'can only be ["text"]'),
        ({"template": "nothing"}, "template 'nothing' is not known"),
        ({"template": "{{ x"}, "not valid Jinja"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True}, "the last message is the user's"),
    ],
)
def test_refused_chats(client, body, words):
    assert words in error(post(client, **{"max_tokens": 4, **body}))["message"]


# ---- embeddings


def test_embeddings(client, llm):
    got = fine(client.post("/v1/embeddings", json={"input": ["It was late.", "She said no."]}))
    first, second = (np.array(one["embedding"]) for one in got["data"])
    assert len(first) == llm.config.hidden_size
    assert np.linalg.norm(first) == pytest.approx(1, abs=1e-5)
    assert not np.allclose(first, second)
    hidden = llm.hidden("It was late.", f"layers.{llm.config.num_layers - 1}.output")
    mean = next(iter(hidden.values())).mean(0).numpy()
    assert np.allclose(first, mean / np.linalg.norm(mean), atol=1e-5)
    coded = fine(client.post("/v1/embeddings", json={"input": "It was late.", "encoding_format": "base64"}))["data"][0]["embedding"]
    assert np.allclose(np.frombuffer(base64.b64decode(coded), "<f4"), first)
    assert "dimensions" in error(client.post("/v1/embeddings", json={"input": "x", "dimensions": 3}))["message"]
    assert "input" in error(client.post("/v1/embeddings", json={"input": [5, 1 << 80]}))["message"]

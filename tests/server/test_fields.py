"""Values that the specifications of OpenAI and Anthropic allow, field by field, on every route that has the field."""

import json
import typing

import pytest

USER = [{"role": "user", "content": "It was"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CUT = "It was\ud83d"  # the first half of an emoji
TALK = [*USER, {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "function_call": None, "audio": None}, *USER]
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
LIMIT = {"max_tokens": 2}
ROUTES = {
    "completions": {"prompt": "It was", **LIMIT},
    "chat/completions": {"messages": USER, **LIMIT},
    "responses": {"input": "It was", "max_output_tokens": 2},
    "embeddings": {"input": "It was"},
    "messages": {"model": "demo_model", "messages": USER, **LIMIT},
    "messages/count_tokens": {"model": "demo_model", "messages": USER},
}
NULLS = {
    "completions": "best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop stream"
    " stream_options suffix temperature top_p user",
    "chat/completions": "audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens metadata"
    " modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_options"
    " prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream stream_options"
    " temperature tool_choice tools top_logprobs top_p user verbosity web_search_options",
    "responses": "background context_management conversation include instructions max_output_tokens max_tool_calls metadata model"
    " parallel_tool_calls previous_response_id prompt prompt_cache_key reasoning safety_identifier service_tier store stream"
    " stream_options temperature text tool_choice tools top_logprobs top_p truncation user",
    "embeddings": "dimensions encoding_format model user",
    "messages": "cache_control container context_management mcp_servers metadata output_config service_tier speed stop_sequences stream"
    " system temperature thinking tool_choice tools top_k top_p",
    "messages/count_tokens": "cache_control output_config system thinking tool_choice tools",
}
SAMPLING = [
    *({"temperature": one} for one in (0, 1)),
    *({"top_p": one} for one in (0, 0.0, 1)),
    *({"metadata": one} for one in ({}, {"user_id": None})),
    {"service_tier": "auto"},
    {"stream": False},
]
OPENAI = [
    *SAMPLING,
    {"temperature": 2},
    *({name: one} for name in ("presence_penalty", "frequency_penalty") for one in (-2, 0, 2)),
    {"n": 1},
    *({"stop": one} for one in ("", [], ["a", "b", "c", "d"], CUT, [CUT])),
    *({"logit_bias": one} for one in ({}, {"310": -100}, {"310": 100})),
    *({"seed": one} for one in (-(2**63), -5, -1, 0, 2**63 - 1)),
    *({name: "x"} for name in ("user", "safety_identifier", "prompt_cache_key")),
    *({"store": one} for one in (True, False)),
    *({"stream_options": one} for one in ({}, {"include_usage": None}, {"include_usage": False, "include_obfuscation": False})),
    *({"response_format": one} for one in ({"type": "text"}, {"type": "json_object"})),
    {"max_tokens": None, "max_completion_tokens": 2},
]
CHAT = [
    *({"logprobs": one} for one in (0, False, True)),
    *({"logprobs": True, "top_logprobs": one} for one in (0, 20)),
    *({"tools": [], "tool_choice": one} for one in (None, "none", "auto")),
    {"tools": [TOOL], "tool_choice": None, "parallel_tool_calls": None},
    {"tools": [{"type": "function", "function": {"name": "f", "description": None, "parameters": None, "strict": None}}]},
    {
        "tools": [
            {"type": "function", "function": {"name": "f", "description": CUT, "parameters": {"type": "object", "properties": {CUT: {}}}}}
        ]
    },
    {"modalities": ["text"]},
    *({"reasoning_effort": one} for one in ("none", "minimal", "low", "medium", "high", "xhigh")),
    *({"verbosity": one} for one in ("low", "medium", "high")),
    {"prediction": {"type": "content", "content": "It was late."}},
    {"prompt_cache_retention": "24h"},
    *({"messages": one} for one in (TALK, [*USER, CALLED, {"role": "tool", "tool_call_id": "c", "content": CUT}])),
    *({"messages": [{"role": "user", "content": one, "name": None}]} for one in (CUT, [{"type": "text", "text": CUT}], "")),
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": None, "schema": {"type": "integer"}}}},
]
VALUES = {
    "completions": [
        *OPENAI,
        *({"prompt": one} for one in ("", [""], ["a", "b"], [310], [[310], [311]], CUT, [CUT])),
        *({"logprobs": one} for one in (False, 0, 5)),
        *({"max_tokens": 0, "echo": one} for one in (None, False, True)),
        {"max_tokens": 0, "stream": True},
        {"echo": True, "prompt": CUT},
        {"best_of": 1},
        {"best_of": 2, "n": 2},
        {"suffix": ""},
    ],
    "chat/completions": [*OPENAI, *CHAT],
    "responses": [
        *SAMPLING,
        {"temperature": 2},
        *({"text": one} for one in ({}, {"format": None}, {"format": {"type": "text"}, "verbosity": None}, {"verbosity": "low"})),
        *({"reasoning": one} for one in ({}, {"effort": None, "summary": None}, {"effort": "none", "summary": "auto"})),
        *({"truncation": one} for one in ("disabled", "auto")),
        *({"tools": [], "tool_choice": one} for one in (None, "none", "auto")),
        {"tools": [{"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}]},
        {"background": False, "store": True, "include": [], "top_logprobs": 0},
        *({"instructions": one} for one in ("", CUT)),
        *({"input": one} for one in (CUT, [{"role": "user", "content": CUT}], [{"type": None, "role": "user", "content": "a"}])),
        {"input": [*USER, {"type": "function_call", "id": None, "call_id": "c", "name": "f", "arguments": "{}", "status": None}]},
    ],
    "embeddings": [{"input": CUT}, {"input": [CUT]}],
    "messages": [
        *SAMPLING,
        *({"top_k": one} for one in (0, 1)),
        {"stop_sequences": []},
        *({"system": one} for one in ("", [], CUT)),
        *({"messages": [{"role": "user", "content": one}]} for one in (CUT, [{"type": "text", "text": CUT, "cache_control": None}])),
        {"tools": [], "tool_choice": {"type": "auto"}},
        {"tools": [{"name": "f", "type": None, "input_schema": {"type": "object", "properties": None, "required": None}}]},
        *({"thinking": {"type": one}} for one in ("disabled", "adaptive")),
        *({"output_config": one} for one in ({}, {"effort": None, "format": None}, {"effort": "low"})),
    ],
}


def post(client, route, body):
    return client.post(f"/v1/{route}", content=json.dumps({**ROUTES[route], **body}), headers={"content-type": "application/json"})


@pytest.mark.parametrize(("route", "field"), [(route, name) for route, names in NULLS.items() for name in names.split()])
def test_null_means_the_default(client, route, field):
    response = post(client, route, {field: None})
    assert response.status_code == 200, response.text
    if field in ("stream", "n", "stream_options"):
        assert response.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize(
    ("route", "module", "name"),
    [
        ("completions", "openai.types.completion_create_params", "CompletionCreateParamsBase"),
        ("chat/completions", "openai.types.chat.completion_create_params", "CompletionCreateParamsBase"),
        ("responses", "openai.types.responses.response_create_params", "ResponseCreateParamsBase"),
        ("embeddings", "openai.types.embedding_create_params", "EmbeddingCreateParams"),
        ("messages", "anthropic.types.message_create_params", "MessageCreateParamsBase"),
        ("messages/count_tokens", "anthropic.types.message_count_tokens_params", "MessageCountTokensParams"),
    ],
)
def test_everything_that_the_clients_declare_may_be_null_at_once(client, route, module, name):
    params = getattr(pytest.importorskip(module), name)
    hints = typing.get_type_hints(params)
    response = post(client, route, dict.fromkeys(hints.keys() - ROUTES[route].keys()))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("route", "body"), [(route, body) for route, bodies in VALUES.items() for body in bodies], ids=repr)
def test_values_at_the_ends_of_what_is_allowed(client, route, body):
    response = post(client, route, body)
    assert response.status_code == 200, response.text


def test_top_p_zero_keeps_the_most_probable_token(client, llm):
    want = llm.generate("It was", temperature=0, max_tokens=8).text
    assert post(client, "completions", {"top_p": 0, "max_tokens": 8}).json()["choices"][0]["text"] == want
    best = post(client, "messages", {"temperature": 0, "max_tokens": 8}).json()["content"]
    assert post(client, "messages", {"top_p": 0, "max_tokens": 8}).json()["content"] == best


def test_max_tokens_zero(client, events):
    got = post(client, "completions", {"max_tokens": 0, "n": 2, "prompt": ["a", "b"]}).json()
    assert [(one["index"], one["text"], one["finish_reason"]) for one in got["choices"]] == [(i, "", "length") for i in range(4)]
    assert got["usage"]["completion_tokens"] == 0
    assert events(post(client, "completions", {"max_tokens": 0, "stream": True}))[-1] == "[DONE]"


def test_negative_seeds_are_seeds_of_their_own(client):
    first, second, other = (post(client, "completions", {"seed": seed, "max_tokens": 8}).json()["choices"] for seed in (-5, -5, -6))
    assert first == second != other


def test_a_lone_surrogate_is_what_the_tokenizer_makes_of_it(client, llm):
    want = llm.generate(CUT, temperature=0, max_tokens=8).text
    assert post(client, "completions", {"prompt": CUT, "temperature": 0, "max_tokens": 8}).json()["choices"][0]["text"] == want


@pytest.mark.parametrize("body", [{"output_config": {"format": {"type": "json_schema", "schema": {"enum": [1, 2]}}}, "max_tokens": 8}])
def test_a_schema_in_anthropics_shape(client, body):
    assert post(client, "messages", body).json()["content"][0]["text"] in ("1", "2")
    assert post(client, "messages", {"output_config": {"format": {"type": "xml"}}}).status_code == 400


def test_what_is_refused_is_refused_with_its_field(client):
    for route, body, word in [
        ("completions", {"best_of": 3}, "best_of"),
        ("completions", {"temprature": 0}, "temprature"),
        ("responses", {"truncation": "x"}, "truncation"),
        ("messages", {"top_p": -1}, "top_p"),
        ("chat/completions", {"web_search_options": {}}, "web_search_options"),
        ("chat/completions", {"messages": json.loads("[" * 400 + "]" * 400)}, "message"),
    ]:
        response = post(client, route, body)
        assert response.status_code == 400, response.text
        assert word in response.json()["error"]["message"]


def test_the_document_says_what_may_be_null(client):
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    assert {"type": "null"} in schemas["ChatBody"]["properties"]["stream"]["anyOf"]
    assert {"type": "null"} in schemas["CompletionBody"]["properties"]["n"]["anyOf"]
    assert "anyOf" not in schemas["MessagesBody"]["properties"]["model"]

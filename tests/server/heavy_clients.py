"""Each client in turn against a server whose URL is the argument; raises at the first fault.

Runs in an environment with langchain-openai, litellm and smolagents.
"""

import json
import os
import sys
from typing import ClassVar

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing is fetched
os.environ.setdefault("LITELLM_TELEMETRY", "False")
os.environ.setdefault("LANGCHAIN_TRACING_V2", "false")
MODEL, KEY = "demo_model", "none"


def refusal(call):
    """The text of the error that a call ends with."""
    try:
        call()
    except Exception as error:
        return str(error)
    raise AssertionError("the call was taken")


def langchain(url):
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings
    from pydantic import BaseModel, Field

    class Weather(BaseModel):
        """The weather of a city."""

        days: int = Field(ge=1, le=9)

    chat = ChatOpenAI(model=MODEL, base_url=url + "/v1", api_key=KEY, max_tokens=60, temperature=0, max_retries=0)
    whole = chat.invoke("It was")
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(part.content for part in chat.stream("It was")) == whole.content
    called = chat.bind_tools([Weather], tool_choice="required", parallel_tool_calls=False).invoke("It was")
    assert 1 <= called.tool_calls[0]["args"]["days"] <= 9, called
    assert 1 <= chat.with_structured_output(Weather, method="json_schema").invoke("It was").days <= 9
    assert len(OpenAIEmbeddings(model=MODEL, base_url=url + "/v1", api_key=KEY, check_embedding_ctx_length=False).embed_query("x")) > 8
    assert "unknown field 'nonsense'" in refusal(lambda: chat.invoke("It was", extra_body={"nonsense": 1}))


def litellm_client(url):
    import litellm

    litellm.telemetry = False
    given = {
        "model": f"openai/{MODEL}",
        "api_base": url + "/v1",
        "api_key": KEY,
        "max_tokens": 12,
        "messages": [{"role": "user", "content": "It was"}],
    }
    whole = litellm.completion(temperature=0, **given).choices[0].message.content
    assert whole
    stream = litellm.completion(temperature=0, stream=True, **given)
    assert "".join(part.choices[0].delta.content or "" for part in stream) == whole
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}},
    }
    called = litellm.completion(tools=[tool], tool_choice="required", **{**given, "max_tokens": 60})
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments)["a"] in (1, 2)
    anthropic = litellm.completion(**{**given, "model": f"anthropic/{MODEL}", "api_base": url})
    assert anthropic.choices[0].message.content
    assert "is not loaded" in refusal(lambda: litellm.completion(**{**given, "model": "openai/other"}))


def smolagents_client(url):
    from smolagents import OpenAIServerModel, Tool

    class Add(Tool):
        name, description, output_type = "add", "Adds one.", "boolean"
        inputs: ClassVar = {"a": {"type": "boolean", "description": "whether to"}}

        def forward(self, a):
            return not a

    model = OpenAIServerModel(model_id=MODEL, api_base=url + "/v1", api_key=KEY, max_tokens=60)
    message = [{"role": "user", "content": [{"type": "text", "text": "It was"}]}]
    assert model.generate(message).content
    assert "".join(part.content or "" for part in model.generate_stream(message))
    called = model.generate(message, tools_to_call_from=[Add()])
    call = called.tool_calls[0]
    arguments = call.function.arguments
    assert call.function.name == "add"
    assert isinstance((json.loads(arguments) if isinstance(arguments, str) else arguments)["a"], bool)


if __name__ == "__main__":
    for client in (langchain, litellm_client, smolagents_client):
        client(sys.argv[1])
        print(client.__name__, "fine")

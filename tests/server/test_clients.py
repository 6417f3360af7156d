"""The clients that people use, as they come from the package index."""

import asyncio
import json

import pytest

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
    },
}
HELLO = [{"role": "user", "content": "It was"}]


def test_openai(server, llm):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    assert [one.id for one in client.models.list()] == ["demo_model"]
    done = client.chat.completions.create(model="demo_model", messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2)
    assert len(done.choices[0].logprobs.content) == 6
    stream = client.chat.completions.create(model="demo_model", messages=HELLO, max_tokens=6, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == done.choices[0].message.content
    called = client.chat.completions.create(model="demo_model", messages=HELLO, tools=[TOOL], tool_choice="required", max_tokens=80, seed=1)
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments)["city"] in ("Oslo", "Rome")
    assert client.completions.create(model="demo_model", prompt="It was", max_tokens=3).usage.completion_tokens == 3
    assert len(client.embeddings.create(model="demo_model", input="It was").data[0].embedding) == llm.config.hidden_size
    response = client.responses.create(model="demo_model", input="It was", max_output_tokens=6, temperature=0)
    assert response.output_text == done.choices[0].message.content
    with client.responses.stream(model="demo_model", input="It was", max_output_tokens=6, temperature=0) as events:
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(texts) == response.output_text
    pydantic = pytest.importorskip("pydantic")

    class Answer(pydantic.BaseModel):
        value: int = pydantic.Field(ge=1, le=9)

    parsed = client.chat.completions.parse(model="demo_model", messages=HELLO, response_format=Answer, max_tokens=80)
    assert 1 <= parsed.choices[0].message.parsed.value <= 9
    with pytest.raises(openai.BadRequestError, match="unknown field 'nonsense'"):
        client.chat.completions.create(model="demo_model", messages=HELLO, extra_body={"nonsense": 1})
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)

    async def cancelled():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as other:
            stream = await other.chat.completions.create(model="demo_model", messages=HELLO, max_tokens=900, stream=True)
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(cancelled())
    assert llm.engine.wait_idle(10)


def test_anthropic(server, llm):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    greedy = {"temperature": 0}  # the newest clients have no argument of this name
    done = client.messages.create(model="demo_model", messages=HELLO, max_tokens=6, extra_body=greedy)
    with client.messages.stream(model="demo_model", messages=HELLO, max_tokens=6, extra_body=greedy) as stream:
        assert "".join(stream.text_stream) == done.content[0].text
        assert stream.get_final_message().usage.output_tokens == 6
    tool = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
    called = client.messages.create(
        model="demo_model", messages=HELLO, max_tokens=80, tools=[tool], tool_choice={"type": "tool", "name": "weather"}, extra_body=greedy
    )
    assert called.content[0].input["city"] in ("Oslo", "Rome")
    assert client.messages.count_tokens(model="demo_model", messages=HELLO).input_tokens > 0
    with pytest.raises(anthropic.NotFoundError, match="is not loaded"):
        client.messages.create(model="other", messages=HELLO, max_tokens=6)
    image = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]
    with pytest.raises(anthropic.BadRequestError, match="text alone"):
        client.messages.create(model="demo_model", messages=image, max_tokens=6)

"""The LlamaIndex class on the demo model: answers are those of the model itself, and what it cannot do has a name."""

import asyncio

import pytest
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.prompts import PromptTemplate

from exl2nb.core.errors import OptionError
from exl2nb.integrations.llamaindex import Exl2LLM

pytestmark = pytest.mark.cpu
TALK = [ChatMessage(role=MessageRole.SYSTEM, content="Be brief."), ChatMessage(role=MessageRole.USER, content="Hello")]


@pytest.fixture
def model(llm):
    return Exl2LLM(llm, max_tokens=8, temperature=0, template="chatml")


def test_completions(model, llm):
    want = llm.generate("It was", max_tokens=8, temperature=0)
    answer = model.complete("It was")
    assert answer.text == want.text
    assert answer.additional_kwargs["completion_tokens"] == 8
    parts = list(model.stream_complete("It was"))
    assert parts[-1].text == "".join(part.delta for part in parts) == want.text
    assert asyncio.run(model.acomplete("It was")).text == want.text
    assert len(model.complete("It was", max_tokens=2).text) < len(want.text)
    assert model.predict(PromptTemplate("{start} was"), start="It")

    async def streamed():
        return [part.text async for part in await model.astream_complete("It was")][-1]

    assert asyncio.run(streamed()) == want.text


def test_chats(model, llm):
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    want = llm.chat(talk, template="chatml", max_tokens=8, temperature=0).text
    assert model.chat(TALK).message.content == want
    assert [part.message.content for part in model.stream_chat(TALK)][-1] == want
    assert asyncio.run(model.achat(TALK)).message.content == want

    async def streamed():
        return [part.message.content async for part in await model.astream_chat(TALK)][-1]

    assert asyncio.run(streamed()) == want
    two = ChatMessage(role=MessageRole.USER, blocks=[TextBlock(text="one"), TextBlock(text="two")])
    assert (
        model.chat([two]).additional_kwargs["prompt_tokens"] > model.chat([ChatMessage(content="one")]).additional_kwargs["prompt_tokens"]
    )


def test_without_a_temperature(llm):
    """Chats have the model's defaults; texts stay at temperature 1."""
    plain = Exl2LLM(llm, max_tokens=24, template="chatml", options={"seed": 3})
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    options = {"template": "chatml", "max_tokens": 24, "seed": 3}
    assert plain.chat(TALK).message.content == llm.chat(talk, **options).text != llm.chat(talk, **options, temperature=1, top_p=1).text
    assert plain.complete("It was").text == llm.generate("It was", max_tokens=24, seed=3, temperature=1).text


def test_metadata(model, llm):
    assert model.metadata.model_dump(include={"context_window", "num_output", "is_chat_model", "model_name"}) == {
        "context_window": 1024,
        "num_output": 8,
        "is_chat_model": True,
        "model_name": "demo_model",
    }
    assert model.class_name() == "exl2nb"


def test_leaving_a_stream_cancels_it(model, llm):
    for _ in model.stream_complete("It was", max_tokens=500):
        break
    assert llm.engine.wait_idle(10)


def test_refusals(model, llm):
    with pytest.raises(OptionError, match="expected a loaded model"):
        Exl2LLM("demo")
    with pytest.raises(OptionError, match="unknown keyword 'top_p'; options of answers go into options="):
        Exl2LLM(llm, top_p=0.5)
    with pytest.raises(OptionError, match="unknown keyword 'topp'"):
        model.complete("It was", topp=0.5)
    with pytest.raises(OptionError, match="holds a part of type 'image'"):
        model.chat([ChatMessage(role=MessageRole.USER, blocks=[ImageBlock(url="http://localhost/x.png")])])

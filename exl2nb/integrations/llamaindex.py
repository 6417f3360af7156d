"""LlamaIndex: a loaded model as its `LLM`, for completions and chats, streamed or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exl2nb.core.errors import MissingDependency, OptionError

try:
    from llama_index.core.base.llms.types import (
        ChatMessage,
        ChatResponse,
        ChatResponseAsyncGen,
        ChatResponseGen,
        CompletionResponse,
        CompletionResponseAsyncGen,
        CompletionResponseGen,
        LLMMetadata,
        MessageRole,
        TextBlock,
    )
    from llama_index.core.bridge.pydantic import Field, PrivateAttr
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
    from llama_index.core.llms.custom import CustomLLM
except ImportError as error:
    raise MissingDependency("exl2nb.integrations.llamaindex needs llama-index-core; pip install llama-index-core") from error

from exl2nb.generator.request import Completion

_ROLE_NAMES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.MODEL: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.FUNCTION: "tool",
}


class Exl2LLM(CustomLLM):
    """A model of LlamaIndex.

    Args:
        llm: a loaded model, which stays its owner's.
        max_tokens: of an answer.
        temperature: 0 = greedy; None = 1 for texts, the model's default for chats.
        template: Jinja source or the name of an instruct format, for a model without a chat template.
        options: any other options of `llm.generate`; a call's own keywords come on top. An unknown one is an OptionError.

    Example:
        >>> import exl2nb as ex
        >>> with ex.demo(progress=None) as llm:
        ...     model = Exl2LLM(llm, max_tokens=4, temperature=0)
        ...     model.complete("It was").text == llm.generate("It was", max_tokens=4, temperature=0).text, model.metadata.context_window
        (True, 1024)
    """

    max_tokens: int = Field(default=256, description="Most new tokens of an answer.", gt=0)
    temperature: float | None = Field(default=None, description="0 = greedy; None = the model's default.", ge=0)
    template: str | None = Field(default=None, description="Chat template in place of the model's own.")
    options: dict[str, Any] = Field(default_factory=dict, description="More options of every answer.")
    _llm: Any = PrivateAttr()

    def __init__(self, llm: Any, **fields: Any) -> None:
        if not hasattr(llm, "engine"):
            raise OptionError(f"Exl2LLM: llm is {str(llm)[:60]!r}; expected a loaded model, as exl2nb.load gives")
        if unknown := fields.keys() - type(self).model_fields.keys():
            raise OptionError(f"Exl2LLM: unknown keyword {min(unknown)!r}; options of answers go into options={{...}}")
        super().__init__(**fields)
        self._llm = llm

    @classmethod
    def class_name(cls) -> str:
        """As LlamaIndex writes it into its files."""
        return "exl2nb"

    @property
    def metadata(self) -> LLMMetadata:
        """Context, most new tokens, whether there is a chat template, the name."""
        chat = self.template is not None or bool(self._llm.tokenizer.templates.templates)
        return LLMMetadata(context_window=self._llm.context, num_output=self.max_tokens, is_chat_model=chat, model_name=self._llm.name)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Continue a text."""
        return _completed(self._llm.generate(prompt, **self._given(kwargs)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Continue a text; leaving the loop cancels it."""
        given = self._given(kwargs)

        def run() -> CompletionResponseGen:
            text = ""
            with self._llm.stream(prompt, **given) as handle:
                for chunk in handle:
                    text += chunk.text
                    yield CompletionResponse(text=text, delta=chunk.text)

        return run()

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Continue a text; the event loop stays free."""
        return _completed(await self._llm.agenerate(prompt, **self._given(kwargs)))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Continue a text; the event loop stays free."""
        given = self._given(kwargs)

        async def run() -> CompletionResponseAsyncGen:
            text = ""
            with self._llm.astream(prompt, **given) as handle:
                async for chunk in handle:
                    text += chunk.text
                    yield CompletionResponse(text=text, delta=chunk.text)

        return run()

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation, in the model's own format."""
        return _answered(self._llm.chat(_dicts(messages), **self._given(kwargs, chat=True)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation; leaving the loop cancels it."""
        talk, given = _dicts(messages), self._given(kwargs, chat=True)

        def run() -> ChatResponseGen:
            text = ""
            with self._llm.chat(talk, stream=True, **given) as handle:
                for chunk in handle:
                    text += chunk.text
                    yield ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=chunk.text)

        return run()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation; the event loop stays free."""
        return _answered(await self._llm.achat(_dicts(messages), **self._given(kwargs, chat=True)))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a conversation; the event loop stays free."""
        talk, given = _dicts(messages), self._given(kwargs, chat=True)

        async def run() -> ChatResponseAsyncGen:
            text = ""
            with self._llm.chat(talk, stream=True, **given) as handle:
                async for chunk in handle:
                    text += chunk.text
                    yield ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=chunk.text)

        return run()

    def _given(self, kwargs: dict[str, Any], *, chat: bool = False) -> dict[str, Any]:
        own = {"max_tokens": self.max_tokens, **({} if self.temperature is None else {"temperature": self.temperature})}
        template = {"template": self.template} if chat and self.template is not None else {}
        return {**own, **template, **self.options, **kwargs}


def _dicts(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates read them; a block that is no text is refused by `llm.chat`."""
    made = []
    for message in messages:
        blocks: list[dict[str, Any]] = [
            block.model_dump(mode="json") if not isinstance(block, TextBlock) else {"type": "text", "text": block.text}
            for block in message.blocks
        ]
        for block in blocks:
            block.setdefault("type", block.get("block_type"))
        made.append({"role": _ROLE_NAMES.get(message.role, message.role.value), "content": blocks})
    return made


def _completed(completion: Completion) -> CompletionResponse:
    return CompletionResponse(text=completion.text, additional_kwargs=_usage(completion))


def _answered(completion: Completion) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=completion.reply.content)
    return ChatResponse(message=message, additional_kwargs=_usage(completion))


def _usage(completion: Completion) -> dict[str, Any]:
    timings = completion.timings
    return {
        "prompt_tokens": timings.prompt_tokens,
        "completion_tokens": timings.new_tokens,
        "total_tokens": timings.prompt_tokens + timings.new_tokens,
        "finish_reason": completion.finish_reason,
    }

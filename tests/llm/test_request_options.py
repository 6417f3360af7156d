"""The types of options are those that the dataclasses check; signatures spell them out."""

import inspect
from dataclasses import fields
from types import SimpleNamespace

import pytest

import exl2nb as ex
from exl2nb import LLM
from exl2nb.core.errors import OptionError
from exl2nb.generator.request import Request
from exl2nb.llm.chat_prompt import CHAT_OPTIONS
from exl2nb.llm.conversation import Conversation
from exl2nb.llm.load_keywords import LOAD_DEFAULTS
from exl2nb.llm.request_options import ChatOptions, GenerateOptions, RequestOptions, SamplingOptions
from exl2nb.llm.requests import STRUCTURE_OPTIONS
from exl2nb.sampling.params import SamplingParams


def test_names_are_those_of_the_dataclasses():
    sampling, request = ([field.name for field in fields(cls)] for cls in (SamplingParams, Request))
    assert list(SamplingOptions.__annotations__) == sampling
    own = [name for name in request if name not in ("prompt_ids", "sampling", "stream", "n", "reply", "pictures", "sampling_defaults")]
    assert list(RequestOptions.__annotations__) == [*sampling, *own, "negative_prompt", *STRUCTURE_OPTIONS]
    assert GenerateOptions.__annotations__.keys() - RequestOptions.__annotations__.keys() == {"on_chunk"}
    assert ChatOptions.__annotations__.keys() - RequestOptions.__annotations__.keys() == set(CHAT_OPTIONS)


def test_every_option_is_taken(llm):
    """One by one, with the value that the signature gives as default where there is one."""
    for name, parameter in inspect.signature(llm.generate).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is not None and name != "max_tokens":
            assert len(llm.generate("It was", max_tokens=1, **{name: parameter.default}).tokens) == 1, name


def test_options_of_load_are_loads():
    """Of `demo` and `LLM.load`, too, with the same defaults."""
    own = list(inspect.signature(ex.load).parameters.values())[1:]
    assert {one.name: one.default for one in own} == LOAD_DEFAULTS
    for function in (ex.demo, LLM.load):
        found = inspect.signature(function).parameters
        assert {one.name: one.default for one in own}.items() <= {name: one.default for name, one in found.items()}.items()


def test_nothing_takes_nameless_options():
    for function in (ex.load, ex.demo, ex.convert, ex.measure, ex.sweep, LLM.load, LLM.render, LLM.conversation, Conversation):
        assert all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in inspect.signature(function).parameters.values()), function
    with pytest.raises(OptionError, match="continue_final_message"):
        Conversation(SimpleNamespace(), continue_final_message=True)  # pyright: ignore[reportCallIssue]
    assert "continue_final_message" not in inspect.signature(LLM.conversation).parameters


def test_signatures_have_no_nameless_options():
    for name in ("generate", "stream", "agenerate", "astream", "explain", "chat", "achat", "batch"):
        parameters = inspect.signature(getattr(LLM, name)).parameters
        of_the_model = name in ("chat", "achat")  # generation_config.json says
        assert parameters["temperature"].default == (None if of_the_model else 1.0), name
        assert ("generation_config" in parameters) == of_the_model, name
        assert all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in parameters.values()), name

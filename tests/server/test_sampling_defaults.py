"""Requests that leave out sampling options get those that the model recommends."""

import httpx
import pytest

from exl2nb.core.errors import OptionError
from exl2nb.llm.sampling_defaults import DEFAULTS_FILE
from exl2nb.sampling.defaults import SamplingDefaults
from exl2nb.server.fields import Sampling
from exl2nb.server.server_options import ServerOptions

ASK = [{"role": "user", "content": "It was"}]
FROM_FILE = SamplingDefaults(temperature=0.6, top_k=3, top_p=0.8, source=DEFAULTS_FILE)
LIBRARY, RAW = {"temperature": 0.7, "top_p": 0.95}, {"temperature": 1.0}
SIZE = 24


@pytest.fixture
def recommended(llm, monkeypatch):
    monkeypatch.setattr(llm, "sampling_defaults", FROM_FILE)


def say(client, route, **more):
    """The text of an answer to the same prompt, by each of the routes."""
    if route == "/v1/chat/completions":
        body = {"messages": ASK, "max_tokens": SIZE, "seed": 5, **more}
        return answered(client.post(route, json=body))["choices"][0]["message"]["content"].strip()
    if route == "/v1/responses":
        body = {"input": "It was", "max_output_tokens": SIZE, "seed": 5, **more}
        return answered(client.post(route, json=body))["output"][0]["content"][0]["text"].strip()
    body = {"prompt": "It was\n", "max_tokens": SIZE, "seed": 5, **more}
    return answered(client.post(route, json=body))["choices"][0]["text"].strip()


def answered(response):
    assert response.status_code == 200, response.text
    return response.json()


def wanted(llm, **options):
    return llm.generate("It was\n", max_tokens=SIZE, seed=5, **options).text.strip()


ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/completions")


@pytest.mark.usefixtures("recommended")
@pytest.mark.parametrize("route", ROUTES)
def test_values_of_the_file(client, llm, route):
    """Also for raw completions, as in vLLM."""
    expected = wanted(llm, **FROM_FILE.values)
    assert expected != wanted(llm) != wanted(llm, **LIBRARY)
    assert say(client, route) == expected
    assert say(client, route, temperature=1.5) == wanted(llm, **{**FROM_FILE.values, "temperature": 1.5})
    assert say(client, route, temperature=1, top_p=1, top_k=-1) == wanted(llm)
    dynamic = {"min_temp": 0.5, "max_temp": 1.5}
    assert say(client, route, **dynamic) == wanted(llm, **dynamic, top_k=3, top_p=0.8)
    assert say(client, route, preset="calm") == wanted(llm, temperature=0)
    assert say(client, route, top_p=0) == wanted(llm, temperature=0)  # OpenAI's spelling; the default of top_p does not undo it


@pytest.mark.parametrize(("route", "options"), [(ROUTES[0], LIBRARY), (ROUTES[1], LIBRARY), (ROUTES[2], RAW)])
def test_a_model_that_recommends_nothing(client, llm, route, options):
    """Chats have the library's default; raw completions have OpenAI's, which is temperature 1."""
    assert say(client, route) == wanted(llm, **options)


def test_messages_of_anthropic(client, llm, monkeypatch):
    """These have no seed, so the default here is greedy."""
    body = {"model": "demo_model", "messages": ASK, "max_tokens": SIZE}
    monkeypatch.setattr(llm, "sampling_defaults", SamplingDefaults(temperature=0, source=DEFAULTS_FILE))
    greedy = wanted(llm, temperature=0)
    for _ in range(2):
        assert answered(client.post("/v1/messages", json=body))["content"][0]["text"].strip() == greedy


@pytest.mark.usefixtures("recommended")
def test_responses_say_what_was_used(client):
    def used(**more):
        made = answered(client.post("/v1/responses", json={"input": "It was", "max_output_tokens": 2, **more}))
        return made["temperature"], made["top_p"]

    assert used() == (0.6, 0.8)
    assert used(temperature=0.2) == (0.2, 0.8)
    assert used(max_temp=1.5) == (1.0, 0.8)


@pytest.mark.usefixtures("recommended")
def test_a_server_without_them(llm):
    template = "{{ bos_token }}{{ messages[0].content }}{{ '\\n' }}"
    with llm.serve(template=template, generation_config=False) as server, httpx.Client(base_url=server.url) as client:
        assert say(client, ROUTES[0]) == wanted(llm, **LIBRARY)
        assert say(client, ROUTES[2]) == wanted(llm)
    with pytest.raises(OptionError, match="generation_config is 'no'; expected True or False"):
        ServerOptions.of(generation_config="no")


def test_top_k_of_minus_one_is_an_explicit_value():
    """Other servers mean all of the vocabulary by it; the model's default must not take its place."""
    assert Sampling(top_k=-1).generation_options() == {"top_k": 0}

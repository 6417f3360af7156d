import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
httpx = pytest.importorskip("httpx")

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    "{% if not loop.last or m.role != 'assistant' %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | map(attribute='function.name') | join(', ') }}{% endif %}"
    "{% if enable_thinking %}{{ '<think>\\n' }}{% elif tools and add_generation_prompt %}<think></think>{% endif %}{# <tool_call> #}"
)
"""Of a model that knows Hermes' tool calls, and thinks where it is told to."""


@pytest.fixture(scope="session")
def server(_demo):
    """A server of the shared model."""
    with _demo.serve(template=TEMPLATE, drain_s=2, presets={"calm": {"temperature": 0.0}}) as one:
        yield one


@pytest.fixture
def client(server, llm):
    """HTTP to it."""
    with httpx.Client(base_url=server.url, timeout=60, verify=False) as one:  # or each test reads all certificates
        yield one


@pytest.fixture(scope="session")
def events():
    """The data of server-sent events."""
    import json

    def read(response):
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        return [one if one == "[DONE]" else json.loads(one) for one in data]

    return read

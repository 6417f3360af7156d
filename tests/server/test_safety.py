"""Keys, limits, names, and clients that go away."""

import socket
import threading
import time

import httpx
import pytest

from exl2nb.core.errors import ConfigError, OptionError
from exl2nb.server.server_options import ServerOptions, read_config, read_keys

LONG = {"prompt": "It was", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture
def serve(llm):
    """Starts servers of the shared model."""
    made = []

    def start(**options):
        made.append(llm.serve(**{"drain_s": 0, **options}))
        return httpx.Client(base_url=made[-1].url, timeout=60, verify=False), made[-1]

    yield start
    for server in made:
        server.stop()


def until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_keys(serve):
    client, _ = serve(api_keys=["user"], admin_keys=["boss"])
    assert client.get("/health").status_code == 200
    assert client.get("/v1/models").status_code == 401
    assert client.get("/v1/models").json()["error"]["type"] == "authentication_error"
    assert client.post("/v1/messages", json={}).json()["error"]["type"] == "authentication_error"
    for headers in ({"authorization": "Bearer wrong"}, {"x-api-key": "use"}, {"authorization": "user"}, {"x-api-key": "usér".encode()}):
        assert client.get("/v1/models", headers=headers).status_code == 401
    for headers, what in [
        ({"authorization": "Bearer user"}, "api"),
        ({"x-api-key": "user"}, "api"),
        ({"x-admin-key": "boss"}, "admin"),
        ({"authorization": "Bearer boss"}, "admin"),
    ]:
        assert client.get("/v1/auth/permission", headers=headers).json() == {"permission": what}
    for route in ("model/unload", "sampling/override/unload", "template/unload"):
        assert client.post(f"/v1/{route}", headers={"x-api-key": "user"}).status_code == 403
    assert client.post("/v1/template/unload", headers={"x-admin-key": "boss"}).status_code == 200


def test_bodies_are_limited(serve):
    client, _ = serve(max_body_bytes=2000)
    assert client.post("/v1/completions", json={"prompt": "x" * 3000}).status_code == 413
    assert (
        client.post("/v1/completions", content=(b"x" * 100 for _ in range(50)), headers={"content-type": "application/json"}).status_code
        == 413
    )
    assert client.post("/v1/completions", content="{" * 1500, headers={"content-type": "application/json"}).status_code == 400
    assert client.post("/v1/completions", json={"prompt": "It was", "max_tokens": 1}).status_code == 200


def test_what_a_page_of_another_origin_can_do(serve):
    client, server = serve()
    assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
    assert client.get("/v1/models", headers={"host": f"localhost:{server.port}"}).status_code == 200
    assert client.post("/v1/completions", content='{"prompt": "x"}', headers={"content-type": "text/plain"}).status_code == 400
    assert "access-control-allow-origin" not in client.get("/v1/models", headers={"origin": "http://a.example"}).headers
    client, _ = serve(cors_origins=["http://a.example"])
    assert client.get("/v1/models", headers={"origin": "http://a.example"}).headers["access-control-allow-origin"] == "http://a.example"
    assert "access-control-allow-origin" not in client.get("/v1/models", headers={"origin": "http://b.example"}).headers


def test_the_queue_is_limited(serve, llm):
    client, server = serve(max_queue=1)
    with client.stream("POST", "/v1/completions", json={**LONG, "stream": True, "n": 8}) as stream:
        lines = stream.iter_lines()  # dropping it would close the connection
        next(lines)
        refused = client.post("/v1/completions", json={"prompt": "It was", "max_tokens": 1})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
    until(lambda: not server.figures()["active"])
    assert client.post("/v1/completions", json={"prompt": "It was", "max_tokens": 1}).status_code == 200


def test_an_answer_ends_after_the_time_limit(serve):
    client, _ = serve(request_timeout_s=0.05)
    got = client.post("/v1/completions", json=LONG).json()
    assert got["choices"][0]["finish_reason"] == "length"
    assert got["usage"]["completion_tokens"] < 900


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(serve, llm, stream):
    _, server = serve()
    body = httpx.Request("POST", server.url + "/v1/completions", json={**LONG, "stream": stream})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body.content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + body.content)
        until(lambda: llm.engine.pages.num_free < llm.engine.pages.num_pages)
    until(lambda: not server.figures()["active"] and llm.engine.pages.num_free == llm.engine.pages.num_pages)
    assert server.requests[0].state == "cancelled"


def test_a_slow_client_does_not_hold_the_others(serve):
    """One connection is never read; another is answered, and the engine comes to the end of both."""
    client, server = serve()
    body = httpx.Request("POST", server.url + "/v1/completions", json={**LONG, "max_tokens": 500, "stream": True, "logprobs": 50})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body.content)}\r\n\r\n"
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head.encode() + body.content)
        until(lambda: server.figures()["active"])
        assert client.post("/v1/completions", json={"prompt": "She", "max_tokens": 20}).status_code == 200
        until(lambda: server.figures()["pages_free"] == server.figures()["pages"])  # all of its tokens are generated


def test_one_bad_request_does_not_end_another(serve, llm):
    client, _ = serve()
    answers = []

    def good():
        answers.append(client.post("/v1/completions", json={"prompt": "It was", "max_tokens": 100, "ignore_eos": True}).json())

    threads = [threading.Thread(target=good) for _ in range(3)]
    for thread in threads:
        thread.start()
    for bad in ({"prompt": [5000]}, {"prompt": ""}, {"prompt": "x", "regex": "("}, {"prompt": "x", "top_p": 0}, {}):
        assert client.post("/v1/completions", json=bad).status_code in (200, 400)
    for thread in threads:
        thread.join()
    assert [one["usage"]["completion_tokens"] for one in answers] == [100] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "0.0.0.0"}, "other machines can reach"),
        ({"host": "::"}, "other machines can reach"),
        ({"host": ""}, "host is ''"),
        ({"port": 70000}, "port is 70000"),
        ({"prot": 1}, "did you mean 'port'"),
        ({"api_keys": [""]}, "api_keys is"),
        ({"max_body_bytes": 1}, "max_body_bytes is 1"),
        ({"request_timeout_s": 0}, "request_timeout_s is 0"),
        ({"preset": "x"}, "preset is 'x'"),
        ({"presets": {"x": 1}}, "presets is"),
        ({"template": 5}, "template is 5"),
        ({"model_dir": 5}, "model_dir is 5"),
        ({"docs": "no"}, "docs is 'no'"),
    ],
)
def test_options(options, message):
    with pytest.raises(OptionError, match=message):
        ServerOptions.of(**options)


def test_a_host_beyond_this_machine_needs_a_key_or_a_word():
    assert not ServerOptions(host="0.0.0.0", api_keys=["k"]).local
    assert not ServerOptions(host="0.0.0.0", allow_no_key=True).local
    assert ServerOptions(host="127.8.9.1").local


def test_a_port_that_is_taken(llm):
    with llm.serve() as server, pytest.raises(OptionError, match=f"cannot listen on 127.0.0.1:{server.port}"):
        llm.serve(port=server.port)


def test_presets_are_checked_when_the_server_starts(llm):
    with pytest.raises(OptionError, match="presets: hot: preset: unknown field 'temprature'"):
        llm.serve(presets={"hot": {"temprature": 2}})


def test_files(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# mine\none\n\nadmin: two\n")
    assert read_keys(keys) == (("one",), ("two",))
    keys.write_text("#\n")
    for path in (keys, tmp_path / "none"):
        with pytest.raises(ConfigError):
            read_keys(path)
    config = tmp_path / "c.toml"
    config.write_text("port = 1\n[presets.calm]\ntemperature = 0.5\n")
    assert read_config(config, ["port", "presets"]) == {"port": 1, "presets": {"calm": {"temperature": 0.5}}}
    for text, message in [("prot = 1", "did you mean 'port'"), ("=", "cannot be read as TOML")]:
        config.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_config(config, ["port"])


def test_pages_of_another_origin_are_refused_where_no_key_protects(serve):
    client, server = serve()
    assert client.post("/v1/tokenizer/encode", headers={"Origin": "https://evil.example"}).status_code == 403
    assert client.get("/v1/models", headers={"Origin": server.url}).status_code == 200
    listed, _ = serve(cors_origins=["https://mine.example"])
    assert listed.get("/v1/models", headers={"Origin": "https://mine.example"}).status_code == 200
    keyed, _ = serve(api_keys=["user"])
    assert keyed.get("/v1/models", headers={"Origin": "https://evil.example", "Authorization": "Bearer user"}).status_code == 200


def test_presets_take_the_fields_other_names(serve):
    client, _ = serve(presets={"mine": {"rep_pen": 1.1}}, preset="mine")
    for body in ({}, {"preset": "mine"}):
        assert client.post("/v1/completions", json={"prompt": "It was", "max_tokens": 1, **body}).status_code == 200


def test_numbers_that_json_lacks_are_refused(serve):
    client, _ = serve()
    body = b'{"input": "hi", "max_output_tokens": 2, "metadata": {"a": NaN}}'
    assert client.post("/v1/responses", content=body, headers={"Content-Type": "application/json"}).status_code == 400

"""Pictures over HTTP: data in the request, in OpenAI's and Anthropic's shapes; the server's files and other machines stay out of reach."""

import base64
import http.server
import io
import threading
import time

import numpy as np
import PIL.Image
import pytest

import exl2nb as ex
from tests.model.vision.zoo import build, write

httpx = pytest.importorskip("httpx")
pytestmark = pytest.mark.cpu
PICTURE = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))


def data(kind="PNG"):
    held = io.BytesIO()
    PICTURE.save(held, kind)
    return held.getvalue()


URL = "data:image/png;base64," + base64.b64encode(data()).decode()
GREEDY = {"max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with ex.load(write("qwen2_vl", build("qwen2_vl"), tmp_path_factory.mktemp("seeing")), device="cpu", progress=None) as one:
        yield one


@pytest.fixture(scope="module")
def client(llm):
    with llm.serve(drain_s=1) as server, httpx.Client(base_url=server.url, timeout=60) as one:
        yield one


def ask(client, *parts, **more):
    content = [*parts, {"type": "text", "text": "w1 w2"}]
    return client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], **GREEDY, **more})


def test_openai_anthropic_and_responses_see_the_same(llm, client):
    want = llm.chat([{"role": "user", "content": [PICTURE, "w1 w2"]}], temperature=0, max_tokens=6)
    answer = ask(client, {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}).json()
    assert answer["choices"][0]["message"]["content"] == want.text
    assert answer["usage"]["prompt_tokens"] == want.timings.prompt_tokens
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}}
    messages = [{"role": "user", "content": [block, {"type": "text", "text": "w1 w2"}]}]
    answer = client.post("/v1/messages", json={"messages": messages, "model": llm.name, **GREEDY}).json()

    assert answer["content"][0]["text"] == want.text
    counted = client.post("/v1/messages/count_tokens", json={"messages": messages, "model": llm.name}).json()
    assert counted["input_tokens"] == want.timings.prompt_tokens
    content = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "w1 w2"}]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 6, "temperature": 0}
    answer = client.post("/v1/responses", json=body).json()
    assert answer["output"][0]["content"][0]["text"] == want.text
    assert client.get("/v1/model").json()["parameters"]["use_vision"] is True


def test_videos_are_lists_of_frames(llm, client):
    frames = [PICTURE, PICTURE.rotate(180)]
    want = llm.chat([{"role": "user", "content": [{"type": "video", "video": frames, "fps": 2.0}, "w1 w2"]}], temperature=0, max_tokens=6)
    held = io.BytesIO()
    frames[1].save(held, "PNG")
    urls = [URL, "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()]
    answer = ask(client, {"type": "video_url", "video_url": urls}).json()
    assert answer["choices"][0]["message"]["content"] == want.text


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}, "fetches none"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "no data URL"),
        ({"type": "image", "image": "/etc/passwd"}, "no data URL"),
        ({"type": "image", "path": "/etc/passwd"}, "expected a data URL"),
        ({"type": "image_url", "image_url": 5}, "expected a data URL"),
        ({"type": "image", "base64": base64.b64encode(b"nothing").decode()}, "no picture"),
        ({"type": "video", "video": [URL] * 65}, "at most 64"),
        ({"type": "video", "video": 7}, "expected a data URL"),
    ],
)
def test_what_is_no_data_is_refused(part, says, client):
    answer = ask(client, part)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert "root:" not in answer.text


def test_too_many_pictures_are_refused(client):
    answer = ask(client, *[{"type": "image_url", "image_url": {"url": URL}}] * 257)
    assert answer.status_code == 400
    assert "more than 256" in answer.json()["error"]["message"]


def test_small_files_of_many_pixels_are_refused_together(client, monkeypatch):
    monkeypatch.setattr("exl2nb.model.vision.pictures.MAX_TOTAL", 1000)
    one = {"type": "image_url", "image_url": {"url": URL}}
    assert ask(client, one).status_code == 200
    for parts in ([one, one], [{"type": "video_url", "video_url": [URL, URL]}]):
        answer = ask(client, *parts)
        assert answer.status_code == 400
        assert "million pixels together" in answer.json()["error"]["message"]


def test_addresses_are_fetched_where_that_is_allowed(llm, monkeypatch):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            while self.path == "/slow_headers.png" and not self.wfile.closed:
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-" if not self.close_connection else b"x")
                self.close_connection = True
                time.sleep(0.02)
            if self.path == "/elsewhere.png":
                self.send_response(302)
                self.send_header("Location", "ftp://127.0.0.1/a.png")
                return self.end_headers()
            self.send_response(404 if self.path == "/b.png" else 200)
            self.end_headers()
            while self.path == "/slow.png" and not self.wfile.closed:
                self.wfile.write(b"x")
                time.sleep(0.02)
            self.wfile.write(data() if self.path == "/a.png" else b"")

        def log_message(self, *_):
            pass

    pages = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{pages.server_port}"
    try:
        with llm.serve(remote_images=True, drain_s=1) as server, httpx.Client(base_url=server.url, timeout=60) as client:
            want = ask(client, {"type": "image_url", "image_url": {"url": URL}}).json()["choices"][0]["message"]
            found = ask(client, {"type": "image_url", "image_url": {"url": f"{address}/a.png"}}).json()["choices"][0]["message"]
            assert found == want
            missing = ask(client, {"type": "image_url", "image_url": {"url": f"{address}/b.png"}})
            assert missing.status_code == 400
            assert "cannot be fetched" in missing.json()["error"]["message"]
            elsewhere = ask(client, {"type": "image_url", "image_url": {"url": f"{address}/elsewhere.png"}})
            assert elsewhere.status_code == 400
            assert "cannot be fetched" in elsewhere.json()["error"]["message"]
            monkeypatch.setattr("exl2nb.server.picture_requests.FETCH_S", 0.2)
            for path in ("slow.png", "slow_headers.png"):
                slow = ask(client, {"type": "image_url", "image_url": {"url": f"{address}/{path}"}})
                assert slow.status_code == 400
                assert "takes longer than 0.2 s" in slow.json()["error"]["message"]
    finally:
        pages.shutdown()
        pages.server_close()

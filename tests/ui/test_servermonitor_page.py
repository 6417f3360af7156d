"""The real ServerMonitor bundle in a browser with a fake kernel."""

import pytest
from mock_host import MockHost, state_of, violations

from exl2nb.widgets import ServerMonitor

ROW = {"route": "chat", "client": "127.0.0.1", "seconds": 1.25, "ttft_s": 0.04, "prompt_tokens": 12, "new_tokens": 48}
FIGURES = {
    "url": "http://127.0.0.1:5000",
    "model": "demo_model",
    "active": 2,
    "queued": 1,
    "max_queue": 256,
    "pages": 16,
    "pages_free": 4,
    "ttft_p50_s": 0.04,
    "ttft_p99_s": 0.2,
    "requests": [{**ROW, "number": 3, "state": "running"}, {**ROW, "number": 2, "state": "error"}, {**ROW, "number": 1, "state": "done"}],
}


def mounted(page, theme="light"):
    return MockHost(page, "servermonitor", state_of(ServerMonitor(FIGURES), tok_s=[0.0, 410.5, 1220.0], status="running"), theme=theme)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everybody_can_read_it(page, screenshots, theme):
    mounted(page, theme)
    assert not violations(page)
    page.locator(".exl2nb-servermonitor").screenshot(path=screenshots / f"servermonitor-{theme}.png")


def test_it_shows_what_the_server_does(page):
    host = mounted(page)
    text = page.locator(".exl2nb-servermonitor").inner_text()
    for words in (
        "demo_model at http://127.0.0.1:5000",
        "2 of 256",
        "12 of 16 cache pages in use",
        "1.25 s" if "1.25 s" in text else "1.3 s",
    ):
        assert words in text
    assert page.locator("tbody tr[data-state]").count() == 3
    assert page.locator("path").first.get_attribute("d").startswith("M0.0")
    host.put(status="stopped", requests=[], clients=[], active=0)
    page.wait_for_function("document.querySelectorAll('tbody tr[data-state]').length === 0")
    assert "(stopped)" in page.locator(".exl2nb-servermonitor").inner_text()


def test_texts_of_clients_are_no_html(page):
    host = mounted(page)
    host.put(model="<script>fail()</script>", requests=[[1, "<b>x</b>", "<i>", "done", 1.0, None, 1, 1]])
    page.wait_for_function("document.querySelector('.exl2nb-servermonitor').innerText.includes('<b>x</b>')")
    assert page.locator(".exl2nb-servermonitor b, .exl2nb-servermonitor script").count() == 0

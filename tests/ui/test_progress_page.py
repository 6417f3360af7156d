"""The real ProgressView bundle in a browser with a fake kernel."""

import pytest
from mock_host import MockHost, state_of, violations

from exl2nb.widgets import ProgressView

RUNNING = {"status": "running", "stage": "measure", "done": 3.0, "total": 12.0, "unit": "layers", "rate": 1.5, "share": 0.2, "eta_s": 6.0}


def mounted(page, theme: str = "light") -> MockHost:
    return MockHost(page, "progress", state_of(ProgressView("convert")), theme=theme)


@pytest.fixture
def host(page):
    return mounted(page)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everybody_can_read_it(page, screenshots, theme):
    """While it runs, when it is done, and when it failed: axe finds nothing."""
    host = mounted(page, theme)
    ends = (
        {},
        {"status": "done", "finished": [["measure", 41.0, "done"]]},
        {"status": "error", "error": "ConversionError: the disk is full"},
    )
    for name, end in zip(("running", "done", "error"), ends):
        host.put(**{**RUNNING, "elapsed_s": 2.0, **end})
        assert not violations(page)
        page.locator(".exl2nb-progress").screenshot(path=screenshots / f"progress-{name}-{theme}.png")


def test_one_line_from_start_to_end(host, page, screenshots):
    host.put(**RUNNING, elapsed_s=2.0, detail="model.layers.3.mlp.down_proj")
    bar = page.get_by_role("progressbar", name="convert: measuring sensitivity")
    assert bar.get_attribute("aria-valuenow") == "20", "the share of the time, not of the layers"
    line = page.locator(".exl2nb-line").inner_text()
    assert "20 %" in line
    assert "3 of 12 layers · 1.5 layers/s · 6.0 s left" in line
    page.screenshot(path=screenshots / "progress.png")
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Stop").click(force=True)
    assert host.sent == [{"type": "stop"}]
    assert "Stopping…" in page.locator(".exl2nb-line").inner_text()
    host.put(finished=[["measure", 41.0, "done"], ["write", 1.2, "done"]], status="done")
    assert not bar.is_visible()
    assert page.locator(".exl2nb-line").inner_text().split("\n") == ["✓ convert", "42 s"]
    assert page.locator(".exl2nb-detail").inner_text() == "measuring sensitivity 41 s · writing files 1.2 s"


def test_unknown_total_and_failure(host, page):
    host.put(status="running", stage="download", done=5.0, unit="files")
    assert page.get_by_role("progressbar").get_attribute("aria-valuenow") is None
    host.put(status="error", error="ConversionError: the disk is full")
    assert page.get_by_role("alert").inner_text() == "ConversionError: the disk is full"
    assert page.locator(".exl2nb-stage").inner_text() == "✕ convert: downloading"

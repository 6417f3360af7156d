"""Chat pages against a server, driven in headless Chromium to a streamed answer: `web_clients.py webui|sillytavern PAGE SERVER PICTURE`.

Prints the lengths that the answer had on the page while it grew. Raises where there is none, or where it came in one piece.
"""

import sys

from playwright.sync_api import Page, sync_playwright

WATCH = """selector => {
  window.lengths = []
  const look = () => {
    const all = document.querySelectorAll(selector)
    const length = all.length ? all[all.length - 1].innerText.trim().length : 0
    if (length && length !== window.lengths.at(-1)) window.lengths.push(length)
  }
  new MutationObserver(look).observe(document.body, {subtree: true, childList: true, characterData: true})
}"""
PATIENCE_MS = 120_000


def webui(page: Page, server: str) -> str:
    """Open WebUI without accounts, whose connection was given by its environment. The selector of answers."""
    box = page.locator("#chat-input")
    box.wait_for(timeout=PATIENCE_MS)
    page.wait_for_timeout(2000)
    page.keyboard.press("Escape")  # what is new
    page.wait_for_timeout(1000)
    page.evaluate(WATCH, ".chat-assistant")
    box.click()
    page.keyboard.type("The old man went home and")
    page.keyboard.press("Enter")
    return ".chat-assistant"


def sillytavern(page: Page, server: str) -> str:
    """SillyTavern: a persona, then Text Completion of the type TabbyAPI with the server's address."""
    save = page.locator("dialog[open] .popup-button-ok")
    save.wait_for(timeout=PATIENCE_MS)
    save.click()
    page.locator("#sys-settings-button .drawer-toggle").click()
    page.locator("#main_api").select_option("textgenerationwebui")
    page.locator("#textgen_type").select_option("tabby")
    page.locator("#tabby_api_url_text").fill(server)
    page.locator("#api_button_textgenerationwebui").click()
    page.locator(".online_status_text:visible").filter(has_text="demo_model").first.wait_for(timeout=PATIENCE_MS)
    page.locator("#sys-settings-button .drawer-toggle").click()
    page.locator("#ai-config-button .drawer-toggle").click()
    page.locator("#streaming_textgenerationwebui").check()
    page.locator("#ai-config-button .drawer-toggle").click()
    page.evaluate(WATCH, "#chat .mes[is_user=false] .mes_text")
    page.locator("#send_textarea").fill("The old man went home and")
    page.locator("#send_but").click()
    return "#chat .mes[is_user=false] .mes_text"


def drive(client: str, url: str, server: str, picture: str) -> list[int]:
    """Ask, watch, take a picture; the lengths of the answer as it grew."""
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.goto(url, timeout=PATIENCE_MS)
        try:
            {"webui": webui, "sillytavern": sillytavern}[client](page, server)
            page.wait_for_function("window.lengths.length > 3", timeout=PATIENCE_MS)
            page.wait_for_timeout(3000)
            return page.evaluate("window.lengths")
        finally:
            page.screenshot(path=picture)
            browser.close()


if __name__ == "__main__":
    lengths = drive(*sys.argv[1:])
    assert lengths[0] < max(lengths), lengths
    print(lengths)

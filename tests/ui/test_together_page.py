"""All widgets on one page, as in a notebook: none changes another's layout, nothing overflows, nothing is hidden."""

import pytest
from everything import everything, show_all
from mock_host import violations

WIDTHS = (1400, 700)
LOOKS = """(id) => {
  const names = ['display', 'gridTemplateColumns', 'fontFamily', 'fontSize', 'fontWeight', 'color', 'backgroundColor', 'paddingLeft',
    'paddingTop', 'marginTop', 'insetInlineStart', 'insetBlockStart', 'borderTopWidth', 'width', 'height', 'minWidth', 'overflowX',
    'textAlign', 'position', 'visibility'];
  return [...document.querySelectorAll(`#${id}, #${id} *`)].map((element) => {
    const style = getComputedStyle(element);
    return [element.className, ...names.map((name) => style[name])].join(' | ');
  });
}"""


@pytest.fixture(scope="module")
def states(llm):
    return everything(llm)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_style_sheet_reaches_into_another_widget(page, states, width):
    """Sizes, fonts, colours and columns of every element, with its own style sheet alone and with those of all others."""
    show_all(page, states, theme="light", width=width)
    switch = "([own, on]) => { for (const e of document.querySelectorAll('style[id]')) e.disabled = !on && e.id !== `css-${own}` }"
    for name, (bundle, _) in states.items():
        page.evaluate(switch, [bundle, True])
        together = page.evaluate(LOOKS, name)
        page.evaluate(switch, [bundle, False])
        alone = page.evaluate(LOOKS, name)
        changed = [(a, b) for a, b in zip(alone, together) if a != b]
        assert not changed, f"{name}: {len(changed)} elements change, first {changed[0]}"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_all_of_them_fit(page, states, screenshots, theme, width):
    """Nothing is wider than the page, and axe finds nothing."""
    show_all(page, states, theme=theme, width=width)
    assert page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    for name in states:
        page.locator(f"#{name}").screenshot(path=screenshots / f"together-{name}-{width}-{theme}.png")
    page.screenshot(path=screenshots / f"together-{width}-{theme}.png", full_page=True)
    assert violations(page, besides="label-content-name-mismatch") == []


def test_the_keyboard_goes_on_from_the_clicked_token(page, states):
    show_all(page, states, theme="light", width=1400)
    page.locator("#playground .exl2nb-token").nth(5).click()
    page.keyboard.press("ArrowRight")
    assert page.locator("#playground .exl2nb-token.exl2nb-current").get_attribute("data-i") == "6"
    answer = page.locator("#caches .exl2nb-answer-text").first
    answer.locator("[data-i]").nth(4).click()
    page.mouse.move(2, 2)
    assert answer.locator(".exl2nb-current").get_attribute("data-i") == "4", "stays where it was clicked"
    page.keyboard.press("ArrowLeft")
    assert answer.locator(".exl2nb-current").get_attribute("data-i") == "3"
    page.locator("#weights .exl2nb-word [data-v='9']").first.click()
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(100)
    assert page.locator("#weights [role=gridcell][aria-selected=true]").get_attribute("data-i") == "10"


def test_what_is_shown_can_be_copied(page, states):
    show_all(page, states, theme="light", width=1400)
    page.evaluate("() => { navigator.clipboard ??= {}; window.copied = []; navigator.clipboard.writeText = async (t) => copied.push(t) }")
    page.evaluate("() => document.execCommand = () => { copied.push(document.activeElement.value); return true }")
    inside = ("errorflow", "layerlens", "attention", "histogram", "outliers")
    for name in ("playground", "chat", "explorer", "bitmap", "weights", "caches", "compare", *inside):
        page.locator(f"#{name}").get_by_role("button", name="Copy").click()
        page.locator(f"#{name}").get_by_role("button", name="Copied").wait_for()
    text, chat, *tables = page.evaluate("() => copied")
    assert text == states["playground"][1]["_run_prompt"] + states["playground"][1]["text"]
    assert chat.startswith("You: Who is the old man?\n\nModel: ")
    for table in tables:
        rows = [line.split("\t") for line in table.split("\n")]
        assert len(rows) > 3 and {len(row) for row in rows} == {len(rows[0])}

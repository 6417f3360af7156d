"""A page with the smallest anywidget host: the real bundle, a fake model. The test plays the kernel with `deliver` and reads `sent`."""

from pathlib import Path

STATIC = Path(__file__).parents[2] / "exl2nb" / "static"
AXE = Path(__file__).parents[2] / "widgets" / "node_modules" / "axe-core" / "axe.min.js"
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
ROUNDED = "label-content-name-mismatch"  # of cells in a map: they show a rounded figure, or none, and their label says all

THEMES = {
    "none": "",
    "light": "--jp-ui-font-color1:rgba(0,0,0,.87);--jp-ui-font-color2:rgba(0,0,0,.66);--jp-layout-color0:#fff;--jp-layout-color1:#fff",
    "dark": "--jp-ui-font-color1:#fff;--jp-ui-font-color2:rgba(255,255,255,.7);--jp-layout-color0:#111;--jp-layout-color1:#212121",
}

HOST = """
window.mount = async (source, values, id = 'first') => {
  const listeners = {}, sent = [], model = {
    get: (name) => values[name],
    set: (name, value) => { values[name] = value; (listeners['change:' + name] ?? []).forEach((f) => f()); },
    save_changes: () => { sent.push({ type: 'save', values: { ...values } }); },
    send: (message) => { sent.push(message); },
    on: (name, f) => { (listeners[name] ??= []).push(f); },
    off: (name, f) => { listeners[name] = (listeners[name] ?? []).filter((g) => g !== f); },
  };
  window.sent = sent;
  window.put = (changes) => Object.entries(changes).forEach(([name, value]) => model.set(name, value));
  window.deliver = (...messages) => messages.forEach((m) => (listeners['msg:custom'] ?? []).forEach((f) => f(m)));
  window.listenerCount = () => Object.values(listeners).reduce((n, list) => n + list.length, 0);
  const url = URL.createObjectURL(new Blob([source], { type: 'text/javascript' }));
  const exported = (await import(url)).default;
  const widget = typeof exported === 'function' ? await exported() : exported;
  window.forget = await widget.initialize?.({ model });
  window.view = async (id) => widget.render({ model, el: document.getElementById(id) });
  window.closeView = await window.view(id);
};
"""


def blank(page, css: str, body: str, *, title: str, theme: str = "light") -> None:
    """An empty notebook page in the colours of `theme`, with `window.mount` ready."""
    background = {"light": "#fff", "dark": "#111"}.get(theme, "Canvas")
    light = {"light": "true", "dark": "false"}.get(theme, "unknown")
    page.set_content(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>html{{{THEMES[theme]};background:{background}}}"
        f"body{{margin:16px}}{css}</style><main data-jp-theme-light={light}>{body}</main>"
    )
    page.evaluate(f"() => {{ {HOST} }}")


def mount(page, name: str, state: dict, where: str = "first") -> None:
    """Show the bundle `name` with these traits in the element with id `where`."""
    page.evaluate("(args) => window.mount(...args)", [(STATIC / f"{name}.js").read_text(), state, where])


class MockHost:
    """One widget on one page."""

    def __init__(self, page, name: str, state: dict, *, theme: str = "light") -> None:
        self.page = page
        blank(page, (STATIC / f"{name}.css").read_text(), "<div id=first></div><div id=second></div>", title=name, theme=theme)
        mount(page, name, state)

    def deliver(self, *messages: dict) -> None:
        self.page.evaluate("(messages) => window.deliver(...messages)", list(messages))
        self.frame()

    def put(self, **traits) -> None:
        self.page.evaluate("(changes) => window.put(changes)", traits)
        self.frame()

    def frame(self) -> None:
        """Let two animation frames pass, so that what was requested is drawn."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    @property
    def sent(self) -> list[dict]:
        return self.page.evaluate("() => window.sent")


def state_of(widget, **changes) -> dict:
    """The synced traits of a widget as the page gets them."""
    values = widget.get_state()
    plain = {k: v for k, v in values.items() if isinstance(v, (str, int, float, list, dict, type(None))) and k not in ("_esm", "_css")}
    return {**plain, **changes}


def violations(page, where: str = "main", *, besides: str = "") -> list[tuple[str, list[str]]]:
    """What axe-core finds against WCAG A and AA inside `where`, rule and places; nothing where it is not installed (npm ci in widgets/).

    besides: a rule that is left out.
    """
    if not AXE.is_file():
        return []
    page.evaluate(AXE.read_text())
    found = page.evaluate("([where, tags]) => axe.run(where, {runOnly: tags}).then((r) => r.violations)", [where, TAGS])
    return [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in found if one["id"] != besides]


def low_controls(page) -> list[list]:
    """Visible controls of less than 24 pixels, the least that WCAG 2.2 asks for, with their heights."""
    controls = "[...document.querySelectorAll('button, input, summary, textarea')].filter((e) => e.checkVisibility())"
    sizes = page.evaluate(f"() => {controls}.map((e) => [e.outerHTML.slice(0, 60), e.offsetHeight])")
    return [size for size in sizes if size[1] < 24]

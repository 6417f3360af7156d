// PageTable: the pages of the cache as squares, the requests and their block tables, and a scrubber over the moments that were taken.
import type { PageCell, PageFrame, PageOwner, PageTableState } from "../protocol.gen";
import type { State } from "../shared/afm";
import { Asker } from "../shared/asker";
import { h, setAttributes, uniqueId } from "../shared/dom";
import { css, ink } from "../shared/palette";
import { type Roving, roving } from "../shared/roving";
import { snapshot } from "../shared/snapshot";
import { tools, tsv } from "../shared/tools";
import { View, widget } from "../shared/view";
import { chain, counts, describe, MARKS, ownerColour, stripes, summary } from "./colours";
import "./pagetable.css";

const WATCHED: (keyof PageTableState)[] = [
  ...(["status", "error", "height", "title", "frame", "live", "_count", "_shown", "_frames", "_can_live"] as const),
];
const PLAY_MS = 500;
const MOST_CHIPS = 60;

class PageTableView extends View<PageTableState> {
  private readonly title = h("b");
  private readonly label = h("span");
  private readonly figures = h("div", { class: "exl2nb-muted" });
  private readonly bar = h("div", { class: "exl2nb-share", "aria-hidden": "true" });
  private readonly grid = h("div", { class: "exl2nb-pages", role: "grid", "aria-label": "Pages of the cache" });
  private readonly walk: Roving;
  private readonly readout = h("div", { class: "exl2nb-readout exl2nb-muted" });
  private readonly requests = h("div", { class: "exl2nb-requests" });
  private readonly slider = h("input", { type: "range", class: "exl2nb-range", id: uniqueId("frame"), min: 0, step: 1 });
  private readonly place = h("span", { class: "exl2nb-place" });
  private readonly play = h("button", { type: "button", class: "exl2nb-button" }, "Play");
  private readonly live = h("button", { type: "button", class: "exl2nb-button" }, "Live");
  private readonly replay: HTMLElement;
  private readonly asker: Asker<{ frame: number; live: boolean }>;
  private cells: HTMLElement[] = [];
  private pointed = -1;
  private wanted: number | null = null;
  private timer: ReturnType<typeof setInterval> | undefined;

  constructor(table: State<PageTableState>) {
    super(table, "pagetable", "Page table");
    this.walk = roving(
      this.grid,
      (page) => this.point(page),
      (page) => {
        this.point(page);
        this.spoken.textContent = describe(this.shown(), page);
      },
    );
    this.asker = new Asker((wish) => table.send({ type: "frame", ...wish }));
    const label = h("label", { for: this.slider.id }, "Frame");
    this.replay = h("div", { class: "exl2nb-replay" }, this.live, this.play, label, this.slider, this.place);
    const taken = tools("pagetable", { text: () => this.text(), picture: () => snapshot(this.root) });
    const names = h("div", { class: "exl2nb-names" }, h("div", {}, this.title, " ", this.label), taken);
    const head = h("div", { class: "exl2nb-head" }, names, this.figures);
    this.root.append(
      h("div", { class: "exl2nb-card" }, head, this.bar, this.error, this.grid, this.readout, legend(), this.requests, this.replay),
      this.spoken,
    );
    this.listen();
    this.begin(
      WATCHED,
      table.observe(["_frames", "_shown", "live", "error"], () => this.asker.answered()),
      () => this.asker.close(),
      () => clearInterval(this.timer),
    );
  }

  private listen(): void {
    this.slider.addEventListener("input", () => {
      this.pause();
      this.go(Number(this.slider.value));
    });
    const over = (target: EventTarget | null) =>
      target instanceof HTMLElement && target.dataset.page !== undefined ? Number(target.dataset.page) : -1;
    this.requests.addEventListener("pointerover", (event) => this.point(over(event.target)));
    this.requests.addEventListener("pointerleave", () => this.point(-1));
    this.play.addEventListener("click", () => (this.timer === undefined ? this.run() : this.pause()));
    this.live.addEventListener("click", () => {
      this.pause();
      this.wanted = null;
      this.asker.want({ frame: -1, live: !this.widget.get("live") });
    });
  }

  private run(): void {
    if (this.at() >= this.widget.get("_count") - 1) this.go(0);
    this.timer = setInterval(() => {
      const next = this.at() + 1;
      if (next >= this.widget.get("_count")) this.pause();
      else this.go(next);
    }, PLAY_MS);
    this.draw();
  }

  private pause(): void {
    clearInterval(this.timer);
    this.timer = undefined;
    this.frame.request();
  }

  /** The moment that is to be seen: where the reader wants to be, else where the kernel is. */
  private at(): number {
    return this.wanted ?? this.widget.get("_shown");
  }

  private go(frame: number): void {
    this.wanted = frame;
    if (!this.widget.get("_static")) this.asker.want({ frame, live: false });
    this.frame.request();
  }

  private shown(): PageFrame {
    const frames = this.widget.get("_frames");
    const all = frames.length === this.widget.get("_count");
    return (all ? frames[this.at()] : frames[0]) as PageFrame;
  }

  protected draw(): void {
    const get = this.widget.get;
    if (this.wanted === get("_shown") && !get("_static")) this.wanted = null;
    const frame = this.shown();
    this.drawError();
    this.title.textContent = get("title");
    this.label.textContent = frame.label;
    this.figures.textContent = summary(frame);
    this.grid.style.maxHeight = String(get("height"));
    this.drawBar(frame);
    this.drawPages(frame);
    this.drawRequests(frame.requests);
    this.drawReplay();
    this.point(this.pointed);
  }

  private text(): string {
    const { pages } = this.shown();
    const rows = pages.map(([state, tokens, owners], page) => [page, state, tokens, owners.join(" ")]);
    return tsv([["page", "state", "tokens", "requests"], ...rows]);
  }

  private drawBar(frame: PageFrame): void {
    const found = counts(frame);
    const parts = (["shared", "used", "cached", "free"] as const).map((state) => {
      const part = h("span", { "data-state": state });
      part.style.flex = `${found[state]} ${found[state]} 0`;
      return part;
    });
    this.bar.replaceChildren(...parts);
  }

  private drawPages(frame: PageFrame): void {
    if (this.cells.length !== frame.pages.length) {
      const columns = Math.min(16, frame.pages.length);
      this.cells = frame.pages.map(() => h("div", { role: "gridcell", class: "exl2nb-page" }));
      const rows = [];
      for (let first = 0; first < this.cells.length; first += columns)
        rows.push(h("div", { role: "row" }, ...this.cells.slice(first, first + columns)));
      this.grid.replaceChildren(...rows);
      this.walk.set(this.cells, columns);
    }
    frame.pages.forEach((cell, page) => {
      paint(this.cells[page] as HTMLElement, frame, cell, page);
    });
  }

  private drawRequests(requests: PageOwner[]): void {
    this.requests.hidden = requests.length === 0;
    const rows = requests.map(([number, waiting, tokens, computed, reused, pages]) => {
      const name = h("span", { class: "exl2nb-owner" }, String(number));
      name.style.cssText = `background:${css(ownerColour(number))};color:${ink(ownerColour(number))}`;
      const chips = pages.slice(0, MOST_CHIPS).map((page) => h("span", { class: "exl2nb-chip", "data-page": page }, String(page)));
      if (pages.length > MOST_CHIPS) chips.push(h("span", {}, `and ${pages.length - MOST_CHIPS} more`));
      const found = reused ? `, ${reused} of them reused` : "";
      const words = waiting ? `queued; ${tokens} tokens` : `${tokens} tokens, ${computed} in the cache${found}`;
      return h("div", { class: "exl2nb-request" }, name, h("span", {}, words), h("span", { class: "exl2nb-chips" }, ...chips));
    });
    this.requests.replaceChildren(h("b", {}, "Requests and their block tables"), ...rows);
  }

  private drawReplay(): void {
    const get = this.widget.get;
    const [count, many] = [get("_count"), get("_count") > 1];
    this.replay.hidden = !many && !get("_can_live");
    this.live.hidden = !get("_can_live") || get("_static");
    setAttributes(this.live, { "aria-pressed": String(get("live")) });
    for (const part of [this.play, this.slider, this.place]) part.hidden = !many;
    (this.replay.querySelector("label") as HTMLElement).hidden = !many;
    this.play.textContent = this.timer === undefined ? "Play" : "Pause";
    this.slider.max = String(Math.max(1, count - 1));
    this.slider.value = String(this.at());
    this.slider.style.setProperty("--exl-fill", `${((100 * this.at()) / Math.max(1, count - 1)).toFixed(1)}%`);
    this.place.textContent = `${this.at() + 1} of ${count}`;
    setAttributes(this.slider, { "aria-valuetext": `frame ${this.at() + 1} of ${count} ${this.shown().label}`.trim() });
  }

  private point(page: number): void {
    this.pointed = page;
    const frame = this.shown();
    const before = page >= 0 ? chain(frame, page) : [];
    this.cells.forEach((cell, i) => {
      cell.classList.toggle("exl2nb-on", before.includes(i));
    });
    const far = before.length > 1 ? `; prefix: pages ${before.join(" → ")}` : "";
    this.readout.textContent = page >= 0 ? describe(frame, page) + far : "Hover a page, or use the arrow keys.";
  }
}

function paint(element: HTMLElement, frame: PageFrame, cell: PageCell, page: number): void {
  const [state, tokens, owners, _key, _parent, event] = cell;
  const share = Math.min(1, tokens / frame.page_size);
  element.dataset.state = state;
  element.style.setProperty("--exl-full", `${(100 * share).toFixed(1)}%`);
  element.style.setProperty("--exl-owner", state === "used" ? stripes(owners) : "");
  const said = state === "used" ? owners.slice(0, 2).join("+") + (owners.length > 2 ? "…" : "") : "";
  const parts = [
    h("i", { class: "exl2nb-fill" }),
    h("span", { class: "exl2nb-no" }, String(page)),
    h("span", { class: "exl2nb-who" }, said),
  ];
  if (event) parts.push(h("sup", {}, MARKS[event]));
  element.replaceChildren(...parts);
  setAttributes(element, { "aria-label": describe(frame, page) });
}

function legend(): HTMLElement {
  const key = (mark: HTMLElement, words: string) => h("span", {}, mark, words);
  const page = (which: string) => h("i", { class: "exl2nb-key", "data-state": which, "aria-hidden": "true" });
  const sup = (mark: string) => h("sup", {}, mark);
  return h(
    "div",
    { class: "exl2nb-legend exl2nb-muted" },
    key(page("used"), "used by the numbered request"),
    key(page("cached"), "cached for prefix reuse"),
    key(page("free"), "free"),
    key(sup("+"), "allocated"),
    key(sup("↻"), "reused"),
    key(sup("×"), "evicted"),
    key(sup("−"), "freed"),
  );
}

export default widget(PageTableView);

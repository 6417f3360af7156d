// ServerMonitor: a server's load, its cache pages, its clients and its requests. All state is in traits (the last value wins).
import type { ServerMonitorState } from "../protocol.gen";
import type { State } from "../shared/afm";
import { h, setAttributes } from "../shared/dom";
import { snapshot } from "../shared/snapshot";
import { tools, tsv } from "../shared/tools";
import { View, widget } from "../shared/view";
import { cells, curve, facts } from "./words";
import "./servermonitor.css";

const WIDTH = 240;
const HEIGHT = 40;
const SVG = "http://www.w3.org/2000/svg";
const COLUMNS = ["no.", "route", "client", "state", "time", "first token", "prompt", "tokens"];
const WATCHED: (keyof ServerMonitorState)[] = [
  ...(["status", "error", "url", "model", "active", "queued", "max_queue", "pages", "pages_free", "tok_s"] as const),
  ...(["ttft_p50_s", "ttft_p99_s", "requests", "clients"] as const),
];

class Monitor extends View<ServerMonitorState> {
  private readonly name = h("span", { class: "exl2nb-servermonitor-name" });
  private readonly facts = h("dl", { class: "exl2nb-servermonitor-facts" });
  private readonly line = document.createElementNS(SVG, "path");
  private readonly pages = h("div", { class: "exl2nb-servermonitor-fill" });
  private readonly pagesWords = h("span", { class: "exl2nb-servermonitor-words" });
  private readonly clients = h("tbody");
  private readonly rows = h("tbody");

  constructor(monitor: State<ServerMonitorState>) {
    super(monitor, "servermonitor", "Server");
    const plot = document.createElementNS(SVG, "svg");
    setAttributes(plot, {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      class: "exl2nb-servermonitor-plot",
      role: "img",
      "aria-label": "tokens per second",
    });
    setAttributes(this.line, { fill: "none", stroke: "currentColor", "stroke-width": 1.5 });
    plot.append(this.line);
    const track = h("div", { class: "exl2nb-servermonitor-track", "aria-hidden": "true" }, this.pages);
    this.root.append(
      h(
        "div",
        { class: "exl2nb-servermonitor-head" },
        this.name,
        this.facts,
        tools("server", { text: () => this.text(), picture: () => snapshot(this.root) }),
      ),
      h("div", { class: "exl2nb-servermonitor-load" }, plot, h("div", {}, track, this.pagesWords)),
      this.error,
      table("Clients", ["client", "running", "ended", "first token, ms", "per token, ms"], this.clients),
      table("Requests", COLUMNS, this.rows),
    );
    this.begin(WATCHED);
  }

  private text(): string {
    return tsv([COLUMNS, ...this.widget.get("requests").map((one) => cells(one))]);
  }

  protected draw(): void {
    const get = this.widget.get;
    const pages = get("pages");
    const used = pages - get("pages_free");
    this.root.dataset.status = get("status");
    this.name.textContent = `${get("model") || "no model"} at ${get("url")}${get("status") === "stopped" ? " (stopped)" : ""}`;
    const load = {
      active: get("active"),
      queued: get("queued"),
      max_queue: get("max_queue"),
      tok_s: get("tok_s"),
      ttft_p50_s: get("ttft_p50_s"),
      ttft_p99_s: get("ttft_p99_s"),
    };
    this.facts.replaceChildren(...facts(load).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
    this.line.setAttribute("d", curve(load.tok_s, WIDTH, HEIGHT));
    this.pages.style.inlineSize = pages > 0 ? `${((used / pages) * 100).toFixed(1)}%` : "0";
    this.pagesWords.textContent = `${used} of ${pages} cache pages in use`;
    this.clients.replaceChildren(...get("clients").map((one) => row(one.map((value) => (value === null ? "" : String(value))))));
    this.rows.replaceChildren(...get("requests").map((one) => row(cells(one), one[3])));
    this.drawError();
  }
}

function table(caption: string, columns: string[], body: HTMLElement): HTMLElement {
  const head = h("thead", {}, h("tr", {}, ...columns.map((name) => h("th", { scope: "col" }, name))));
  const scroll = h("div", { class: "exl2nb-servermonitor-scroll", tabindex: 0, role: "region", "aria-label": caption });
  scroll.append(h("table", {}, h("caption", {}, caption), head, body));
  return scroll;
}

function row(values: string[], stateOfRow?: string): HTMLElement {
  return h("tr", { "data-state": stateOfRow }, ...values.map((value) => h("td", {}, value)));
}

export default widget(Monitor);

// LayerLens: a map of where two models part, and for one token its answer through depth as curves and as a table.
import type { AnyModel } from "@anywidget/types";
import type { LayerLensState } from "../protocol.gen";
import { type State, state } from "../shared/afm";
import { guardKeys, h, root, setAttributes } from "../shared/dom";
import { percent, visible } from "../shared/format";
import { perFrame } from "../shared/frame";
import { HeatMap } from "../shared/heatmap";
import { Choice, type InsideState, PromptBar } from "../shared/inside";
import { watchKernel } from "../shared/kernel";
import { klStep, klText } from "../shared/kl";
import { shade } from "../shared/palette";
import { Plot } from "../shared/plot";
import { roving } from "../shared/roving";
import { standalone, tools, tsv } from "../shared/tools";
import { Lens } from "./lens";
import "./layerlens.css";

const WATCHED: (keyof LayerLensState)[] = ["status", "error", "prompt", "side", "token", "height", "_result"];

class LayerLensView {
  readonly root = root("layerlens", "Layer lens");
  private readonly title = h("b");
  private readonly choice = new Choice("Model", (i) => this.set("side", i + 1));
  private readonly bar: PromptBar;
  private readonly strip = h("div", { class: "exl2nb-lens-tokens", role: "listbox", "aria-label": "Tokens of the prompt" });
  private readonly cells = roving(
    this.strip,
    () => {},
    (index) => this.set("token", index),
  );
  private readonly heat = new HeatMap(
    (x, y) => this.readout(x < 0 ? "" : this.words(x, this.depthOf(y))),
    (x) => this.set("token", x),
  );
  private readonly line = h("div", { class: "exl2nb-inside-line exl2nb-muted", "aria-live": "polite" });
  private readonly heading = h("h4");
  private readonly verdict = h("p");
  private readonly chance = new Plot((depth) => this.readout(depth < 0 ? "" : this.words(this.token, depth)));
  private readonly table = h("table", { class: "exl2nb-lens-table" });
  private readonly scroll: HTMLElement;
  private readonly mapPart: HTMLElement;
  private readonly frame = perFrame(() => this.draw());
  private readonly undo: (() => void)[];
  private lens: Lens;
  private drawn: unknown[] = [];

  constructor(private readonly widget: State<LayerLensState>) {
    this.lens = new Lens(widget.get("_result"));
    this.bar = new PromptBar(widget as unknown as State<InsideState>);
    const taken = tools("layerlens", { text: () => this.text(), picture: () => this.picture() });
    const head = h(
      "div",
      { class: "exl2nb-inside-head" },
      this.title,
      h("div", { class: "exl2nb-inside-right" }, this.choice.element, taken),
    );
    this.scroll = h("div", { class: "exl2nb-lens-scroll", tabindex: 0, role: "region", "aria-label": "Best tokens by layer" }, this.table);
    const map = h("h4", {}, "Where they part: KL at the same depth, last layer on top, a column a token");
    this.mapPart = h("div", { class: "exl2nb-inside-part" }, map, this.heat.element);
    const tokens = h("div", { class: "exl2nb-inside-part" }, h("h4", {}, "Tokens"), this.strip, this.line);
    const one = h("div", { class: "exl2nb-inside-part" }, this.heading, this.chance.element, this.chance.legend, this.verdict, this.scroll);
    this.root.append(h("div", { class: "exl2nb-card" }, head, this.bar.element, this.bar.error, this.mapPart, tokens, one));
    this.undo = [guardKeys(this.root), widget.observe(WATCHED, () => this.frame.request())];
    this.draw();
  }

  close(): void {
    for (const undo of this.undo) undo();
    this.frame.cancel();
    this.root.remove();
  }

  private get side(): number {
    return Math.min(Math.max(1, this.widget.get("side")), this.lens.result.labels.length - 1);
  }

  private get token(): number {
    const token = this.widget.get("token");
    return token >= 0 && token < this.lens.tokens ? token : this.lens.tokens - 1;
  }

  private set(name: "side" | "token", value: number): void {
    this.widget.set(name, value);
    this.widget.save();
    this.frame.request();
  }

  private depthOf(row: number): number {
    return this.lens.depths - 1 - row;
  }

  private draw(): void {
    const result = this.widget.get("_result");
    const fresh = this.drawn[0] !== result;
    if (fresh) this.lens = new Lens(result);
    const { side, token, lens } = this;
    const names = result.labels;
    this.bar.draw();
    this.choice.draw(names.slice(1), side - 1);
    this.title.textContent = names.length > 1 ? `${names[side]} beside ${names[0]}` : `Layer lens${names[0] ? `: ${names[0]}` : ""}`;
    this.scroll.style.maxHeight = String(this.widget.get("height") || "340px");
    this.mapPart.hidden = names.length < 2;
    if (fresh) this.drawTokens();
    if (fresh || this.drawn[1] !== side) this.drawMap();
    if (fresh || this.drawn[1] !== side || this.drawn[2] !== token) this.drawToken();
    this.drawn = [result, side, token];
    [...this.strip.children].forEach((cell, i) => {
      setAttributes(cell, { "aria-selected": String(i === token) });
    });
    this.cells.move(token);
    this.heat.mark(token, -1);
    this.chance.mark(lens.depths - 1);
  }

  private drawTokens(): void {
    const cells = this.lens.result.texts.map((text) => h("span", { role: "option", class: "exl2nb-lens-token" }, visible(text)));
    this.strip.replaceChildren(...cells);
    this.cells.set(cells, cells.length);
  }

  private drawMap(): void {
    const { lens, side } = this;
    this.heat.element.style.blockSize = `${Math.min(240, Math.max(60, 9 * lens.depths))}px`;
    this.heat.draw({
      columns: lens.tokens,
      rows: lens.depths,
      colour: (x, y) => shade(height(lens.kl(side, this.depthOf(y), x))),
      label: `KL between ${lens.result.labels[0]} and ${lens.result.labels[side]}: layers up, tokens across; darker is further apart`,
    });
  }

  private drawToken(): void {
    const { lens, token, side } = this;
    const { labels, texts } = lens.result;
    if (!lens.tokens) return;
    const target = visible(lens.target(token));
    this.heading.textContent = `After “${visible(texts[token] ?? "")}”: probability of “${target}”, which ${labels[0]} finds most likely in the end`;
    this.chance.draw({
      label: `Probability of ${target} by layer`,
      series: labels.map((name, i) => ({
        name,
        values: Array.from({ length: lens.depths }, (_, depth) => lens.chance(i, depth, token)),
        style: i,
      })),
      places: Array.from({ length: lens.depths }, (_, depth) => (depth ? String(depth - 1) : "in")),
      format: percent,
      words: (depth) => this.words(token, depth),
      low: 0,
    });
    this.verdict.textContent = labels.length > 1 ? this.parting(side) : "";
    const head = h("tr", {}, h("th", { scope: "col" }, "layer"), ...labels.map((name) => h("th", { scope: "col" }, name)));
    if (labels.length > 1) head.append(h("th", { scope: "col" }, "KL"));
    const rows = Array.from({ length: lens.depths }, (_, i) => this.row(lens.depths - 1 - i));
    this.table.replaceChildren(h("thead", {}, head), h("tbody", {}, ...rows));
  }

  private row(depth: number): HTMLElement {
    const { lens, token, side } = this;
    const row = h("tr", {}, h("th", { scope: "row" }, depth ? String(depth - 1) : "in"));
    lens.result.labels.forEach((_, i) => {
      const [first, ...rest] = lens.best(i, depth, token);
      const cell = h("td", lens.differs(i, depth, token) ? { class: "exl2nb-parted" } : {}, h("b", {}, visible(first?.word ?? "")));
      cell.append(` ${percent(first?.prob ?? 0)}`);
      cell.append(h("span", { class: "exl2nb-muted" }, ` ${rest.map((one) => `${visible(one.word)} ${percent(one.prob)}`).join(", ")}`));
      row.append(cell);
    });
    if (lens.result.labels.length > 1) {
      const kl = lens.kl(side, depth, token);
      row.append(h("td", { class: "exl2nb-lens-kl", "data-step": klStep(kl) }, klText(kl)));
    }
    return row;
  }

  private parting(side: number): string {
    const { lens, token } = this;
    const name = lens.result.labels[side] ?? "";
    const first = lens.parts(side, token);
    const apart = Array.from({ length: lens.depths }, (_, depth) => lens.differs(side, depth, token)).filter(Boolean).length;
    const where = `another favourite in ${apart} of ${lens.depths} places`;
    if (first < 0) return `${name} has ${where}; in the end they agree.`;
    return `${name} has ${where}; from ${lens.name(first)} on they stay apart.`;
  }

  private words(token: number, depth: number): string {
    const { lens } = this;
    const said = lens.result.labels.map((name, i) => {
      const best = lens.best(i, depth, token)[0];
      return `${name} ${visible(best?.word ?? "")} ${percent(best?.prob ?? 0)}`;
    });
    const kl = lens.result.labels.length > 1 ? `; KL ${klText(lens.kl(this.side, depth, token))}` : "";
    return `${lens.name(depth)}, after ${visible(lens.result.texts[token] ?? "")}: ${said.join(", ")}${kl}`;
  }

  private readout(words: string): void {
    this.line.textContent = words;
  }

  private text(): string {
    const { lens, token } = this;
    const names = lens.result.labels;
    const head = ["layer", ...names.flatMap((name) => [name, `${name} probability`]), "KL"];
    const rows = Array.from({ length: lens.depths }, (_, depth) => {
      const best = names.flatMap((_, i) => {
        const one = lens.best(i, depth, token)[0];
        return [one?.word ?? "", one?.prob ?? 0];
      });
      return [depth ? depth - 1 : "in", ...best, names.length > 1 ? lens.kl(this.side, depth, token) : null];
    });
    return tsv([head, ...rows]);
  }

  private picture(): string {
    return standalone(this.chance.svg, getComputedStyle(this.root).getPropertyValue("background-color") || "#fff");
  }
}

/** Height of a KL, 0 to 1, on a logarithmic scale from 0.001 to 3 nats. */
export function height(kl: number): number {
  return kl <= 0 ? 0 : Math.min(1, Math.max(0, (Math.log10(kl) + 3) / 3.5));
}

export default {
  render({ model, el }: { model: AnyModel; el: HTMLElement }) {
    const view = new LayerLensView(state<LayerLensState>(model));
    el.append(view.root);
    const undo = watchKernel(view.root, model);
    return () => {
      undo();
      view.close();
    };
  },
};

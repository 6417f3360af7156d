// LayerLens: a map of where two models diverge, and for one token its answer through depth as curves and as a table.
import type { LayerLensState } from "../protocol.gen";
import type { State } from "../shared/afm";
import { h, setAttributes } from "../shared/dom";
import { percent, visible } from "../shared/format";
import { HeatMap, shadePixel } from "../shared/heatmap";
import { Choice, InsideView } from "../shared/inside";
import { klStep, klText } from "../shared/kl";
import { Plot } from "../shared/plot";
import { roving } from "../shared/roving";
import { standalone, tsv } from "../shared/tools";
import { widget } from "../shared/view";
import { Lens } from "./lens";
import "./layerlens.css";

const WATCHED: (keyof LayerLensState)[] = ["status", "error", "prompt", "side", "token", "height", "_result", "_share"];

class LayerLensView extends InsideView<LayerLensState> {
  private readonly choice = new Choice("Model", (i) => this.set({ side: i + 1 }));
  private readonly strip = h("div", { class: "exl2nb-lens-tokens", role: "listbox", "aria-label": "Tokens of the prompt" });
  private readonly cells = roving(
    this.strip,
    () => {},
    (index) => this.set({ token: index }),
  );
  private readonly heat = new HeatMap(
    (x, y) => this.say(x < 0 ? "" : this.words(x, this.depthOf(y))),
    (x) => this.set({ token: x }),
  );
  private readonly mapTitle = h("h4");
  private readonly heading = h("h4");
  private readonly verdict = h("p");
  private readonly chance = new Plot((depth) => this.say(depth < 0 ? "" : this.words(this.token, depth)));
  private readonly table = h("table", { class: "exl2nb-lens-table" });
  private readonly scroll: HTMLElement;
  private readonly mapPart: HTMLElement;
  private lens: Lens;

  constructor(widget: State<LayerLensState>) {
    super(widget, "layerlens", "Layer lens");
    this.lens = new Lens(widget.get("_result"));
    this.scroll = h("div", { class: "exl2nb-lens-scroll", tabindex: 0, role: "region", "aria-label": "Top tokens by layer" }, this.table);
    this.mapPart = this.part(this.mapTitle, this.heat.element);
    const tokens = this.part(h("h4", {}, "Tokens"), this.strip, this.line);
    const one = this.part(this.heading, this.chance.element, this.chance.legend, this.verdict, this.scroll);
    const taken = { text: () => this.text(), picture: () => standalone(this.chance.svg) };
    this.build(this.choice, taken, this.mapPart, tokens, one);
    this.begin(WATCHED);
  }

  private get side(): number {
    return Math.min(Math.max(1, this.widget.get("side")), this.lens.result.labels.length - 1);
  }

  private get token(): number {
    const token = this.widget.get("token");
    return token >= 0 && token < this.lens.tokens ? token : this.lens.tokens - 1;
  }

  private depthOf(row: number): number {
    return this.lens.depths - 1 - row;
  }

  protected draw(): void {
    const result = this.widget.get("_result");
    if (this.lens.result !== result) this.lens = new Lens(result);
    const { side, token, lens } = this;
    const names = result.labels;
    const [fresh, sideChanged, tokenChanged] = this.changed(result, side, token);
    this.bar.draw();
    this.drawError();
    this.choice.draw(names.slice(1), side - 1);
    this.title.textContent = names.length > 1 ? `${names[side]} against ${names[0]}` : `Layer lens${names[0] ? `: ${names[0]}` : ""}`;
    this.scroll.style.maxHeight = String(this.widget.get("height") || "340px");
    this.mapPart.hidden = names.length < 2;
    if (fresh) this.drawTokens();
    if (fresh || sideChanged) this.drawMap();
    if (fresh || sideChanged || tokenChanged) this.drawToken();
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
    this.mapTitle.textContent = `Divergence (KL) from ${lens.result.labels[0]} after each layer: layers up, tokens across`;
    this.heat.element.style.blockSize = `${Math.min(240, Math.max(60, 9 * lens.depths))}px`;
    this.heat.draw({
      columns: lens.tokens,
      rows: lens.depths,
      pixel: (x, y) => shadePixel(height(lens.kl(side, this.depthOf(y), x))),
      label: `KL between ${lens.result.labels[0]} and ${lens.result.labels[side]}: layers up, tokens across; darker = larger`,
    });
  }

  private drawToken(): void {
    const { lens, token, side } = this;
    const { labels, texts } = lens.result;
    if (!lens.tokens) return;
    const target = visible(lens.target(token));
    this.heading.textContent = `After “${visible(texts[token] ?? "")}”: probability of “${target}”, the final top-1 token of ${labels[0]}`;
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
    const where = `The top-1 token of ${name} differs at ${apart} of ${lens.depths} depths`;
    return first < 0 ? `${where}; the final one agrees.` : `${where}; from ${lens.name(first)} on it stays different.`;
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
}

/** Height of a KL, 0 to 1, on a logarithmic scale from 0.001 to 3 nats. */
export function height(kl: number): number {
  return kl <= 0 ? 0 : Math.min(1, Math.max(0, (Math.log10(kl) + 3) / 3.5));
}

export default widget(LayerLensView);

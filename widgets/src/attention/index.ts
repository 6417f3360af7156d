// AttentionView: a map of the heads by how far their attention moves, the heads of a layer as thumbnails, one head large with its difference.
import type { AnyModel } from "@anywidget/types";
import type { AttentionViewState, Patterns } from "../protocol.gen";
import { type State, state } from "../shared/afm";
import { guardKeys, h, root, setAttributes } from "../shared/dom";
import { percent, visible } from "../shared/format";
import { perFrame } from "../shared/frame";
import { HeatMap, packed } from "../shared/heatmap";
import { Choice, type InsideState, PromptBar } from "../shared/inside";
import { watchKernel } from "../shared/kernel";
import { diverging, shade } from "../shared/palette";
import { roving } from "../shared/roving";
import { tools, tsv } from "../shared/tools";
import { type Pattern, unpacked } from "./patterns";
import { canvasSvg } from "./picture";
import "./attention.css";

const WATCHED: (keyof AttentionViewState)[] = ["status", "error", "prompt", "side", "layer", "head", "_result", "_heads", "_one"];
const DIFFERENCE = 8; // times the difference that the colours end at, two bits in the scale of the bit map

const SHADES = Uint32Array.from({ length: 256 }, (_, byte) => packed(shade(byte / 255)));

class AttentionViewer {
  readonly root = root("attention", "Attention view");
  private readonly title = h("b");
  private readonly choice = new Choice("Model", (i) => this.set({ side: i + 1 }));
  private readonly bar: PromptBar;
  private readonly map = new HeatMap(
    (x, y) => this.say(x < 0 ? "" : this.headWords(x, y)),
    (x, y) => this.set({ layer: x, head: y }),
  );
  private readonly mapPart: HTMLElement;
  private readonly thumbs = h("div", { class: "exl2nb-heads", role: "listbox", "aria-label": "Heads of the layer" });
  private readonly cells = roving(
    this.thumbs,
    (index) => index >= 0 && this.say(this.headWords(this.layer, index)),
    (index) => this.set({ head: index }),
  );
  private readonly thumbsTitle = h("h4");
  private readonly largeTitle = h("h4");
  private readonly large: { map: HeatMap; name: HTMLElement; box: HTMLElement }[];
  private readonly line = h("div", { class: "exl2nb-inside-line exl2nb-muted", "aria-live": "polite" });
  private readonly frame = perFrame(() => this.draw());
  private readonly undo: (() => void)[];
  private one: Pattern[] = [];
  private drawn: unknown[] = [];

  constructor(private readonly widget: State<AttentionViewState>) {
    this.bar = new PromptBar(widget as unknown as State<InsideState>);
    this.large = [0, 1, 2].map(() => this.largeView());
    const taken = tools("attention", { text: () => this.text(), picture: () => this.picture() });
    const head = h(
      "div",
      { class: "exl2nb-inside-head" },
      this.title,
      h("div", { class: "exl2nb-inside-right" }, this.choice.element, taken),
    );
    this.mapPart = h(
      "div",
      { class: "exl2nb-inside-part" },
      h("h4", {}, "Attention that moves: heads down, layers across; darker moves further"),
      this.map.element,
    );
    const thumbs = h("div", { class: "exl2nb-inside-part" }, this.thumbsTitle, this.thumbs);
    const large = h("div", { class: "exl2nb-larges" }, ...this.large.map((view) => view.box));
    const one = h("div", { class: "exl2nb-inside-part" }, this.largeTitle, large, this.line);
    this.root.append(h("div", { class: "exl2nb-card" }, head, this.bar.element, this.bar.error, this.mapPart, thumbs, one));
    this.undo = [guardKeys(this.root), widget.observe(WATCHED, () => this.frame.request())];
    this.draw();
  }

  close(): void {
    for (const undo of this.undo) undo();
    this.frame.cancel();
    this.root.remove();
  }

  private largeView() {
    const point = (key: number, query: number) => {
      this.say(key < 0 ? "" : this.placeWords(query, key));
      if (key >= 0) for (const view of this.large) view.map.mark(key, query);
    };
    const map = new HeatMap(point);
    const name = h("div", { class: "exl2nb-large-name" });
    return { map, name, box: h("div", { class: "exl2nb-large" }, name, map.element) };
  }

  private get layer(): number {
    return Math.min(Math.max(0, this.widget.get("layer")), this.widget.get("_result").layers - 1);
  }

  private get head(): number {
    return Math.min(Math.max(0, this.widget.get("head")), this.widget.get("_result").heads - 1);
  }

  private get side(): number {
    return Math.min(Math.max(1, this.widget.get("side")), this.widget.get("_result").labels.length - 1);
  }

  private set(values: { side?: number; layer?: number; head?: number }): void {
    for (const [name, value] of Object.entries(values)) this.widget.set(name as "side", value);
    this.widget.save();
    this.frame.request();
  }

  /** The heads of the chosen layer: live, or in a page without a kernel from what was stored. */
  private get heads(): Patterns | undefined {
    const found = [...this.widget.get("_heads"), ...this.widget.get("_stored")];
    return found.find((one) => one.layer === this.layer);
  }

  private draw(): void {
    const { labels, layers, tokens, size } = this.widget.get("_result");
    const { layer, head, side } = this;
    this.bar.draw();
    if (!layers) return;
    this.choice.draw(labels.slice(1), side - 1);
    const averaged = size < tokens ? `, averaged to ${size} × ${size}` : "";
    this.title.textContent = `${labels.length > 1 ? `${labels[side]} beside ${labels[0]}` : labels[0]}: ${tokens} tokens${averaged}`;
    this.drawMap();
    this.drawThumbs();
    this.drawLarge();
    this.map.mark(layer, head);
    this.cells.move(head);
    [...this.thumbs.children].forEach((cell, i) => {
      setAttributes(cell, { "aria-selected": String(i === head) });
    });
  }

  private drawMap(): void {
    const result = this.widget.get("_result");
    this.mapPart.hidden = result.labels.length < 2;
    const key = [result, this.side];
    if (this.mapPart.hidden || key.every((part, i) => part === this.drawn[i])) return;
    this.drawn = key;
    const table = result.distance[this.side - 1] ?? [];
    const most = Math.max(1e-9, ...table.flat());
    this.map.element.style.blockSize = `${Math.min(200, Math.max(48, 14 * result.heads))}px`;
    this.map.draw({
      columns: result.layers,
      rows: result.heads,
      colour: (x, y) => shade((table[x]?.[y] ?? 0) / most),
      label: `Share of attention that moves, up to ${percent(most)}: heads down, layers across`,
    });
  }

  private drawThumbs(): void {
    const found = this.heads;
    const { labels } = this.widget.get("_result");
    const kind = labels.length > 1 ? `, each ${labels[0]} above ${labels[this.side]}` : "";
    this.thumbsTitle.textContent = `Heads of layer ${this.layer}${kind}`;
    if (!found) {
      this.thumbs.replaceChildren(h("span", { class: "exl2nb-muted" }, "not stored in this page"));
      return;
    }
    const models = unpacked(found);
    const shown = labels.length > 1 ? [models[0] ?? [], models[this.side] ?? []] : [models[0] ?? []];
    const cells = (shown[0] ?? []).map((_, head) => {
      const cell = h("div", { role: "option", class: "exl2nb-head", "aria-label": this.headWords(this.layer, head) });
      for (const patterns of shown) cell.append(small(patterns[head]));
      cell.append(h("span", { "aria-hidden": "true" }, this.headCaption(head)));
      return cell;
    });
    this.thumbs.replaceChildren(...cells);
    this.cells.set(cells, cells.length);
  }

  private drawLarge(): void {
    const { labels } = this.widget.get("_result");
    const { layer, head, side } = this;
    const live = this.widget.get("_one").find((one) => one.layer === layer && one.head === head);
    const stored = this.heads ? unpacked(this.heads).map((heads) => heads[head]) : [];
    this.one = (live ? unpacked(live).map((heads) => heads[0]) : stored).filter((one): one is Pattern => one !== undefined);
    const [first, other] = [this.one[0], this.one[side]];
    this.largeTitle.textContent = `Layer ${layer}, head ${head}: queries down, keys across`;
    this.show(0, labels[0] ?? "", first, (query, key) => shade((first?.byte(query, key) ?? 0) / 255));
    this.show(1, labels[side] ?? "", side > 0 ? other : undefined, (query, key) => shade((other?.byte(query, key) ?? 0) / 255));
    const both = first && other && side > 0 ? first : undefined;
    const difference = (query: number, key: number) => (other?.share(query, key) ?? 0) - (first?.share(query, key) ?? 0);
    this.show(2, `${labels[side]} − ${labels[0]}: blue more, red less`, both, (query, key) =>
      diverging(DIFFERENCE * difference(query, key)),
    );
  }

  private show(
    at: number,
    name: string,
    pattern: Pattern | undefined,
    colour: (query: number, key: number) => readonly [number, number, number],
  ): void {
    const view = this.large[at];
    if (!view) return;
    view.box.hidden = !pattern;
    if (!pattern) return;
    view.name.textContent = name;
    view.map.draw({
      columns: pattern.size,
      rows: pattern.size,
      colour: (key, query) => (key > query ? null : colour(query, key)),
      label: `Attention of layer ${this.layer}, head ${this.head}, ${name}`,
    });
  }

  private headCaption(head: number): string {
    const moved = this.widget.get("_result").distance[this.side - 1]?.[this.layer]?.[head];
    return moved === undefined ? String(head) : `${head}: ${percent(moved)}`;
  }

  private headWords(layer: number, head: number): string {
    const { distance, labels } = this.widget.get("_result");
    const moved = distance[this.side - 1]?.[layer]?.[head];
    const said = moved === undefined ? "" : `: ${percent(moved)} of its attention moves in ${labels[this.side]}`;
    return `layer ${layer}, head ${head}${said}`;
  }

  private placeWords(query: number, key: number): string {
    const { names, labels, size } = this.widget.get("_result");
    const name = (place: number) => {
      const at = Math.floor((place * size) / Math.max(1, this.one[0]?.size ?? 1));
      return `“${visible(names[at] ?? "")}” (${at})`;
    };
    if (key > query) return `${name(query)} does not see ${name(key)}, which comes later`;
    const shares = labels.map((label, i) => `${label} ${percent(this.one[i]?.share(query, key) ?? 0)}`);
    return `${name(query)} looks at ${name(key)}: ${shares.join(", ")}`;
  }

  private say(words: string): void {
    this.line.textContent = words;
  }

  private text(): string {
    const { distance, labels } = this.widget.get("_result");
    const rows = distance.flatMap((table, i) =>
      table.flatMap((line, layer) => line.map((moved, head) => [labels[i + 1] ?? "", layer, head, moved])),
    );
    return tsv([["model", "layer", "head", "attention that moves"], ...rows]);
  }

  private picture(): string {
    const shown = this.large.filter((view) => !view.box.hidden);
    return canvasSvg(
      this.largeTitle.textContent ?? "",
      shown.map((view) => ({ name: view.name.textContent ?? "", canvas: view.map.canvas })),
    );
  }
}

function small(pattern: Pattern | undefined): HTMLCanvasElement {
  const size = pattern?.size ?? 1;
  const canvas = h("canvas", { width: size, height: size, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  if (!context || !pattern) return canvas;
  const image = context.createImageData(size, size);
  const pixels = new Uint32Array(image.data.buffer);
  for (let query = 0; query < size; query++)
    for (let key = 0; key <= query; key++) pixels[query * size + key] = SHADES[pattern.byte(query, key)] as number;
  context.putImageData(image, 0, 0);
  return canvas;
}

export default {
  render({ model, el }: { model: AnyModel; el: HTMLElement }) {
    const view = new AttentionViewer(state<AttentionViewState>(model));
    el.append(view.root);
    const undo = watchKernel(view.root, model);
    return () => {
      undo();
      view.close();
    };
  },
};

// AttentionView: a map of the heads by how far their attention moves, the heads of a layer as thumbnails, one head large with its difference.
import type { AttentionViewState, LookedAt, Patterns } from "../protocol.gen";
import type { State } from "../shared/afm";
import { h, setAttributes } from "../shared/dom";
import { percent, visible } from "../shared/format";
import { HeatMap, SHADES, SIGNED, shadePixel } from "../shared/heatmap";
import { Choice, InsideView } from "../shared/inside";
import { roving } from "../shared/roving";
import { snapshot } from "../shared/snapshot";
import { tsv } from "../shared/tools";
import { widget } from "../shared/view";
import { type Pattern, unpacked } from "./patterns";
import { largest, looks, veil } from "./seen";
import "./attention.css";

const WATCHED: (keyof AttentionViewState)[] = [
  ...(["status", "error", "prompt", "side", "layer", "head", "token", "_result", "_heads", "_one", "_share"] as const),
];
const DIFFERENCE = 4; // the colours end at a difference of a quarter
const GAP = 2; // rows between the two patterns of a thumbnail

class AttentionViewer extends InsideView<AttentionViewState> {
  private readonly choice = new Choice("Model", (i) => this.set({ side: i + 1 }));
  private readonly map = new HeatMap(
    (x, y) => this.say(x < 0 ? "" : this.headWords(x, y)),
    (x, y) => this.set({ layer: x, head: y }),
  );
  private readonly mapPart: HTMLElement;
  private readonly thumbs = h("div", { class: "exl2nb-heads", role: "listbox", "aria-label": "Heads of the layer" });
  private readonly absent = h("div", { class: "exl2nb-muted", hidden: true }, "not stored in this page");
  private readonly cells = roving(
    this.thumbs,
    (index) => index >= 0 && this.say(this.headWords(this.layer, index)),
    (index) => this.set({ head: index }),
  );
  private readonly thumbsTitle = h("h4");
  private readonly largeTitle = h("h4");
  private readonly large: { map: HeatMap; name: HTMLElement; box: HTMLElement }[];
  private readonly onePart: HTMLElement;
  private readonly seenTitle = h("h4");
  private readonly words = h("div", { class: "exl2nb-looking", role: "listbox", "aria-label": "Tokens of the question and the answer" });
  private readonly wordCells = roving(
    this.words,
    () => {},
    (index) => this.set({ token: this.firstWord + index }),
  );
  private readonly pictures = h("div", { class: "exl2nb-larges" });
  private readonly seenLine = h("div", { class: "exl2nb-seen-line exl2nb-muted", "aria-live": "polite" });
  private readonly seenPart: HTMLElement;
  private one: Pattern[] = [];

  constructor(widget: State<AttentionViewState>) {
    super(widget, "attention", "Attention view");
    this.large = [0, 1, 2].map(() => this.largeView());
    this.mapPart = this.part(h("h4", {}, "Attention moved: heads down, layers across; darker = more"), this.map.element);
    const thumbs = this.part(this.thumbsTitle, this.thumbs, this.absent);
    const large = h("div", { class: "exl2nb-larges" }, ...this.large.map((view) => view.box));
    this.onePart = this.part(this.largeTitle, large, this.line);
    const taken = { text: () => this.text(), picture: () => snapshot(this.onePart) };
    this.seenPart = this.part(this.seenTitle, this.words, this.pictures, this.seenLine);
    this.build(this.choice, taken, this.mapPart, thumbs, this.seenPart, this.onePart);
    this.begin(WATCHED);
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

  /** The token whose attention the pictures show. */
  private get token(): number {
    const { tokens } = this.widget.get("_result");
    const token = this.widget.get("token");
    return Math.min(tokens - 1, Math.max(0, token < 0 ? tokens + token : token));
  }

  /** The first token after the last picture. */
  private get firstWord(): number {
    return 1 + Math.max(-1, ...this.shownPictures.flatMap((picture) => picture.tokens));
  }

  /** Results that were stored by an earlier version have none. */
  private get shownPictures(): LookedAt[] {
    return this.widget.get("_result").pictures ?? [];
  }

  private get side(): number {
    return Math.min(Math.max(1, this.widget.get("side")), this.widget.get("_result").labels.length - 1);
  }

  /** The heads of the chosen layer: live, or in a page without a kernel from what was stored. */
  private get heads(): Patterns | undefined {
    const found = [...this.widget.get("_heads"), ...this.widget.get("_stored")];
    return found.find((one) => one.layer === this.layer);
  }

  protected draw(): void {
    const result = this.widget.get("_result");
    const { labels, layers, tokens, size } = result;
    const { layer, head, side, heads } = this;
    this.bar.draw();
    this.drawError();
    if (!layers) return;
    this.choice.draw(labels.slice(1), side - 1);
    const averaged = size < tokens ? `, averaged to ${size} × ${size}` : "";
    this.title.textContent = `${labels.length > 1 ? `${labels[side]} against ${labels[0]}` : labels[0]}: ${tokens} tokens${averaged}`;
    const live = this.widget.get("_one").find((one) => one.layer === layer && one.head === head);
    const [fresh, sideChanged, headsChanged, oneChanged, headChanged, tokenChanged] = this.changed(
      ...[result, side, heads, live, head, this.token],
    );
    if (fresh || sideChanged) this.drawMap();
    if (fresh || sideChanged || headsChanged) this.drawThumbs();
    if (fresh || sideChanged || headsChanged || oneChanged || headChanged) this.drawLarge(live);
    if (fresh) this.drawWords();
    if (fresh || sideChanged || headsChanged || oneChanged || headChanged || tokenChanged) this.drawSeen();
    this.map.mark(layer, head);
    this.cells.move(head);
    [...this.thumbs.children].forEach((cell, i) => {
      setAttributes(cell, { "aria-selected": String(i === head) });
    });
  }

  private drawMap(): void {
    const result = this.widget.get("_result");
    this.mapPart.hidden = result.labels.length < 2;
    if (this.mapPart.hidden) return;
    const table = result.distance[this.side - 1] ?? [];
    const most = Math.max(1e-9, ...table.flat());
    this.map.element.style.blockSize = `${Math.min(200, Math.max(48, 14 * result.heads))}px`;
    this.map.draw({
      columns: result.layers,
      rows: result.heads,
      pixel: (x, y) => shadePixel((table[x]?.[y] ?? 0) / most),
      label: `Share of attention moved, up to ${percent(most)}: heads down, layers across`,
    });
  }

  /** The heads of the layer; those of the last one stay until the kernel has sent them. */
  private drawThumbs(): void {
    const found = this.heads;
    const awaited = !found && this.able;
    setAttributes(this.thumbs, { "aria-busy": String(awaited) });
    if (awaited) return;
    const { labels } = this.widget.get("_result");
    const kind = labels.length > 1 ? `: ${labels[0]} above, ${labels[this.side]} below` : "";
    this.thumbsTitle.textContent = `Heads of layer ${this.layer}${kind}`;
    this.thumbs.hidden = !found;
    this.absent.hidden = found !== undefined;
    if (!found) return;
    const models = unpacked(found);
    const shown = labels.length > 1 ? [models[0] ?? [], models[this.side] ?? []] : [models[0] ?? []];
    const cells = (shown[0] ?? []).map((_, head) => {
      const cell = h("div", { role: "option", class: "exl2nb-head", "aria-label": this.headWords(this.layer, head) });
      cell.append(small(shown.map((patterns) => patterns[head])), h("span", { "aria-hidden": "true" }, this.headCaption(head)));
      return cell;
    });
    this.thumbs.replaceChildren(...cells);
    this.cells.set(cells, cells.length);
  }

  private drawLarge(live: Patterns | undefined): void {
    const { labels } = this.widget.get("_result");
    const { layer, head, side } = this;
    const stored = live || !this.heads ? [] : unpacked(this.heads).map((heads) => heads[head]);
    this.one = (live ? unpacked(live).map((heads) => heads[0]) : stored).filter((one): one is Pattern => one !== undefined);
    const [first, other] = [this.one[0], this.one[side]];
    this.largeTitle.textContent = `Layer ${layer}, head ${head}: queries down, keys across`;
    const shaded = (pattern: Pattern | undefined) => (key: number, query: number) => SHADES[pattern?.byte(query, key) ?? 0] as number;
    this.show(0, labels[0] ?? "", first, shaded(first));
    this.show(1, labels[side] ?? "", side > 0 ? other : undefined, shaded(other));
    const both = first && other && side > 0 ? first : undefined;
    const step = (query: number, key: number) => DIFFERENCE * ((other?.share(query, key) ?? 0) - (first?.share(query, key) ?? 0));
    this.show(2, `${labels[side]} − ${labels[0]}: blue more, red less`, both, (key, query) => {
      return SIGNED[255 + Math.round(255 * Math.min(1, Math.max(-1, step(query, key))))] as number;
    });
  }

  private drawWords(): void {
    const { names, size, tokens } = this.widget.get("_result");
    this.seenPart.hidden = !this.shownPictures.length;
    if (this.seenPart.hidden) return;
    const { firstWord } = this;
    const cells = Array.from({ length: tokens - firstWord }, (_, i) => {
      const name = visible(names[Math.floor(((firstWord + i) * size) / tokens)] ?? "");
      return h("span", { role: "option", class: "exl2nb-look" }, size === tokens ? name : `${firstWord + i}`);
    });
    this.words.replaceChildren(...cells);
    this.wordCells.set(cells, cells.length);
  }

  /** The pictures as the model saw them, dark where the token does not look: of the reference, and of the model compared with it. */
  private drawSeen(): void {
    const { answer, labels, tokens } = this.widget.get("_result");
    const pictures = this.shownPictures;
    if (!pictures.length) return;
    const { firstWord, layer, head, side, token } = this;
    this.seenTitle.textContent = `Layer ${layer}, head ${head}: where ${this.word(token)} looks`;
    [...this.words.children].forEach((cell, i) => {
      setAttributes(cell, {
        "aria-selected": String(firstWord + i === token),
        "data-answer": String(answer >= 0 && firstWord + i >= answer),
      });
    });
    this.wordCells.move(token - firstWord);
    const shown = labels.length > 1 ? [0, side] : [0];
    const boxes = pictures.flatMap((picture, number) =>
      shown.flatMap((model) => {
        const pattern = this.one[model];
        if (!pattern) return [];
        const shares = looks(pattern, picture, token, tokens);
        const most = Math.max(0, ...shares);
        const label = [pictures.length > 1 ? `picture ${number + 1}` : "", labels.length > 1 ? (labels[model] ?? "") : ""];
        const name = label.filter(Boolean).join(", ");
        const map = new HeatMap((x, y) => this.saySeen(x < 0 ? "" : this.patchWords(name, picture.columns, shares, x, y)));
        map.draw({
          columns: picture.columns,
          rows: picture.rows,
          pixel: (x, y) => veil(shares[y * picture.columns + x] ?? 0, most),
          label: this.lookWords(name, picture.columns, shares),
        });
        const image = h("img", { src: picture.url, alt: `Picture ${number + 1} as the model saw it` });
        const stack = h("div", { class: "exl2nb-seen", style: `aspect-ratio: ${picture.columns} / ${picture.rows}` }, image, map.element);
        const words = h("div", { class: "exl2nb-large-name" }, this.lookWords(name, picture.columns, shares));
        return [h("div", { class: "exl2nb-large" }, stack, words)];
      }),
    );
    this.pictures.replaceChildren(...boxes);
  }

  private saySeen(words: string): void {
    if (this.seenLine.textContent !== words) this.seenLine.textContent = words;
  }

  private word(token: number): string {
    const { names, size, tokens } = this.widget.get("_result");
    return `“${visible(names[Math.floor((token * size) / tokens)] ?? "")}” (${token})`;
  }

  private lookWords(name: string, columns: number, shares: readonly number[]): string {
    const best = largest(shares);
    const all = shares.reduce((sum, share) => sum + share, 0);
    const most = `most at row ${Math.floor(best / columns) + 1}, column ${(best % columns) + 1}: ${percent(shares[best] ?? 0)}`;
    return `${name ? `${name}: ` : ""}${percent(all)} of its attention is on the picture, ${most}`;
  }

  private patchWords(name: string, columns: number, shares: readonly number[], x: number, y: number): string {
    const share = percent(shares[y * columns + x] ?? 0);
    return `${name ? `${name}: ` : ""}row ${y + 1}, column ${x + 1} gets ${share} of the attention of ${this.word(this.token)}`;
  }

  private show(at: number, name: string, pattern: Pattern | undefined, pixel: (key: number, query: number) => number): void {
    const view = this.large[at];
    if (!view) return;
    view.box.hidden = !pattern;
    if (!pattern) return;
    view.name.textContent = name;
    const rows = at === 2 ? Math.min(...this.one.map((one) => one.rows)) : pattern.rows;
    view.map.draw({
      columns: pattern.size,
      rows: pattern.size,
      pixel: (key, query) => (key > query || query >= rows ? 0 : pixel(key, query)),
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
    const said = moved === undefined ? "" : `, ${labels[this.side]}: ${percent(moved)} of its attention moved`;
    return `layer ${layer}, head ${head}${said}`;
  }

  private placeWords(query: number, key: number): string {
    const { names, labels, size } = this.widget.get("_result");
    const name = (place: number) => {
      const at = Math.floor((place * size) / Math.max(1, this.one[0]?.size ?? 1));
      return `“${visible(names[at] ?? "")}” (${at})`;
    };
    if (key > query) return `${name(query)} cannot attend to ${name(key)}: it comes later`;
    const shares = labels.map((label, i) => `${label} ${percent(this.one[i]?.share(query, key) ?? 0)}`);
    return `${name(query)} attends to ${name(key)}: ${shares.join(", ")}`;
  }

  private text(): string {
    const { distance, labels } = this.widget.get("_result");
    const rows = distance.flatMap((table, i) =>
      table.flatMap((line, layer) => line.map((moved, head) => [labels[i + 1] ?? "", layer, head, moved])),
    );
    return tsv([["model", "layer", "head", "attention moved"], ...rows]);
  }
}

/** Patterns below each other, a pixel a place. */
function small(patterns: (Pattern | undefined)[]): HTMLCanvasElement {
  const size = patterns[0]?.size ?? 1;
  const height = patterns.length * (size + GAP) - GAP;
  const canvas = h("canvas", { width: size, height, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  if (!context) return canvas;
  const image = context.createImageData(size, height);
  const pixels = new Uint32Array(image.data.buffer);
  patterns.forEach((pattern, i) => {
    const top = i * (size + GAP) * size;
    for (let query = 0; query < (pattern?.rows ?? 0); query++)
      for (let key = 0; key <= query; key++) pixels[top + query * size + key] = SHADES[pattern?.byte(query, key) ?? 0] as number;
  });
  context.putImageData(image, 0, 0);
  return canvas;
}

export default widget(AttentionViewer);

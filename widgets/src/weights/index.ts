// WeightBrowser: choose a place in the file, see its words, codes, scale and weights, and follow one value through them.
import type { Look, WeightSlice, WeightsState } from "../protocol.gen";
import type { State } from "../shared/afm";
import { h, setAttributes, uniqueId } from "../shared/dom";
import { percent } from "../shared/format";
import { colour, css, ink } from "../shared/palette";
import { type Roving, roving } from "../shared/roving";
import { standalone, tools, tsv } from "../shared/tools";
import { View, widget } from "../shared/view";
import { LevelsView } from "./chart";
import { binary, describe, errorWords, hex, pieces, relativeError, short, signed } from "./stages";
import { fieldColour, WordsView } from "./words";
import "./weights.css";

const COLUMNS = 8;
const WATCHED: (keyof WeightsState)[] = [
  ...(["status", "error", "title", "layer", "matrix", "group", "unit", "column", "value"] as const),
  ...(["_layers", "_matrices", "_runs", "_slice", "_original"] as const),
];
type Place = Omit<Look, "type">;

class WeightsView extends View<WeightsState> {
  private readonly title = h("b");
  private readonly facts = h("span", { class: "exl2nb-muted" });
  private readonly layer = h("select", { id: uniqueId("layer") });
  private readonly matrix = h("select", { id: uniqueId("matrix") });
  private readonly numbers: Record<"group" | "unit" | "column", HTMLInputElement>;
  private readonly hints: Record<"group" | "unit" | "column", HTMLElement>;
  private readonly strip = h("div", { class: "exl2nb-runs", role: "img" });
  private readonly words: WordsView;
  private readonly scale = h("div", { class: "exl2nb-scale" });
  private readonly levels: LevelsView;
  private readonly legend = h("div", { class: "exl2nb-muted" });
  private readonly trace = h("div", { class: "exl2nb-trace" });
  private readonly grid = h("div", { class: "exl2nb-values", role: "grid", "aria-label": "The 32 weights, in file order" });
  private readonly walk: Roving;
  private unitField = h("div");
  private cells: HTMLElement[] = [];
  private drawn: WeightSlice | null = null;
  private pointed = -1;

  constructor(browser: State<WeightsState>) {
    super(browser, "weights", "Weight browser");
    const point = (value: number) => this.point(value);
    const choose = (value: number) => this.choose(value);
    this.words = new WordsView(point, choose);
    this.levels = new LevelsView(point, choose);
    this.walk = roving(this.grid, point, choose);
    this.hints = {
      group: h("span", { class: "exl2nb-muted" }),
      unit: h("span", { class: "exl2nb-muted" }),
      column: h("span", { class: "exl2nb-muted" }),
    };
    this.numbers = { group: this.number("group"), unit: this.number("unit"), column: this.number("column") };
    this.root.append(this.card(), this.spoken);
    this.listen();
    this.begin(WATCHED);
  }

  private card(): HTMLElement {
    const fixed = this.widget.get("_static");
    const field = (label: string, input: HTMLElement, hint?: HTMLElement) =>
      h("div", { class: "exl2nb-field" }, h("label", { for: input.id }, label), input, ...(hint ? [hint] : []));
    this.unitField = field("32 rows", this.numbers.unit, this.hints.unit);
    const places = h(
      "div",
      { class: "exl2nb-places" },
      field("Layer", this.layer),
      field("Matrix", this.matrix),
      field("Group", this.numbers.group, this.hints.group),
      this.unitField,
      field("Column", this.numbers.column, this.hints.column),
    );
    for (const input of [this.layer, this.matrix, ...Object.values(this.numbers)]) input.disabled = fixed;
    const stage = (name: string, note: string, ...children: (HTMLElement | SVGElement)[]) =>
      h("div", { class: "exl2nb-stage" }, h("div", {}, h("b", {}, name), h("span", { class: "exl2nb-muted" }, ` ${note}`)), ...children);
    return h(
      "div",
      { class: "exl2nb-card" },
      h(
        "div",
        { class: "exl2nb-head" },
        this.title,
        this.facts,
        tools("weights", { text: () => this.text(), picture: () => this.picture() }),
      ),
      places,
      this.strip,
      this.error,
      stage("1. Words", "bit 31 first; codes fill each word from the low end. Red: negative, blue: positive", this.words.element),
      stage("2. Scale", "one 4-bit index per group and column, one maximum per group", this.scale),
      stage("3. Weights", "level × step", this.legend, this.levels.element as SVGSVGElement, this.grid),
      this.trace,
    );
  }

  private text(): string {
    const { rows, codes, zero, weights, original } = this.widget.get("_slice");
    const lines = rows.map((row, i) => [row, codes[i] as number, (codes[i] as number) - zero, weights[i] as number, original[i] ?? null]);
    return tsv([["row", "code", "level", "weight", "original"], ...lines]);
  }

  private picture(): string {
    return standalone(this.levels.element);
  }

  private number(name: "group" | "unit" | "column"): HTMLInputElement {
    const input = h("input", { type: "number", id: uniqueId(name), min: 0, step: 1 });
    input.addEventListener("change", () => {
      const typed = Math.round(Number(input.value));
      if (input.value.trim() === "" || !Number.isFinite(typed)) return this.draw();
      this.look({ [name]: Math.min(Math.max(0, typed), Number(input.max)), ...(name === "group" ? { unit: 0 } : {}) });
    });
    return input;
  }

  private listen(): void {
    this.layer.addEventListener("change", () => this.look({ layer: Number(this.layer.value) }));
    this.matrix.addEventListener("change", () => this.look({ matrix: this.matrix.value, group: 0, unit: 0 }));
  }

  private look(change: Partial<Place>): void {
    const get = this.widget.get;
    const now: Place = { layer: get("layer"), matrix: get("matrix"), group: get("group"), unit: get("unit"), column: get("column") };
    this.widget.send({ type: "look", ...now, ...change });
  }

  private point(value: number): void {
    if (value === this.pointed) return;
    this.pointed = value;
    this.mark();
  }

  private choose(value: number): void {
    this.pointed = -1;
    this.widget.set("value", value);
    this.widget.save();
    this.walk.move(value, true); // the arrow keys go on from there
    this.mark();
    this.spoken.textContent = describe(this.widget.get("_slice"), value);
  }

  protected draw(): void {
    const get = this.widget.get;
    const slice = get("_slice");
    this.drawError();
    this.title.textContent = get("title");
    this.facts.textContent = `${get("_rows")} × ${get("_columns")}, ${get("_bpw").toFixed(3)} bits per weight${get("_original") ? `; original: ${get("_original")}` : ""}`;
    options(this.layer, get("_layers").map(String), String(get("layer")), (value) => (value === "-1" ? "none" : value));
    options(this.matrix, get("_matrices"), get("matrix"), (value) => value);
    this.drawPlace(slice);
    if (this.drawn !== slice) {
      this.drawn = slice;
      this.words.draw(slice);
      this.levels.draw(slice);
      this.drawScale(slice);
      this.drawValues(slice);
    }
    this.mark();
  }

  private drawPlace(slice: WeightSlice): void {
    const get = this.widget.get;
    const runs = get("_runs");
    const ends = { group: runs.reduce((sum, run) => sum + run[2], 0) - 1, unit: get("_units") - 1, column: get("_columns") - 1 };
    for (const name of ["group", "unit", "column"] as const) {
      setAttributes(this.numbers[name], { max: ends[name] });
      this.numbers[name].value = String(get(name));
      this.hints[name].textContent = `0 to ${ends[name]}`;
    }
    this.unitField.hidden = ends.unit === 0;
    const total = get("_rows");
    const marker = h("i", { class: "exl2nb-here" });
    marker.style.insetInlineStart = `${(100 * (slice.first_row + 16)) / total}%`;
    const bars = runs.map(([bits, rows, n]) => {
      const back = colour(bits);
      const bar = h("span", {}, String(bits));
      bar.style.cssText = `flex:${rows * n} ${rows * n} 0;background-color:${css(back)};color:${ink(back)};--n:${n}`;
      return bar;
    });
    this.strip.replaceChildren(h("div", {}, ...bars), marker);
    const where = `stored rows ${slice.first_row} to ${slice.first_row + 31} of ${total}, in a group of ${slice.bits} bits`;
    setAttributes(this.strip, { "aria-label": where, title: where });
  }

  private drawScale(slice: WeightSlice): void {
    const nibble = slice.column % 8;
    const digits = slice.scale_word.toString(16).toUpperCase().padStart(8, "0").split("");
    const word = h("code", {}, "0x", ...digits.map((digit, i) => (7 - i === nibble ? h("mark", {}, digit) : digit)));
    const index = h(
      "div",
      {},
      "index ",
      h("b", {}, String(slice.scale_index)),
      `: hex digit ${nibble} from the right of `,
      word,
      `, for column ${slice.column}`,
    );
    const largest = h("div", {}, "scale max ", h("b", {}, short(slice.scale_max)));
    const step = h("div", {}, `step = (${slice.scale_index} + 1)² × ${short(slice.scale_max)} / 256 = `, h("b", {}, short(slice.step)));
    this.scale.replaceChildren(index, largest, step);
    const error = relativeError(slice);
    const dots = h("span", { class: "exl2nb-dot", "aria-hidden": "true" });
    const ring = h("span", { class: "exl2nb-dot exl2nb-hollow", "aria-hidden": "true" });
    this.legend.replaceChildren(dots, " quantised", ...(error === null ? [] : [ring, ` original; relative error ${percent(error)}`]));
  }

  private drawValues(slice: WeightSlice): void {
    this.cells = slice.codes.map((code, i) => {
      const back = fieldColour(slice, i);
      const chip = h("span", { class: "exl2nb-code" }, signed(code - slice.zero));
      chip.style.cssText = `background:${css(back)};color:${ink(back)}`;
      const cell = h("div", { role: "gridcell", "aria-label": describe(slice, i) }, chip, h("span", {}, short(slice.weights[i] as number)));
      return cell;
    });
    const rows = [];
    for (let first = 0; first < this.cells.length; first += COLUMNS)
      rows.push(h("div", { role: "row" }, ...this.cells.slice(first, first + COLUMNS)));
    this.grid.replaceChildren(...rows);
    this.walk.set(this.cells, COLUMNS);
    this.walk.move(this.widget.get("value"));
  }

  private mark(): void {
    const slice = this.widget.get("_slice");
    const value = this.pointed >= 0 ? this.pointed : this.widget.get("value");
    this.words.mark(value);
    this.levels.mark(value);
    this.cells.forEach((cell, i) => {
      setAttributes(cell, { "aria-selected": String(i === this.widget.get("value")) });
      cell.classList.toggle("exl2nb-on", i === value);
    });
    this.drawTrace(slice, value);
  }

  private drawTrace(slice: WeightSlice, i: number): void {
    const code = slice.codes[i] as number;
    const lies = pieces(i, slice.bits).map(
      ({ word, low, high }) => `word ${slice.first_word + word}, bits ${high === low ? high : `${high}–${low}`}`,
    );
    const back = fieldColour(slice, i);
    const chip = h("code", {}, binary(code, slice.bits));
    chip.style.cssText = `background:${css(back)};color:${ink(back)}`;
    const box = (name: string, ...what: (Node | string)[]) =>
      h("div", {}, h("span", { class: "exl2nb-muted" }, name), h("div", {}, ...what));
    const boxes = [
      box(`row ${slice.rows[i]}, stored as ${slice.first_row + i}`, lies.join(" and ")),
      box("bits", chip),
      box("code", h("b", {}, String(code))),
      box("level", `${code} − ${slice.zero} = `, h("b", {}, signed(code - slice.zero))),
      box("weight", `${signed(code - slice.zero)} × ${short(slice.step)} = `, h("b", {}, short(slice.weights[i] as number))),
    ];
    const original = slice.original[i];
    if (original !== undefined) boxes.push(box("original", short(original)), box("error", errorWords(slice, i)));
    this.trace.replaceChildren(...boxes);
    setAttributes(this.trace, { title: `fp16 weight ${slice.weights[i]}; step ${slice.step}; scale word ${hex(slice.scale_word)}` });
  }
}

function options(select: HTMLSelectElement, values: string[], chosen: string, name: (value: string) => string): void {
  const key = values.join("\n");
  if (select.dataset.key !== key) {
    select.dataset.key = key;
    select.replaceChildren(...values.map((value) => h("option", { value }, name(value))));
  }
  select.value = chosen;
}

export default widget(WeightsView);

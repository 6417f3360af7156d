// WeightHistogram: for each model the group that a row lies in: values before and after, codes, scales of the columns.
import type { GroupHistogram, WeightHistogramState } from "../protocol.gen";
import type { State } from "../shared/afm";
import { Asker } from "../shared/asker";
import { h, setAttributes, uniqueId } from "../shared/dom";
import { percent } from "../shared/format";
import { Plot } from "../shared/plot";
import { standalone, tools, tsv } from "../shared/tools";
import { View, widget } from "../shared/view";
import "./histogram.css";

const WATCHED: (keyof WeightHistogramState)[] = ["status", "error", "layer", "matrix", "row", "_groups", "_matrices", "_rows"];

interface Place {
  layer: number;
  matrix: string;
  row: number;
}

class GroupView {
  readonly element = h("div", { class: "exl2nb-group" });
  readonly values: Plot;
  private readonly codes: Plot;
  private readonly scales: Plot;
  private readonly name = h("h4");
  private readonly facts = h("p", { class: "exl2nb-muted" });
  private group: GroupHistogram | null = null;

  constructor(say: (words: string) => void) {
    const spoken = (words: (place: number) => string) => (place: number) => say(place < 0 ? "" : words(place));
    this.values = new Plot(
      spoken((bin) => this.valueWords(bin)),
      () => {},
      460,
      150,
    );
    this.codes = new Plot(
      spoken((code) => this.codeWords(code)),
      () => {},
      460,
      130,
    );
    this.scales = new Plot(
      spoken((index) => this.scaleWords(index)),
      () => {},
      460,
      90,
    );
    this.element.append(this.name, this.facts, h("h5", {}, "Values"), this.values.element, this.values.legend);
    this.element.append(
      h("h5", {}, "Codes"),
      this.codes.element,
      this.codes.legend,
      h("h5", {}, "Scales: columns by scale index"),
      this.scales.element,
    );
  }

  draw(group: GroupHistogram): void {
    this.group = group;
    const { bits, before, after, codes, nearest, scales, low, high } = group;
    this.name.textContent = group.label;
    const known = group.error === null ? "" : `relative error ${percent(group.error)}, ${percent(group.clipped ?? 0)} clipped; `;
    const size = `${group.rows} rows × ${group.columns} columns`;
    this.facts.textContent = `Group ${group.group} (0 to ${group.groups - 1}) of ${bits}-bit codes: ${size}; ${known}code entropy ${group.entropy.toFixed(2)} of ${bits} bits`;
    const middle = (i: number) => low + ((i + 0.5) * (high - low)) / after.length;
    const whole = (value: number) => (value >= 10_000 ? `${(value / 1000).toFixed(0)}k` : String(Math.round(value)));
    const series = [{ name: "stored", values: after, style: 0 }];
    this.values.draw({
      label: `Values of ${group.label}`,
      series: before.length ? [...series, { name: "original", values: before, style: 1 }] : series,
      places: after.map((_, i) => Number(middle(i).toPrecision(2)).toString().replace("-", "−")),
      format: whole,
      words: (bin) => this.valueWords(bin),
      low: 0,
    });
    const stored = { name: "stored codes", values: codes, style: 0 };
    this.codes.draw({
      label: `Codes of ${group.label}`,
      series: nearest.length ? [stored, { name: "nearest level", values: nearest, style: 1 }] : [stored],
      places: codes.map((_, code) => String(code - 2 ** (bits - 1)).replace("-", "−")),
      format: whole,
      words: (code) => this.codeWords(code),
      bars: true,
      low: 0,
    });
    this.scales.draw({
      label: `Columns of ${group.label} by scale index`,
      series: [{ name: "columns", values: scales, style: 2 }],
      places: scales.map((_, index) => String(index)),
      format: whole,
      words: (index) => this.scaleWords(index),
      bars: true,
      low: 0,
    });
  }

  private valueWords(bin: number): string {
    const { low = 0, high = 0, before = [], after = [] } = this.group ?? {};
    const width = (high - low) / Math.max(1, after.length);
    const [from, to] = [low + bin * width, low + (bin + 1) * width];
    const original = before.length ? `, ${before[bin]} in the original` : "";
    return `${from.toPrecision(3)} to ${to.toPrecision(3)}: ${after[bin] ?? 0} stored values${original}`;
  }

  private codeWords(code: number): string {
    const { bits = 1, codes = [], nearest = [] } = this.group ?? {};
    const rounded = nearest.length ? `; ${nearest[code]} by rounding to the nearest level` : "";
    return `code ${code}, level ${code - 2 ** (bits - 1)}: stored ${codes[code] ?? 0} times${rounded}`;
  }

  private scaleWords(index: number): string {
    return `scale index ${index}: ${this.group?.scales[index] ?? 0} columns, step ${(index + 1) ** 2} / 256 of the group's scale max`;
  }
}

class WeightHistogramView extends View<WeightHistogramState> {
  private readonly layer = h("select", { id: uniqueId("layer") });
  private readonly matrix = h("select", { id: uniqueId("matrix") });
  private readonly row = h("input", { type: "number", id: uniqueId("row"), min: 0, step: 1 });
  private readonly line = h("div", { class: "exl2nb-inside-line exl2nb-muted", "aria-live": "polite" });
  private readonly groups = h("div", { class: "exl2nb-groups" });
  private readonly asker: Asker<Place>;
  private views: GroupView[] = [];

  constructor(widget: State<WeightHistogramState>) {
    super(widget, "histogram", "Weight histogram");
    this.asker = new Asker((place) => widget.send({ type: "place", ...place }));
    const field = (name: string, control: HTMLElement) =>
      h("span", { class: "exl2nb-field" }, h("label", { for: control.id }, name), control);
    const fields = h(
      "div",
      { class: "exl2nb-inside-right" },
      field("Layer", this.layer),
      field("Matrix", this.matrix),
      field("Row", this.row),
    );
    const taken = tools("histogram", { text: () => this.text(), picture: () => this.picture() });
    const original = widget.get("_original");
    const title = h("b", {}, original ? `Weights, compared with ${original}` : "Weights");
    const head = h("div", { class: "exl2nb-inside-head" }, title, taken);
    const top = h("div", { class: "exl2nb-inside-part" }, fields);
    const body = h("div", { class: "exl2nb-inside-part" }, this.groups, this.line);
    this.root.append(h("div", { class: "exl2nb-card" }, head, this.error, top, body));
    for (const control of [this.layer, this.matrix, this.row]) control.addEventListener("change", () => this.go());
    const answered = widget.observe(["_groups"], () => this.asker.answered());
    this.begin(WATCHED, answered, () => this.asker.close());
  }

  private go(): void {
    const row = Math.min(Math.max(0, Math.round(Number(this.row.value)) || 0), Math.max(0, this.widget.get("_rows") - 1));
    this.asker.want({ layer: Number(this.layer.value), matrix: this.matrix.value, row });
  }

  protected draw(): void {
    const get = this.widget.get;
    options(
      this.layer,
      get("_layers").map((layer) => [String(layer), layer < 0 ? "outside" : String(layer)]),
      String(get("layer")),
    );
    options(
      this.matrix,
      get("_matrices").map((name) => [name, name]),
      get("matrix"),
    );
    if (document.activeElement !== this.row) this.row.value = String(get("row"));
    setAttributes(this.row, { max: get("_rows") - 1 });
    for (const control of [this.layer, this.matrix, this.row]) control.disabled = get("_static");
    const groups = get("_groups");
    if (this.views.length !== groups.length) {
      this.views = groups.map(
        () =>
          new GroupView((words) => {
            this.line.textContent = words;
          }),
      );
      this.groups.replaceChildren(...this.views.map((view) => view.element));
    }
    groups.forEach((group, i) => {
      this.views[i]?.draw(group);
    });
    this.drawError();
  }

  private text(): string {
    const rows = this.widget
      .get("_groups")
      .flatMap((one) =>
        one.codes.map((count, code) => [one.label, one.bits, code, code - 2 ** (one.bits - 1), count, one.nearest[code] ?? null]),
      );
    return tsv([["model", "bits", "code", "level", "stored", "nearest level"], ...rows]);
  }

  private picture(): string {
    const [first] = this.views;
    return first ? standalone(first.values.svg) : "";
  }
}

function options(select: HTMLSelectElement, entries: [string, string][], value: string): void {
  const names = entries.map(([name]) => name).join("\n");
  if (select.dataset.names !== names) {
    select.dataset.names = names;
    select.replaceChildren(...entries.map(([name, words]) => h("option", { value: name }, words)));
  }
  if (select.value !== value) select.value = value;
}

export default widget(WeightHistogramView);

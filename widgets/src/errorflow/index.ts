// ErrorFlow: the residual stream's error through depth, every matrix's error as a map, and what a layer is worth when it is patched back.
import type { ErrorFlowState, FlowResult } from "../protocol.gen";
import type { State } from "../shared/afm";
import { BitGridView, type Paint, type Place } from "../shared/bitgrid";
import { h, setAttributes } from "../shared/dom";
import { Choice, InsideView } from "../shared/inside";
import { css, shade } from "../shared/palette";
import { Plot } from "../shared/plot";
import { standalone, tsv } from "../shared/tools";
import { widget } from "../shared/view";
import { fall, sentence, share } from "./words";
import "./errorflow.css";

const WATCHED: (keyof ErrorFlowState)[] = ["status", "error", "prompt", "side", "layer", "height", "_result", "_share"];

class ErrorFlowView extends InsideView<ErrorFlowState> {
  private readonly choice = new Choice("Model", (i) => this.set({ side: i + 1 }));
  private readonly flow = new Plot(
    (place) => this.say(place < 0 ? "" : this.flowWords(place)),
    (place) => place > 0 && this.set({ layer: Math.floor((place - 1) / 2) }),
  );
  private readonly grid = new BitGridView(
    (place) => {
      this.row = place?.matrix ?? this.row;
      this.set({ layer: place ? place.layer : -1 });
    },
    (index) => this.say(index < 0 ? "" : this.paint(index).label),
    "Relative error: outputs down, layers across",
  );
  private readonly scale = h("span", { class: "exl2nb-inside-ramp", "aria-hidden": "true" });
  private readonly scaleWords = h("span", { class: "exl2nb-muted" });
  private readonly scroll = h("div", { class: "exl2nb-grid-scroll" }, this.grid.element);
  private readonly detail = h("div", { class: "exl2nb-inside-part", "aria-live": "polite" });
  private readonly words = [h("p"), h("p"), h("p")];
  private readonly back = h("button", { type: "button", class: "exl2nb-button" });
  private readonly all = h("button", { type: "button", class: "exl2nb-button" }, "Patch each layer in turn");
  private readonly worth = new Plot(
    (place) => this.say(place < 0 ? "" : this.worthWords(place)),
    (place) => place >= 0 && this.set({ layer: place }),
    760,
    120,
  );
  private readonly worthBox: HTMLElement;
  private most = 1;
  private row = "";

  constructor(widget: State<ErrorFlowState>) {
    super(widget, "errorflow", "Error flow");
    const legend = h("div", { class: "exl2nb-inside-legend" }, h("span", { class: "exl2nb-muted" }, "0"), this.scale, this.scaleWords);
    const stream = this.part(h("h4", {}, "Relative error of the residual stream"), this.flow.element, this.flow.legend);
    const map = this.part(h("h4", {}, "Relative error of each output"), this.scroll, legend, this.line);
    this.detail.append(...this.words);
    this.worthBox = this.part(h("h4", {}, "KL reduction when one layer is patched back"), this.worth.element);
    const foot = this.part(h("div", { class: "exl2nb-inside-actions" }, this.back, this.all));
    foot.hidden = !this.able;
    const taken = { text: () => this.text(), picture: () => standalone(this.flow.svg) };
    this.build(this.choice, taken, stream, map, this.detail, foot, this.worthBox);
    this.back.addEventListener("click", () => this.patch(this.chosen));
    this.all.addEventListener("click", () => this.patch(-1));
    this.begin(WATCHED);
  }

  private get result(): FlowResult {
    return this.widget.get("_result");
  }

  /** Index among the models after the reference. */
  private get at(): number {
    return Math.min(Math.max(0, this.widget.get("side") - 1), Math.max(0, this.result.labels.length - 2));
  }

  private get chosen(): number {
    return Math.min(this.widget.get("layer"), this.result.layers - 1);
  }

  private patch(layer: number): void {
    if (!this.able || this.bar.running) return;
    this.widget.send({ type: "patch", layer });
  }

  protected draw(): void {
    const { result, at, chosen } = this;
    const names = result.labels.slice(1);
    this.bar.draw();
    this.drawError();
    this.choice.draw(names, at);
    this.title.textContent = names.length
      ? `${names[at]} against ${result.labels[0]}: mean KL ${result.kl[at]?.toPrecision(3) ?? ""}`
      : "Error flow";
    this.scroll.style.maxHeight = String(this.widget.get("height"));
    const [fresh, side] = this.changed(result, at);
    if (fresh) this.drawFlow();
    if (fresh || side) this.drawMap(fresh);
    this.flow.mark(chosen < 0 ? -1 : 2 * chosen + 2);
    this.grid.mark(
      chosen < 0
        ? null
        : { layer: chosen, matrix: result.rows.includes(this.row) ? this.row : (result.rows[result.rows.length - 1] ?? "") },
    );
    this.drawDetail();
    if (fresh || side) this.drawWorth();
    this.worth.mark(chosen);
  }

  private drawFlow(): void {
    const { result } = this;
    const places = ["in", ...Array.from({ length: 2 * result.layers }, (_, i) => (i % 2 ? "" : String(i / 2)))];
    this.flow.draw({
      label: "Relative error of the residual stream by layer",
      series: result.flow.map((values, i) => ({ name: result.labels[i + 1] ?? "", values, style: i })),
      places: places.map((name, i) => (i % 2 === 0 && i ? String(i / 2 - 1) : i ? "" : name)),
      format: share,
      words: (place) => this.flowWords(place),
      low: 0,
    });
  }

  private flowWords(place: number): string {
    const { result } = this;
    const where = place === 0 ? "before layer 0" : `layer ${Math.floor((place - 1) / 2)}, after ${place % 2 ? "attention" : "the MLP"}`;
    return `${where}: ${result.flow.map((values, i) => `${result.labels[i + 1]} ${share(values[place] ?? null)}`).join(", ")}`;
  }

  private get places(): Place[] {
    const { rows, layers } = this.result;
    return rows.flatMap((matrix) => Array.from({ length: layers }, (_, layer) => ({ layer, matrix })));
  }

  private drawMap(fresh: boolean | undefined): void {
    const { result, at } = this;
    if (fresh)
      this.grid.build(
        result.rows,
        Array.from({ length: result.layers }, (_, i) => i),
        this.places,
      );
    const known = (result.errors[at] ?? []).flat().filter((value): value is number => value !== null);
    this.most = Math.max(1e-9, ...known);
    this.grid.paint((index) => this.paint(index));
    const stops = Array.from({ length: 9 }, (_, i) => css(shade(i / 8)));
    this.scale.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    this.scaleWords.textContent = `${share(this.most)} of the reference's norm, mean over ${result.tokens} tokens`;
  }

  private paint(index: number): Paint {
    const { result, at } = this;
    const [row, layer] = [Math.floor(index / Math.max(1, result.layers)), index % Math.max(1, result.layers)];
    const value = result.errors[at]?.[row]?.[layer] ?? null;
    const label = `layer ${layer}, ${result.rows[row]}: ${value === null ? "not in this layer" : share(value)}`;
    if (value === null) return { text: "", colour: null, label };
    return { text: (100 * value).toFixed(value < 0.0995 ? 1 : 0), colour: shade(value / this.most), label };
  }

  private drawDetail(): void {
    const { result, at, chosen } = this;
    const [attention, mlp, worth] = this.words as unknown as [HTMLElement, HTMLElement, HTMLElement];
    this.detail.hidden = chosen < 0 && !result.layers;
    this.back.hidden = chosen < 0;
    setAttributes(this.back, { "aria-disabled": String(this.bar.running) });
    setAttributes(this.all, { "aria-disabled": String(this.bar.running) });
    if (chosen < 0) {
      attention.textContent = "Choose a layer in the curve or in the map.";
      mlp.textContent = worth.textContent = "";
      return;
    }
    attention.textContent = `Layer ${chosen}. ${sentence(result, at, chosen, 0)}`;
    mlp.textContent = sentence(result, at, chosen, 1);
    this.back.textContent = `Patch layer ${chosen} back to ${result.labels[0]}`;
    const left = this.left(chosen);
    worth.textContent = left === null ? "" : `With only this layer patched back: ${fall(result.kl[at] ?? 0, left)}.`;
  }

  private left(layer: number): number | null {
    return this.result.patched.find(([side, number]) => side === this.at + 1 && number === layer)?.[2] ?? null;
  }

  private drawWorth(): void {
    const { result, at } = this;
    const known = result.patched.filter(([side]) => side === at + 1);
    this.worthBox.hidden = known.length === 0;
    if (!known.length) return;
    const values = Array.from({ length: result.layers }, (_, layer) => {
      const left = this.left(layer);
      return left === null ? null : (result.kl[at] ?? 0) - left;
    });
    this.worth.draw({
      label: "KL reduction by layer patched back",
      series: [{ name: "KL reduction", values, style: 0 }],
      places: values.map((_, i) => String(i)),
      format: (value) => String(Number(value.toPrecision(2))).replace("-", "−"),
      words: (place) => this.worthWords(place),
      bars: true,
      low: 0,
      high: 0,
    });
  }

  private worthWords(layer: number): string {
    const left = this.left(layer);
    return `layer ${layer} patched back: ${left === null ? "not measured" : fall(this.result.kl[this.at] ?? 0, left)}`;
  }

  private text(): string {
    const { result, at } = this;
    const layers = Array.from({ length: result.layers }, (_, layer) => layer);
    const head = ["layer", ...result.rows, "KL if patched back"];
    return tsv([
      head,
      ...layers.map((layer) => [layer, ...result.rows.map((_, row) => result.errors[at]?.[row]?.[layer] ?? null), this.left(layer)]),
    ]);
  }
}

export default widget(ErrorFlowView);

// LoraExplorer: how much an adapter changes every matrix, a slider for its scale, and the answer beside the model's own.
import type { KlToken, LoraCell, LoraExplorerState, LoraResult } from "../protocol.gen";
import type { State } from "../shared/afm";
import { AnswerGroup, klLegend } from "../shared/answers";
import { BitGridView, type Paint, type Place } from "../shared/bitgrid";
import { h, setAttributes, uniqueId } from "../shared/dom";
import { Choice, InsideView } from "../shared/inside";
import { firstDifference, klText, summary } from "../shared/kl";
import { mapSvg } from "../shared/mapsvg";
import { css, shade } from "../shared/palette";
import { tsv } from "../shared/tools";
import { widget } from "../shared/view";
import "./lora.css";

const WATCHED: (keyof LoraExplorerState)[] = ["status", "error", "prompt", "scale", "selected", "height", "_result", "_share"];
const [LOW, HIGH, STEP] = [0, 2, 0.05];

class LoraView extends InsideView<LoraExplorerState> {
  private readonly grid = new BitGridView(
    (place) => this.select(place),
    (index) => this.readout(index),
    "Norm of the change relative to the matrix: matrices down, layers across",
  );
  private readonly scroll = h("div", { class: "exl2nb-grid-scroll" }, this.grid.element);
  private readonly ramp = h("span", { class: "exl2nb-inside-ramp", "aria-hidden": "true" });
  private readonly most = h("span", { class: "exl2nb-muted" });
  private readonly slider = h("input", { type: "range", class: "exl2nb-range", min: LOW, max: HIGH, step: STEP, id: uniqueId("scale") });
  private readonly number = h("span", { class: "exl2nb-lora-number", "aria-hidden": "true" });
  private readonly figures = h("span", { class: "exl2nb-muted", role: "status" });
  private readonly answers = h("div");
  private built: unknown = null;
  private written = "";
  private pointed = -1;
  private wish: number | null = null; // the slider's, until the kernel has it
  private asked = Number.NaN;

  constructor(widget: State<LoraExplorerState>) {
    super(widget, "lora", "LoRA adapter", "Generate");
    const legend = h("div", { class: "exl2nb-inside-legend" }, h("span", { class: "exl2nb-muted" }, "0"), this.ramp, this.most);
    const map = this.part(h("h4", {}, "Change of each matrix, % of its norm"), this.scroll, legend, this.line);
    const label = h("label", { for: this.slider.id }, "Scale");
    const scale = h("div", { class: "exl2nb-lora-slider" }, label, this.slider, this.number, this.figures);
    const below = this.part(scale, this.answers, klLegend());
    const none = new Choice("Model", () => {});
    none.draw([], 0);
    this.build(none, { text: () => this.text(), picture: () => this.picture() }, map, below);
    this.root.append(this.spoken);
    this.slider.disabled = !this.able;
    this.slider.addEventListener("input", () => this.move(Number(this.slider.value)));
    this.begin(WATCHED);
  }

  private get result(): LoraResult {
    return this.widget.get("_result");
  }

  private move(scale: number): void {
    this.wish = scale;
    this.widget.send({ type: "scale", scale });
    this.frame.request();
  }

  private select(place: Place | null): void {
    this.set({ selected: place ? [place.layer, place.matrix] : [] });
  }

  protected draw(): void {
    const { result } = this;
    const { cells } = result;
    const kernel = this.widget.get("scale");
    if (this.wish === kernel) this.wish = null;
    if (this.wish !== null && this.widget.get("status") === "error") this.wish = null;
    const scale = this.wish ?? kernel;
    if (this.able && this.widget.get("status") === "done" && Math.abs(result.scale - scale) > 1e-3 && this.asked !== scale) {
      this.asked = scale; // it came when the kernel was about to be done
      this.widget.send({ type: "scale", scale });
    }
    this.bar.draw();
    this.drawError();
    this.title.textContent = result.name ? `${result.name} on ${result.model}: ${cells.length} matrices` : "LoRA adapter";
    this.scroll.style.maxHeight = String(this.widget.get("height"));
    if (this.built !== cells) this.buildMap(cells);
    this.grid.paint((index) => this.paint(index));
    const [layer, matrix] = this.widget.get("selected") as [number?, string?];
    const chosen = cells.find((cell) => cell[0] === layer && cell[1] === matrix);
    this.grid.mark(chosen ? { layer: chosen[0], matrix: chosen[1] } : null);
    this.drawScale(scale);
    this.drawAnswers();
    this.readout(this.pointed);
    if (this.pointed < 0 && chosen) this.say(this.paint(cells.indexOf(chosen)).label);
  }

  private buildMap(cells: LoraCell[]): void {
    this.built = cells;
    const places = cells.map(([layer, matrix]) => ({ layer, matrix }));
    this.grid.build(this.result.matrices, this.result.layers, places);
    const stops = Array.from({ length: 9 }, (_, i) => css(shade(i / 8)));
    this.ramp.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  }

  private drawScale(scale: number): void {
    const { result } = this;
    if (document.activeElement !== this.slider || this.wish === null) this.slider.value = String(scale);
    const share = Math.min(1, Math.max(0, (scale - LOW) / (HIGH - LOW)));
    this.slider.style.setProperty("--exl-fill", `${(100 * share).toFixed(1)}%`);
    this.number.textContent = scale.toFixed(2);
    setAttributes(this.slider, { "aria-valuetext": `scale ${scale.toFixed(2)}` });
    const { mean, same } = summary(result.adapted);
    const measured = mean === null ? "" : `mean KL ${klText(mean)}, top-1 agreement ${Math.round(100 * (same ?? 0))} %`;
    const waits = this.able && (this.bar.running || this.wish !== null);
    const said = waits ? "generating…" : measured;
    if (this.figures.textContent !== said) this.figures.textContent = said;
    this.most.textContent = `${(100 * this.largest * Math.abs(scale)).toFixed(1)} % at this scale`;
  }

  private drawAnswers(): void {
    const { result } = this;
    const tokens: KlToken[][] = [result.base, result.adapted];
    const key = JSON.stringify([result.scale, tokens]);
    if (this.written === key) return;
    this.written = key;
    const group = new AnswerGroup(["model alone", `${result.name} × ${result.scale}`], "the model alone", (words) => {
      this.spoken.textContent = words;
    });
    group.views.forEach((view, i) => {
      view.head.append(h("b", {}, view.name));
      view.foot.textContent = i ? "coloured by its KL to the model alone" : "";
    });
    this.answers.replaceChildren(group.element);
    group.draw(tokens, [-1, firstDifference(result.base, result.adapted, true)]);
  }

  private get largest(): number {
    return Math.max(1e-12, ...this.result.cells.map(relative));
  }

  private paint(index: number): Paint {
    const cell = this.result.cells[index] as LoraCell;
    const [layer, matrix, rank, change, weight] = cell;
    const scale = Math.abs(this.wish ?? this.widget.get("scale"));
    const share = 100 * relative(cell) * scale;
    const where = layer < 0 ? matrix : `layer ${layer} ${matrix}`;
    const norms = `norm ${(change * scale).toPrecision(3)} of the change, ${weight.toPrecision(3)} of the matrix`;
    const text = share.toFixed(share < 9.95 ? 1 : 0);
    return {
      text,
      colour: shade(relative(cell) / this.largest),
      label: `${where}: ${text} %, rank ${rank}; ${norms}`,
    };
  }

  private readout(index: number): void {
    this.pointed = index;
    if (index >= 0) this.say(this.result.cells[index] ? this.paint(index).label : "");
    else if (!this.widget.get("selected").length) this.say("");
  }

  private text(): string {
    const head = ["layer", "matrix", "rank", "norm of the change", "norm of the matrix", "relative"];
    return tsv([head, ...this.result.cells.map((cell) => [...cell, relative(cell)])]);
  }

  private picture(): string {
    const { name, matrices, layers, cells } = this.result;
    const places = cells.map(([layer, matrix]) => ({ layer, matrix }));
    return mapSvg(`${name}: change of each matrix, % of its norm`, matrices, layers, places, (index) => this.paint(index));
  }
}

function relative([_layer, _matrix, _rank, change, weight]: LoraCell): number {
  return change / Math.max(weight, 1e-20);
}

export default widget(LoraView);

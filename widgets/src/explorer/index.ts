// BitrateExplorer: slider, figures, rate-distortion curve, bit map, and two texts side by side. The kernel allocates; an export snaps to its curve.
import type { BitCell, CurvePoint, ExplorerState } from "../protocol.gen";
import type { State } from "../shared/afm";
import { Asker } from "../shared/asker";
import { BitGridView, type Place } from "../shared/bitgrid";
import { h, setAttributes, uniqueId } from "../shared/dom";
import { bytes } from "../shared/format";
import { ColourBar } from "../shared/legend";
import { mapSvg } from "../shared/mapsvg";
import { NAMES, painter } from "../shared/metrics";
import { stageName } from "../shared/stages";
import { strip } from "../shared/strip";
import { standalone, tools, tsv } from "../shared/tools";
import { View, widget } from "../shared/view";
import { CurveView } from "./curve";
import { SizesView } from "./sizes";
import "./explorer.css";

const WATCHED: (keyof ExplorerState)[] = [
  ...(["status", "error", "bpw", "solved", "nbytes", "predicted_kl", "prompt", "metric", "selected", "original", "made"] as const),
  ...(["made_bpw", "stage", "progress", "_cells", "_curve", "_marks", "_can_make", "_factor", "_tokens"] as const),
];
const METRICS = ["bpw", "share"] as const;

class ExplorerView extends View<ExplorerState> {
  private readonly slider: HTMLInputElement;
  private readonly number = h("output", { class: "exl2nb-big" });
  private readonly figures = h("div", { class: "exl2nb-figures" });
  private readonly curve = new CurveView();
  private readonly choice = h("div", { class: "exl2nb-choice", role: "group", "aria-label": "Colour by" });
  private readonly grid: BitGridView;
  private readonly line = h("div", { class: "exl2nb-readout exl2nb-muted" });
  private readonly colours = new ColourBar();
  private readonly detail = h("div");
  private readonly prompt: HTMLTextAreaElement;
  private readonly make = h("button", { type: "button", class: "exl2nb-button exl2nb-primary" }, "Convert");
  private readonly stop = h("button", { type: "button", class: "exl2nb-button" }, "Stop");
  private readonly bar = h("progress", { max: 1, "aria-label": "Converting the model" });
  private readonly stage = h("span", { class: "exl2nb-muted" });
  private readonly texts = h("div", { class: "exl2nb-texts" });
  private readonly original = h("div", { class: "exl2nb-answer" });
  private readonly made = h("div", { class: "exl2nb-answer" });
  private readonly madeName = h("b");
  private readonly asker: Asker<number>;
  private readonly sizes: SizesView;
  private built = "";
  private pointed = -1;
  private wish: number | null = null;
  private said = "";

  constructor(explorer: State<ExplorerState>) {
    super(explorer, "explorer", "Bitrate explorer");
    const get = explorer.get;
    const [sliderId, promptId] = [uniqueId("bpw"), uniqueId("prompt")];
    this.slider = h("input", {
      type: "range",
      class: "exl2nb-range",
      id: sliderId,
      min: get("_low"),
      max: get("_high"),
      step: 0.05,
      value: get("solved"),
    });
    this.prompt = h("textarea", { id: promptId, rows: 1 });
    this.prompt.value = get("prompt");
    this.grid = new BitGridView(
      (place) => this.select(place),
      (index) => this.readout(index),
    );
    this.asker = new Asker<number>((bpw) => explorer.send({ type: "solve", bpw }));
    this.sizes = new SizesView((wish) => {
      this.wish = null;
      explorer.send(wish);
    }, get("_free"));
    this.sizes.element.hidden = get("_static");
    const ends = h("div", { class: "exl2nb-ends exl2nb-muted", "aria-hidden": "true" });
    ends.append(h("span", {}, get("_low").toFixed(1)), h("span", {}, get("_high").toFixed(1)));
    const control = h(
      "div",
      { class: "exl2nb-control" },
      h("label", { for: sliderId }, "Bits per weight"),
      this.number,
      this.slider,
      ends,
      this.figures,
      this.sizes.element,
    );
    const map = h("div", { class: "exl2nb-grid-scroll" }, this.grid.element);
    const actions = h("div", { class: "exl2nb-actions" }, this.make, this.stop, this.bar, this.stage);
    const making = h("div", { class: "exl2nb-making" }, h("label", { for: promptId }, "Prompt"), this.prompt, actions, this.texts);
    making.hidden = !get("_can_make") && !get("made");
    this.texts.append(h("div", {}, h("b", {}, "original"), this.original), h("div", {}, this.madeName, this.made));
    const chart = h("div", { class: "exl2nb-chart" }, this.curve.element, this.curve.legend);
    const top = h("div", { class: "exl2nb-top" }, control, chart);
    const taken = tools("explorer", { text: () => this.text(), picture: () => this.picture() });
    const right = h("div", { class: "exl2nb-actions" }, this.choice, taken);
    const middle = h("div", { class: "exl2nb-under" }, this.colours.element, this.line, right);
    this.root.append(h("div", { class: "exl2nb-card" }, top, this.error, map, middle, this.detail, making), this.spoken);
    this.listen();
    this.begin(
      WATCHED,
      explorer.observe(["solved", "_cells"], () => this.answered()),
      () => this.asker.close(),
    );
  }

  private listen(): void {
    this.slider.addEventListener("input", () => this.drag(Number(this.slider.value)));
    this.slider.addEventListener("change", () => {
      this.spoken.textContent = `${this.number.textContent} bits per weight, ${this.figures.textContent}`;
    });
    this.make.addEventListener("click", () => {
      if (this.busy) return;
      this.widget.send({ type: "make", bpw: this.wish ?? this.widget.get("solved"), prompt: this.prompt.value });
    });
    this.stop.addEventListener("click", () => this.widget.send({ type: "stop" }));
    for (const metric of METRICS) {
      const button = h("button", { type: "button", class: "exl2nb-button", "data-metric": metric }, NAMES[metric]);
      button.addEventListener("click", () => this.put("metric", metric));
      this.choice.append(button);
    }
  }

  private get busy(): boolean {
    return this.widget.get("status") === "running";
  }

  private drag(bpw: number): void {
    this.wish = bpw;
    if (!this.widget.get("_static")) this.asker.want(bpw);
    this.frame.request();
  }

  private answered(): void {
    this.asker.answered();
    if (this.wish !== null && Math.abs(this.wish - this.widget.get("solved")) < 1e-6) this.wish = null;
  }

  private put<K extends "metric" | "selected">(name: K, value: ExplorerState[K]): void {
    this.widget.set(name, value);
    this.widget.save();
    this.frame.request();
  }

  private select(place: Place | null): void {
    this.put("selected", place ? [place.layer, place.matrix] : []);
  }

  /** What is shown: the kernel's allocation; until its answer is here, or without a kernel, the nearest point of the curve. */
  private now(): { bpw: number; nbytes: number; kl: number; bits?: number[] } {
    const get = this.widget.get;
    const wish = this.wish;
    const here = { bpw: get("solved"), nbytes: get("nbytes"), kl: get("predicted_kl") };
    if (wish === null || Math.abs(wish - here.bpw) < 1e-6 || !(get("_static") || this.asker.asking)) return here;
    const [bpw, nbytes, kl, bits] = get("_curve").reduce((a: CurvePoint, b: CurvePoint) =>
      Math.abs(b[0] - wish) < Math.abs(a[0] - wish) ? b : a,
    );
    return { bpw, nbytes, kl, bits };
  }

  protected draw(): void {
    const get = this.widget.get;
    const now = this.now();
    const cells = get("_cells");
    const shape = JSON.stringify([get("_matrices"), get("_layers"), cells.length]);
    if (this.built !== shape) {
      this.built = shape;
      this.grid.build(get("_matrices"), get("_layers"), cells);
    }
    if (this.wish === null) this.slider.value = String(now.bpw);
    const shown = this.wish ?? now.bpw;
    const share = (shown - get("_low")) / (get("_high") - get("_low") || 1);
    this.slider.style.setProperty("--exl-fill", `${(100 * share).toFixed(1)}%`);
    this.number.textContent = (get("_static") ? now.bpw : shown).toFixed(2);
    setAttributes(this.slider, { "aria-valuetext": `${shown.toFixed(2)} bits per weight` });
    const about = now.bits && !get("_static") ? "about " : "";
    this.figures.textContent = `${about}${bytes(now.nbytes)} · predicted KL ${now.kl.toPrecision(2)}`;
    this.sizes.draw(now.nbytes, Math.max(...get("_curve").map((point) => point[1])));
    const expected = get("_can_make") ? get("_factor") : 1;
    this.curve.draw({ curve: get("_curve"), marks: get("_marks"), expected, tokens: get("_tokens"), ...now, label: this.describe(now) });
    this.drawMap(cells, now.bits);
    this.drawMaking();
  }

  private describe(now: { bpw: number; kl: number }): string {
    const marks = this.widget.get("_marks").map(([_bpw, kl, label]) => `${label}: ${kl.toPrecision(2)} measured`);
    return [`Predicted KL over bits per weight; at ${now.bpw.toFixed(2)} it is ${now.kl.toPrecision(2)}`, ...marks].join("; ");
  }

  private drawMap(cells: BitCell[], bits: number[] | undefined): void {
    const get = this.widget.get;
    const metric = bits && get("_static") ? "bpw" : get("metric");
    this.grid.paint(painter(cells, metric, [], metric === "bpw" ? bits : undefined)); // shares are the kernel's to say
    const [layer, matrix] = get("selected") as [number?, string?];
    const chosen = cells.find((cell) => cell.layer === layer && cell.matrix === matrix);
    this.grid.mark(chosen ?? null);
    this.colours.draw(cells, metric);
    this.detail.replaceChildren(...(chosen && !(bits && get("_static")) ? [strip(chosen)] : []));
    for (const button of this.choice.children)
      setAttributes(button, { "aria-pressed": String((button as HTMLElement).dataset.metric === metric) });
    this.readout(this.pointed);
  }

  private drawMaking(): void {
    const get = this.widget.get;
    const fixed = get("_static");
    for (const element of [this.make, this.stop]) element.hidden = fixed;
    this.prompt.readOnly = fixed;
    if (document.activeElement !== this.prompt) this.prompt.value = get("prompt");
    setAttributes(this.make, { "aria-disabled": String(this.busy) });
    this.stop.hidden = fixed || !this.busy;
    this.bar.hidden = !this.busy;
    this.bar.value = get("progress");
    const mark = get("_marks").find(([bpw, _kl, label]) => bpw === get("made_bpw") && label.endsWith("made here"));
    const done = mark ? `done · measured KL ${mark[1].toPrecision(2)}` : "done";
    const count = get("_tokens").toLocaleString("en-US");
    const before = `expected KL ${(this.now().kl * get("_factor")).toPrecision(2)}, calibrated on ${count} tokens`;
    const over = { done, stopped: "stopped", error: "", idle: fixed ? "" : before }[get("status") as string] ?? "";
    this.stage.textContent = this.busy ? `${stageName(get("stage"))}…` : over;
    const words = this.busy ? this.stage.textContent : get("status") === "idle" ? "" : `Conversion ${get("status")}. ${over}`;
    if (this.said !== words) this.spoken.textContent = this.said = words;
    this.drawError();
    this.texts.hidden = get("original") === "" && get("made") === "";
    this.madeName.textContent = `${get("made_bpw").toFixed(2)} bits per weight`;
    this.original.textContent = get("original");
    this.drawAnswer(get("original"), get("made"));
  }

  /** The copy's text, marked from where it leaves the original. */
  private drawAnswer(original: string, made: string): void {
    let same = 0;
    while (same < made.length && made[same] === original[same]) same++;
    if (same === original.length && this.busy) same = made.length; // the original is only behind
    const rest = made.slice(same);
    this.made.replaceChildren(made.slice(0, same), ...(rest ? [h("mark", { title: "first difference" }, rest)] : []));
  }

  private readout(index: number): void {
    this.pointed = index;
    const metric = this.widget.get("metric");
    const cells = this.widget.get("_cells");
    this.line.textContent = cells[index] ? painter(cells, metric, [], this.now().bits)(index).label : "";
  }

  private text(): string {
    const rows = this.widget.get("_curve").map(([bpw, nbytes, kl]) => [bpw, nbytes, kl]);
    return tsv([["bits per weight", "bytes", "predicted KL"], ...rows]);
  }

  /** The map, and the curve above it. */
  private picture(): string {
    const get = this.widget.get;
    const cells = get("_cells");
    const now = this.now();
    const title = `${now.bpw.toFixed(2)} bits per weight, ${bytes(now.nbytes)}, predicted KL ${now.kl.toPrecision(2)}`;
    const map = mapSvg(title, get("_matrices"), get("_layers"), cells, painter(cells, "bpw", [], now.bits));
    return stacked(standalone(this.curve.element), map);
  }
}

/** Two pictures, one below the other. */
function stacked(upper: string, lower: string): string {
  const size = (svg: string) =>
    ["width", "height"].map((name) => Number(new RegExp(`${name}="(\\d+)`).exec(svg)?.[1] ?? 0)) as [number, number];
  const [a, b] = [size(upper), size(lower)];
  const [width, height] = [Math.max(a[0], b[0]), a[1] + b[1]];
  const below = lower.replace("<svg ", `<svg y="${a[1]}" `);
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" style="background:#fff">${upper}${below}</svg>`;
}

export default widget(ExplorerView);

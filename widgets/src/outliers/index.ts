// OutlierMap: channels across, layers down, for activations and for the weights that read them; one channel through depth, and its group.
import type { AnyModel } from "@anywidget/types";
import type { OutlierMapState } from "../protocol.gen";
import { type State, state } from "../shared/afm";
import { guardKeys, h, root, setAttributes, uniqueId } from "../shared/dom";
import { percent, visible } from "../shared/format";
import { perFrame } from "../shared/frame";
import { HeatMap } from "../shared/heatmap";
import { Choice, type InsideState, PromptBar } from "../shared/inside";
import { watchKernel } from "../shared/kernel";
import { css, shade } from "../shared/palette";
import { Plot } from "../shared/plot";
import { standalone, tools, tsv } from "../shared/tools";
import { binOf, channelOf, number, Ranges } from "./ranges";
import "./outliers.css";

const WATCHED: (keyof OutlierMapState)[] = ["status", "error", "prompt", "side", "point", "layer", "channel", "_result", "_effect"];

class OutlierMapView {
  readonly root = root("outliers", "Outlier map");
  private readonly title = h("b");
  private readonly sides = new Choice("Model", (i) => this.set({ side: i }));
  private readonly points = new Choice("Activations of", (i) => this.set({ point: i, channel: -1 }));
  private readonly bar: PromptBar;
  private readonly maps: {
    map: HeatMap;
    name: HTMLElement;
    low: HTMLElement;
    high: HTMLElement;
    box: HTMLElement;
    ranges: Ranges | null;
  }[];
  private readonly line = h("div", { class: "exl2nb-inside-line exl2nb-muted", "aria-live": "polite" });
  private readonly channel = h("input", { type: "number", id: uniqueId("channel"), min: 0, step: 1 });
  private readonly depthTitle = h("h4");
  private readonly depth = new Plot(
    (layer) => this.say(layer < 0 ? "" : this.depthWords(layer)),
    (layer) => layer >= 0 && this.set({ layer }),
  );
  private readonly effect = [h("p"), h("p")];
  private readonly depthPart: HTMLElement;
  private readonly massive = h("table", { class: "exl2nb-massive" });
  private readonly frame = perFrame(() => this.draw());
  private readonly undo: (() => void)[];
  private drawn: unknown[] = [];

  constructor(private readonly widget: State<OutlierMapState>) {
    this.bar = new PromptBar(widget as unknown as State<InsideState>);
    this.maps = [false, true].map((weights) => this.mapView(weights));
    const taken = tools("outliers", { text: () => this.text(), picture: () => this.picture() });
    const right = h("div", { class: "exl2nb-inside-right" }, this.sides.element, taken);
    const head = h("div", { class: "exl2nb-inside-head" }, this.title, right);
    const choose = h(
      "div",
      { class: "exl2nb-inside-right" },
      this.points.element,
      h("span", { class: "exl2nb-field" }, h("label", { for: this.channel.id }, "Channel"), this.channel),
    );
    const maps = h("div", { class: "exl2nb-inside-part" }, choose, ...this.maps.map((view) => view.box), this.line);
    this.depthPart = h("div", { class: "exl2nb-inside-part" }, this.depthTitle, this.depth.element, this.depth.legend, ...this.effect);
    const scroll = h(
      "div",
      { class: "exl2nb-massive-scroll", tabindex: 0, role: "region", "aria-label": "Massive activations" },
      this.massive,
    );
    const table = h("div", { class: "exl2nb-inside-part" }, h("h4", {}, "Largest activations of the residual stream"), scroll);
    this.root.append(h("div", { class: "exl2nb-card" }, head, this.bar.element, this.bar.error, maps, this.depthPart, table));
    this.channel.addEventListener("change", () => {
      const most = (this.result.channels[this.point] ?? 1) - 1;
      const value = this.channel.value === "" ? -1 : Math.min(most, Math.max(-1, Math.round(Number(this.channel.value))));
      this.set({ channel: value });
    });
    this.undo = [guardKeys(this.root), widget.observe(WATCHED, () => this.frame.request())];
    this.draw();
  }

  close(): void {
    for (const undo of this.undo) undo();
    this.frame.cancel();
    this.root.remove();
  }

  private mapView(weights: boolean) {
    const map = new HeatMap(
      (bin, layer) => this.say(bin < 0 ? "" : this.placeWords(layer, bin)),
      (bin, layer) =>
        this.set({ layer, channel: channelOf(bin, this.result.bins[this.point] ?? 1, this.result.channels[this.point] ?? 1) }),
    );
    const [name, low, high] = [h("h4"), h("span"), h("span")];
    const scale = h("i", { class: "exl2nb-scale", "aria-hidden": "true" });
    scale.style.background = `linear-gradient(to right, ${Array.from({ length: 9 }, (_, i) => css(shade(i / 8))).join(", ")})`;
    const legend = h("span", { class: "exl2nb-legend exl2nb-muted" }, low, scale, high);
    const box = h(
      "div",
      { class: "exl2nb-map", "data-weights": weights },
      h("div", { class: "exl2nb-map-head" }, name, legend),
      map.element,
    );
    return { map, name, low, high, box, ranges: null as Ranges | null };
  }

  private get result() {
    return this.widget.get("_result");
  }

  private get side(): number {
    return Math.min(Math.max(0, this.widget.get("side")), Math.max(0, this.result.labels.length - 1));
  }

  private get point(): number {
    return Math.min(Math.max(0, this.widget.get("point")), Math.max(0, this.result.points.length - 1));
  }

  private get layer(): number {
    return Math.min(Math.max(0, this.widget.get("layer")), this.result.layers - 1);
  }

  private get chosen(): number {
    return Math.min(this.widget.get("channel"), (this.result.channels[this.point] ?? 0) - 1);
  }

  private set(values: { side?: number; point?: number; layer?: number; channel?: number }): void {
    for (const [name, value] of Object.entries(values)) this.widget.set(name as "side", value);
    this.widget.save();
    this.frame.request();
  }

  private draw(): void {
    const { result, side, point } = this;
    this.bar.draw();
    if (!result.points.length) return;
    this.sides.draw(result.labels, this.side);
    this.points.draw(result.points, point);
    this.title.textContent = `Outliers of ${result.labels[side]}: ${result.texts.length} tokens`;
    const key = [result, side, point];
    if (!key.every((part, i) => part === this.drawn[i])) this.drawMaps();
    if (this.drawn[0] !== result) this.drawMassive();
    this.drawn = key;
    const bin = this.chosen < 0 ? -1 : binOf(this.chosen, result.bins[point] ?? 1, result.channels[point] ?? 1);
    for (const view of this.maps) view.map.mark(bin, bin < 0 ? -1 : this.layer);
    if (document.activeElement !== this.channel) this.channel.value = this.chosen < 0 ? "" : String(this.chosen);
    setAttributes(this.channel, { max: (result.channels[point] ?? 1) - 1 });
    this.drawDepth(bin);
  }

  private drawMaps(): void {
    const { result, side, point } = this;
    const name = result.points[point] ?? "";
    const [channels, bins] = [result.channels[point] ?? 0, result.bins[point] ?? 0];
    const each = bins < channels ? `, the largest of ${Math.ceil(channels / bins)} in each column` : "";
    this.maps.forEach((view, i) => {
      view.ranges = new Ranges(result, point, side, i > 0);
      view.name.textContent = i ? "Weights that read it: largest of each channel" : `Activations, ${name}: ${channels} channels${each}`;
      view.low.textContent = number(view.ranges.at(0));
      view.high.textContent = number(view.ranges.at(1));
      view.map.element.style.blockSize = `${Math.min(240, Math.max(60, 10 * result.layers))}px`;
      const ranges = view.ranges;
      view.map.draw({
        columns: bins,
        rows: result.layers,
        colour: (bin, layer) => (ranges.share(layer, bin) < 0 ? null : shade(ranges.share(layer, bin))),
        label: `${view.name.textContent}: layers down, channels across, darker is larger`,
      });
    });
  }

  private drawDepth(bin: number): void {
    const { result, point } = this;
    this.depthPart.hidden = bin < 0;
    if (bin < 0) return;
    const layers = Array.from({ length: result.layers }, (_, layer) => layer);
    this.depthTitle.textContent = `Channel ${this.chosen}, ${result.points[point]}: largest activation by layer`;
    this.depth.draw({
      label: this.depthTitle.textContent,
      series: result.labels.map((name, i) => {
        const ranges = new Ranges(result, point, i);
        return { name, values: layers.map((layer) => ranges.value(layer, bin)), style: i };
      }),
      places: layers.map(String),
      format: number,
      words: (layer) => this.depthWords(layer),
      log: true,
    });
    this.depth.mark(this.layer);
    this.drawEffect();
  }

  private drawEffect(): void {
    const [activations, weights] = this.effect as unknown as [HTMLElement, HTMLElement];
    const found = this.widget
      .get("_effect")
      .find((one) => one.layer === this.layer && one.channel === this.chosen && one.point === this.point);
    if (!found) {
      const live = this.widget.get("_has_model") && !this.widget.get("_static");
      activations.textContent = live ? "working out its group…" : "What it does to its group is worked out by a running kernel.";
      weights.textContent = "";
      return;
    }
    const said = (what: string, [with_ = 0, without = 0]: number[]) =>
      `${what}: rounded to ${found.bits} bits, the other channels of its group of 128 have an error of ${percent(with_)}; without this channel ${percent(without)}.`;
    activations.textContent = said(`Activations, up to ${number(found.activation)} here`, found.activations);
    weights.textContent = found.weight > 0 ? said(`Weights, up to ${number(found.weight)} here`, found.weights) : "";
  }

  private drawMassive(): void {
    const { result } = this;
    const head = ["model", "layer", "token", "channel", "value", "times the median"].map((name) => h("th", { scope: "col" }, name));
    const rows = result.massive.map(([side, layer, token, channel, value, ratio]) => {
      const cells = [result.labels[side] ?? "", String(layer), `${token} ${visible(result.texts[token] ?? "")}`, String(channel)];
      return h("tr", {}, ...[...cells, number(value), ratio.toFixed(0)].map((cell) => h("td", {}, cell)));
    });
    this.massive.replaceChildren(h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...rows));
  }

  private placeWords(layer: number, bin: number): string {
    const { result, point } = this;
    const first = channelOf(bin, result.bins[point] ?? 1, result.channels[point] ?? 1);
    const last = channelOf(bin + 1, result.bins[point] ?? 1, result.channels[point] ?? 1) - 1;
    const [activations, weights] = this.maps.map((view) => number(view.ranges?.value(layer, bin) ?? null));
    const channels = last > first ? `channels ${first} to ${last}` : `channel ${first}`;
    return `layer ${layer}, ${channels}: largest activation ${activations}, largest weight ${weights}`;
  }

  private depthWords(layer: number): string {
    const { result, point } = this;
    const bin = binOf(this.chosen, result.bins[point] ?? 1, result.channels[point] ?? 1);
    return `layer ${layer}: ${result.labels.map((name, i) => `${name} ${number(new Ranges(result, point, i).value(layer, bin))}`).join(", ")}`;
  }

  private say(words: string): void {
    this.line.textContent = words;
  }

  private text(): string {
    const { result } = this;
    const rows = result.massive.map(([side, layer, token, channel, value, ratio]) => [
      result.labels[side] ?? "",
      layer,
      token,
      channel,
      value,
      ratio,
    ]);
    return tsv([["model", "layer", "token", "channel", "value", "times the median"], ...rows]);
  }

  private picture(): string {
    return standalone(this.depth.svg, getComputedStyle(this.root).getPropertyValue("background-color") || "#fff");
  }
}

export default {
  render({ model, el }: { model: AnyModel; el: HTMLElement }) {
    const view = new OutlierMapView(state<OutlierMapState>(model));
    el.append(view.root);
    const undo = watchKernel(view.root, model);
    return () => {
      undo();
      view.close();
    };
  },
};

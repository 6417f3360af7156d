// OutlierMap: channels across, layers down, for activations and for the weights that read them; one channel through depth, and its group.
import type { OutlierMapState } from "../protocol.gen";
import type { State } from "../shared/afm";
import { h, setAttributes, uniqueId } from "../shared/dom";
import { percent, visible } from "../shared/format";
import { HeatMap, SHADES } from "../shared/heatmap";
import { Choice, InsideView } from "../shared/inside";
import { css, shade } from "../shared/palette";
import { Plot } from "../shared/plot";
import { standalone, tsv } from "../shared/tools";
import { widget } from "../shared/view";
import { binOf, channelOf, number, Ranges } from "./ranges";
import "./outliers.css";

const WATCHED: (keyof OutlierMapState)[] = [
  ...(["status", "error", "prompt", "side", "point", "layer", "channel", "_result", "_effect", "_share"] as const),
];

class OutlierMapView extends InsideView<OutlierMapState> {
  private readonly sides = new Choice("Model", (i) => this.set({ side: i }));
  private readonly points = new Choice("Activations of", (i) => this.set({ point: i, channel: -1 }));
  private readonly maps: ReturnType<OutlierMapView["mapView"]>[];
  private readonly channel = h("input", { type: "number", id: uniqueId("channel"), min: 0, step: 1 });
  private readonly depthTitle = h("h4");
  private readonly depth = new Plot(
    (layer) => this.say(layer < 0 ? "" : this.depthWords(layer)),
    (layer) => layer >= 0 && this.set({ layer }),
  );
  private readonly effect = [h("p"), h("p")];
  private readonly depthPart: HTMLElement;
  private readonly massive = h("table", { class: "exl2nb-massive" });
  private ranges: Ranges[] = []; // of the activations, by model

  constructor(widget: State<OutlierMapState>) {
    super(widget, "outliers", "Outlier map");
    this.maps = [this.mapView(), this.mapView()];
    const field = h("span", { class: "exl2nb-field" }, h("label", { for: this.channel.id }, "Channel"), this.channel);
    const choose = h("div", { class: "exl2nb-inside-right" }, this.points.element, field);
    const maps = this.part(choose, ...this.maps.map((view) => view.box), this.line);
    this.depthPart = this.part(this.depthTitle, this.depth.element, this.depth.legend, ...this.effect);
    const region = { class: "exl2nb-massive-scroll", tabindex: 0, role: "region", "aria-label": "Largest activations" };
    const table = this.part(h("h4", {}, "Largest activations of the residual stream"), h("div", region, this.massive));
    this.build(this.sides, { text: () => this.text(), picture: () => standalone(this.depth.svg) }, maps, this.depthPart, table);
    this.channel.addEventListener("change", () => {
      const most = (this.result.channels[this.point] ?? 1) - 1;
      const value = this.channel.value === "" ? -1 : Math.min(most, Math.max(-1, Math.round(Number(this.channel.value))));
      this.set({ channel: value });
    });
    this.begin(WATCHED);
  }

  private mapView() {
    const map = new HeatMap(
      (bin, layer) => this.say(bin < 0 ? "" : this.placeWords(layer, bin)),
      (bin, layer) =>
        this.set({ layer, channel: channelOf(bin, this.result.bins[this.point] ?? 1, this.result.channels[this.point] ?? 1) }),
    );
    const [name, low, high] = [h("h4"), h("span"), h("span")];
    const scale = h("i", { class: "exl2nb-inside-ramp", "aria-hidden": "true" });
    scale.style.background = `linear-gradient(to right, ${Array.from({ length: 9 }, (_, i) => css(shade(i / 8))).join(", ")})`;
    const legend = h("span", { class: "exl2nb-inside-legend exl2nb-muted" }, low, scale, high);
    const box = h("div", { class: "exl2nb-map" }, h("div", { class: "exl2nb-map-head" }, name, legend), map.element);
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

  protected draw(): void {
    const { result, side, point } = this;
    this.bar.draw();
    this.drawError();
    if (!result.points.length) return;
    this.sides.draw(result.labels, this.side);
    this.points.draw(result.points, point);
    this.title.textContent = `Outliers of ${result.labels[side]}: ${result.texts.length} tokens`;
    const bin = this.chosen < 0 ? -1 : binOf(this.chosen, result.bins[point] ?? 1, result.channels[point] ?? 1);
    const [fresh, sideChanged, pointChanged, chosenChanged] = this.changed(result, side, point, this.chosen);
    if (fresh || pointChanged) this.ranges = result.labels.map((_, i) => new Ranges(result, point, i));
    if (fresh || pointChanged || sideChanged) this.drawMaps();
    if (fresh) this.drawMassive();
    for (const view of this.maps) view.map.mark(bin, bin < 0 ? -1 : this.layer);
    if (document.activeElement !== this.channel) this.channel.value = this.chosen < 0 ? "" : String(this.chosen);
    setAttributes(this.channel, { max: (result.channels[point] ?? 1) - 1 });
    this.depthPart.hidden = bin < 0;
    if (bin < 0) return;
    if (fresh || pointChanged || chosenChanged) this.drawDepth(bin);
    this.depth.mark(this.layer);
    this.drawEffect();
  }

  private drawMaps(): void {
    const { result, side, point } = this;
    const name = result.points[point] ?? "";
    const [channels, bins] = [result.channels[point] ?? 0, result.bins[point] ?? 0];
    const each = bins < channels ? `, maximum of ${Math.ceil(channels / bins)} per column` : "";
    this.maps.forEach((view, i) => {
      view.ranges = new Ranges(result, point, side, i > 0);
      view.name.textContent = i ? "Weights of the next matrix: maximum per channel" : `Activations, ${name}: ${channels} channels${each}`;
      view.low.textContent = number(view.ranges.at(0));
      view.high.textContent = number(view.ranges.at(1));
      view.map.element.style.blockSize = `${Math.min(240, Math.max(60, 10 * result.layers))}px`;
      const ranges = view.ranges;
      view.map.draw({
        columns: bins,
        rows: result.layers,
        pixel: (bin, layer) => {
          const code = ranges.code(layer, bin);
          return code ? (SHADES[code] as number) : 0;
        },
        label: `${view.name.textContent}: layers down, channels across; darker = larger`,
      });
    });
  }

  private drawDepth(bin: number): void {
    const { result, point } = this;
    const layers = Array.from({ length: result.layers }, (_, layer) => layer);
    this.depthTitle.textContent = `Channel ${this.chosen}, ${result.points[point]}: maximum activation by layer`;
    this.depth.draw({
      label: this.depthTitle.textContent,
      series: result.labels.map((name, i) => ({
        name,
        values: layers.map((layer) => this.ranges[i]?.value(layer, bin) ?? null),
        style: i,
      })),
      places: layers.map(String),
      format: number,
      words: (layer) => this.depthWords(layer),
      log: true,
    });
  }

  private drawEffect(): void {
    const [activations, weights] = this.effect as unknown as [HTMLElement, HTMLElement];
    const found = this.widget
      .get("_effect")
      .find((one) => one.layer === this.layer && one.channel === this.chosen && one.point === this.point);
    if (!found) {
      activations.textContent = this.able ? "Computing the effect on its group…" : "The effect on its group needs a running kernel.";
      weights.textContent = "";
      return;
    }
    const said = (what: string, largest: number, [with_ = 0, without = 0]: number[]) =>
      `${what} (maximum ${number(largest)}): at ${found.bits} bits, the other channels of its group of 128 have an error of ${percent(with_)}; without this channel, ${percent(without)}.`;
    activations.textContent = said("Activations", found.activation, found.activations);
    weights.textContent = found.weight > 0 ? said("Weights", found.weight, found.weights) : "";
  }

  private drawMassive(): void {
    const { result } = this;
    const head = ["model", "layer", "token", "channel", "value", "× median"].map((name) => h("th", { scope: "col" }, name));
    const rows = result.massive.map(([side, layer, token, channel, value, ratio]) => {
      const cells = [result.labels[side] ?? "", String(layer), `${token} ${visible(result.texts[token] ?? "")}`, String(channel)];
      return h("tr", {}, ...[...cells, number(value).replace("-", "−"), ratio.toFixed(0)].map((cell) => h("td", {}, cell)));
    });
    this.massive.replaceChildren(h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...rows));
  }

  private placeWords(layer: number, bin: number): string {
    const { result, point } = this;
    const first = channelOf(bin, result.bins[point] ?? 1, result.channels[point] ?? 1);
    const last = channelOf(bin + 1, result.bins[point] ?? 1, result.channels[point] ?? 1) - 1;
    const [activations, weights] = this.maps.map((view) => number(view.ranges?.value(layer, bin) ?? null));
    const channels = last > first ? `channels ${first} to ${last}` : `channel ${first}`;
    return `layer ${layer}, ${channels}: maximum activation ${activations}, maximum weight ${weights}`;
  }

  private depthWords(layer: number): string {
    const { result, point } = this;
    const bin = binOf(this.chosen, result.bins[point] ?? 1, result.channels[point] ?? 1);
    return `layer ${layer}: ${result.labels.map((name, i) => `${name} ${number(this.ranges[i]?.value(layer, bin) ?? null)}`).join(", ")}`;
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
}

export default widget(OutlierMapView);

// MemoryPlan of several devices: their layers on one track with a border between two devices that the pointer or the keys move; the memory
// of each, the most tokens a second and the line of Python, all answered here.
import { DEVICE_COLOURS, PLAN_COLOURS } from "../constants.gen";
import type { PlanState } from "../protocol.gen";
import type { State } from "../shared/afm";
import { h, setAttributes } from "../shared/dom";
import { bytes, count } from "../shared/format";
import { snapshot } from "../shared/snapshot";
import { tools, tsv } from "../shared/tools";
import { View } from "../shared/view";
import { amount, Controls, number, write } from "./controls";
import { filled, layersOf, loadLine, moved, type Share, shares, tokensPerSecond } from "./split_formula";
import "./split.css";

const GIB = 2 ** 30;
const GB = 1e9;
const PAGE = 4; // layers that PageUp and PageDown move a border by
const COLUMNS = ["device", "layers", "memory", "weights", "cache", "work", "in all", "may hold, GiB", "reads, GB/s", "ms a token"];
const PARTS = ["weights", "cache", "work"] as const;
const WORK = "activations, logits, captured steps, and what CUDA keeps for itself";

interface Row {
  element: HTMLElement;
  bar: HTMLElement;
  cells: HTMLElement[];
  limit: HTMLInputElement;
  speed: HTMLInputElement;
}

export class SplitView extends View<PlanState> {
  private readonly title = h("b");
  private readonly devices = h("span", { class: "exl2nb-muted" });
  private readonly controls: Controls;
  private readonly track = h("div", { class: "exl2nb-track", dir: "ltr" });
  private readonly spans: HTMLElement[];
  private readonly handles: HTMLElement[];
  private readonly rows: Row[];
  private readonly verdict = h("div", { class: "exl2nb-verdict" });
  private readonly line = h("code");

  constructor(plan: State<PlanState>) {
    super(plan, "plan", "Memory plan of several devices");
    const names = this.split.devices.map(({ name }) => name);
    const layers = layersOf(this.split);
    this.controls = new Controls(
      plan,
      () => this.frame.request(),
      () => this.say(),
    );
    this.spans = names.map((_, i) => h("div", { class: "exl2nb-span", style: deviceStyle(i) }));
    this.handles = names.slice(1).map((name, i) => this.handle(`Border between ${names[i]} and ${name}`, i, layers));
    this.rows = names.map((name, i) => this.row(name, i));
    const ticks = h("div", { class: "exl2nb-ticks", style: `--exl-layer:${100 / layers}%` });
    this.track.append(...this.spans, ticks, ...this.handles);
    const ends = h("div", { class: "exl2nb-ends exl2nb-muted", "aria-hidden": "true" });
    ends.append(h("span", {}, "embedding, layer 0"), h("span", {}, `layer ${layers - 1}, head`));
    const fill = h("button", { type: "button", class: "exl2nb-button exl2nb-tool" }, `Fill ${names.slice(1).join(", ")}`);
    fill.addEventListener("click", () => {
      this.controls.put("borders", filled(this.split, this.widget.get("limits"), this.controls.choice));
      this.say();
    });
    const hint = h("div", { class: "exl2nb-hint exl2nb-muted" }, h("span", {}, "Drag a border, or move it with the arrow keys."), fill);
    const header = h("tr", {}, ...COLUMNS.map(heading));
    const table = h("table", {}, h("thead", {}, header), h("tbody", {}, ...this.rows.map((row) => row.element)));
    const taken = tools("plan", { text: () => this.text(), picture: () => snapshot(this.root) });
    const head = h("div", { class: "exl2nb-head" }, this.title, this.devices, taken);
    const place = h("div", { class: "exl2nb-place" }, ends, this.track, hint);
    const code = h("div", { class: "exl2nb-line" }, this.line, tools("line", { text: () => this.line.textContent ?? "" }));
    const wide = h("div", { class: "exl2nb-wide" }, table);
    this.root.append(
      h("div", { class: "exl2nb-card" }, head, this.controls.element, this.error, place, wide, this.verdict, code),
      this.spoken,
    );
    this.begin(["name", "context", "batch", "cache_mode", "borders", "limits", "speeds", "_split", "error"]);
  }

  private get split() {
    return this.widget.get("_split") ?? { devices: [], kinds: {}, lends: false, source: "" };
  }

  private get found(): Share[] {
    return shares(this.split, this.widget.get("borders"), this.controls.choice);
  }

  private handle(label: string, border: number, layers: number): HTMLElement {
    const range = { "aria-valuemin": 0, "aria-valuemax": layers, "aria-orientation": "horizontal" };
    const element = h("div", { class: "exl2nb-handle", role: "slider", tabindex: 0, "aria-label": label, ...range });
    element.addEventListener("pointerdown", (event) => {
      element.setPointerCapture(event.pointerId);
      element.focus();
      event.preventDefault(); // no text is selected on the way
    });
    element.addEventListener("pointermove", (event) => {
      if (element.hasPointerCapture(event.pointerId)) this.drag(border, event.clientX);
    });
    element.addEventListener("pointerup", () => this.say());
    element.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const step: Record<string, number> = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: PAGE, PageDown: -PAGE };
      const end: Record<string, number> = { Home: 0, End: layers };
      const at = this.widget.get("borders")[border] ?? 0;
      const to = end[event.key] ?? (event.key in step ? at + (step[event.key] ?? 0) : undefined);
      if (to === undefined) return;
      this.move(border, to);
      event.preventDefault();
    });
    return element;
  }

  private drag(border: number, x: number): void {
    const box = this.track.getBoundingClientRect();
    this.move(border, Math.round(((x - box.left) / Math.max(1, box.width)) * layersOf(this.split)));
  }

  private move(border: number, to: number): void {
    const old = this.widget.get("borders");
    const borders = moved(this.split, old, border, to);
    if (borders.some((at, i) => at !== old[i])) this.controls.put("borders", borders);
  }

  private row(name: string, i: number): Row {
    const limit = number(0, 4096, "any");
    const speed = number(0.001, 1e6, "any");
    setAttributes(limit, { "aria-label": `${name} may hold, GiB` });
    setAttributes(speed, { "aria-label": `${name} reads, GB/s` });
    for (const [input, unit, trait] of [[limit, GIB, "limits"] as const, [speed, GB, "speeds"] as const]) {
      input.addEventListener("change", () => {
        const value = amount(input, unit);
        if (value === undefined) this.frame.request();
        else this.controls.put(trait, [...this.widget.get(trait)].fill(value as number, i, i + 1));
      });
      this.controls.follow(input);
    }
    const bar = h("div", { class: "exl2nb-bar", role: "img" });
    const layers = h("td");
    const sizes = Array.from({ length: 5 }, () => h("td")); // weights, cache, activations, in all, time
    const swatch = h("span", { class: "exl2nb-swatch", style: deviceStyle(i), "aria-hidden": "true" });
    const first = h("th", { scope: "row" }, swatch, name);
    const middle = [h("td", {}, h("div", { class: "exl2nb-barbox" }, bar)), ...sizes.slice(0, 4)];
    const element = h("tr", { "data-device": name }, first, layers, ...middle, h("td", {}, limit), h("td", {}, speed), ...sizes.slice(4));
    return { element, bar, cells: [layers, ...sizes], limit, speed };
  }

  private say(): void {
    this.draw();
    this.spoken.textContent = this.verdict.textContent;
  }

  protected draw(): void {
    const get = this.widget.get;
    const [found, limits, speeds] = [this.found, get("limits"), get("speeds")];
    const layers = layersOf(this.split);
    this.title.textContent = get("name");
    this.devices.textContent = `on ${found.map((one) => one.device).join(", ")}`;
    this.controls.draw();
    const words = verdict(found, limits, speeds);
    this.verdict.textContent = words;
    this.root.dataset.fits = String(!found.some((one, i) => over(one, limits[i] ?? null)));
    found.forEach((one, i) => {
      this.drawSpan(one, i, layers);
      this.drawRow(one, i, limits[i] ?? null, speeds[i] ?? null);
    });
    get("borders").forEach((at, i) => {
      const [before, after] = [found[i], found[i + 1]];
      const handle = this.handles[i];
      if (!handle || !before || !after) return;
      handle.style.left = `${(100 * at) / layers}%`;
      const held = `${before.device} ${layersHeld(before)}, ${after.device} ${layersHeld(after)}`;
      setAttributes(handle, { "aria-valuenow": at, "aria-valuetext": `${held}; ${words}` });
    });
    this.line.textContent = loadLine(this.split, found, this.controls.choice);
    this.drawError();
  }

  private drawSpan(one: Share, i: number, layers: number): void {
    const span = this.spans[i];
    if (!span) return;
    span.style.width = `${(100 * (one.last - one.first)) / layers}%`;
    span.textContent = one.last > one.first ? one.device : "";
    setAttributes(span, { title: `${one.device}: ${range(one)}` });
  }

  private drawRow(one: Share, i: number, limit: number | null, speed: number | null): void {
    const row = this.rows[i];
    if (!row) return;
    const time = speed && one.read ? ((1000 * one.read) / speed).toPrecision(3) : one.read ? "not known" : "0";
    const shown = [range(one), ...PARTS.map((part) => bytes(one[part])), bytes(one.total), time];
    shown.forEach((text, cell) => {
      (row.cells[cell] as HTMLElement).textContent = text;
    });
    setAttributes(row.element, { "data-bytes": one.total, "data-over": over(one, limit) });
    write(row.limit, limit === null ? "" : String(Number((limit / GIB).toFixed(3))));
    write(row.speed, speed === null ? "" : String(Number((speed / GB).toPrecision(4))));
    const most = Math.max(1, one.total, limit ?? 0);
    const pieces = PARTS.map((part) => {
      const piece = h("div", { class: "exl2nb-piece", title: `${part}: ${bytes(one[part])}` });
      piece.style.width = `${(100 * one[part]) / most}%`;
      piece.style.backgroundColor = PLAN_COLOURS[part];
      return piece;
    });
    if (limit !== null && one.total > limit) {
      const beyond = h("div", { class: "exl2nb-over", title: `${bytes(one.total - limit)} too much` });
      beyond.style.insetInlineStart = `${(100 * limit) / most}%`;
      beyond.style.width = `${(100 * (one.total - limit)) / most}%`;
      pieces.push(beyond);
    }
    row.bar.replaceChildren(...pieces);
    const room = limit === null ? "" : ` of ${bytes(limit)}`;
    setAttributes(row.bar, { "aria-label": `${PARTS.map((part) => `${part} ${bytes(one[part])}`).join(", ")}${room}` });
  }

  private text(): string {
    const { limits, speeds } = { limits: this.widget.get("limits"), speeds: this.widget.get("speeds") };
    const head = ["device", "first layer", "layers", "weights", "cache", "work", "bytes", "may hold", "bytes a second"];
    const rows = this.found.map((one, i) => [
      ...[one.device, one.first, one.last - one.first, one.weights, one.cache, one.work, one.total],
      ...[limits[i] ?? null, speeds[i] ?? null],
    ]);
    return tsv([head, ...rows]);
  }
}

/** The colour of a device, by its place. */
function deviceStyle(place: number): string {
  return `background-color:${DEVICE_COLOURS[place % DEVICE_COLOURS.length]}`;
}

function heading(name: string): HTMLElement {
  const part = PARTS.find((one) => one === name);
  const swatch = part
    ? [h("span", { class: "exl2nb-swatch", style: `background-color:${PLAN_COLOURS[part]}`, "aria-hidden": "true" })]
    : [];
  return h("th", { scope: "col", title: name === "work" ? WORK : undefined }, ...swatch, name);
}

function over(one: Share, limit: number | null): boolean {
  return limit !== null && one.total > limit;
}

function layersHeld(one: Share): string {
  return count(one.last - one.first, "layer");
}

function range(one: Share): string {
  const layers = one.last - one.first;
  return layers === 0 ? "none" : layers === 1 ? `${one.first}` : `${one.first} to ${one.last - 1}`;
}

/** As `SplitPlan.verdict`: does it fit, and how fast can it be. */
function verdict(found: readonly Share[], limits: readonly (number | null)[], speeds: readonly (number | null)[]): string {
  const total = bytes(found.reduce((sum, one) => sum + one.total, 0));
  const beyond = found.flatMap((one, i) => {
    const limit = limits[i] ?? null;
    return limit !== null && one.total > limit ? [`${one.device} by ${bytes(one.total - limit)}`] : [];
  });
  const open = found.filter((one, i) => one.total > 0 && limits[i] == null).map((one) => one.device);
  const fits = beyond.length
    ? `too much for ${beyond.join(", ")}`
    : open.length
      ? `what ${open.join(", ")} may hold is not known: enter it`
      : "fits";
  const speed = tokensPerSecond(found, speeds);
  const unknown = found.filter((one, i) => one.read > 0 && !speeds[i]).map((one) => one.device);
  const most =
    speed !== null
      ? `at most ${speed >= 100 ? Math.round(speed).toLocaleString("en-US") : Number(speed.toPrecision(3))} tokens/s, by bytes read`
      : `enter what ${unknown.join(", ")} reads for tokens/s`;
  return `${total} in all: ${fits}; ${most}`;
}

// Lines or bars over layers, groups or values, as SVG with one cursor: the pointer and the arrow keys move it. Colour is never the only
// carrier: every series has a dash and a name of its own. Knows nothing of models.
import { h, setAttributes } from "./dom";

const [LEFT, RIGHT, TOP, BOTTOM] = [52, 10, 10, 26];
const NAME_WIDTH = 56; // of a place's name

export interface Series {
  name: string;
  values: readonly (number | null)[];
  /** Number of its colour and dash. */
  style: number;
}

export interface Shown {
  /** Said by screen readers, and the title of a saved picture. */
  label: string;
  series: readonly Series[];
  /** Names of the places across. */
  places: readonly string[];
  /** How a height is written. */
  format: (value: number) => string;
  /** All that is known of a place, in words. */
  words: (place: number) => string;
  bars?: boolean;
  log?: boolean;
  /** Heights that are in sight whatever the values are. */
  low?: number;
  high?: number;
}

export class Plot {
  readonly svg: SVGElement;
  readonly element: HTMLElement;
  readonly legend = h("div", { class: "exl2nb-plot-legend exl2nb-muted" });
  private readonly still = svg("g", {});
  private readonly cursor = svg("rect", { class: "exl2nb-plot-cursor" });
  private shown: Shown | null = null;
  private current = -1;

  constructor(
    private readonly point: (place: number) => void,
    private readonly choose: (place: number) => void = () => {},
    private readonly width = 760,
    private readonly height = 170,
  ) {
    this.svg = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "exl2nb-plot", "aria-hidden": "true" });
    this.svg.append(this.cursor, this.still);
    this.element = h("div", { class: "exl2nb-plot-box", role: "slider", tabindex: 0, "aria-valuemin": 0 }, "");
    this.element.append(this.svg);
    this.element.addEventListener("pointermove", (event) => this.move(this.placeOf(event)));
    this.element.addEventListener("pointerleave", () => this.point(-1));
    this.element.addEventListener("click", (event) => this.choose(this.placeOf(event)));
    this.element.addEventListener("focus", () => this.move(Math.max(0, this.current)));
    this.element.addEventListener("blur", () => this.point(-1));
    this.element.addEventListener("keydown", (event) => this.key(event));
  }

  draw(shown: Shown): void {
    this.shown = shown;
    const known = shown.series.flatMap((one) => one.values).filter((value): value is number => value !== null && Number.isFinite(value));
    const count = shown.places.length;
    setAttributes(this.element, { "aria-label": shown.label, "aria-valuemax": Math.max(0, count - 1) });
    this.legend.replaceChildren(...(shown.series.length > 1 ? shown.series.map(key) : []));
    if (!known.length || !count) {
      this.still.replaceChildren();
      return;
    }
    const scale = scaleOf(known, shown, this.height);
    const parts: SVGElement[] = [];
    for (const tick of scale.ticks) {
      const y = scale.y(tick);
      parts.push(svg("line", { x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y, class: "exl2nb-plot-rule" }));
      parts.push(text(LEFT - 6, y + 4, shown.format(tick), "end"));
    }
    const every = Math.ceil((count * NAME_WIDTH) / (this.width - LEFT - RIGHT));
    shown.places.forEach((name, i) => {
      if (i % every === 0) parts.push(text(this.x(i), this.height - 8, name, "middle"));
    });
    shown.series.forEach((one, n) => {
      parts.push(...(shown.bars ? this.bars(one, n, scale, shown.series.length) : this.line(one, scale)));
    });
    this.still.replaceChildren(...parts);
    this.mark(this.current);
  }

  /** Put the cursor on a place; -1 hides it. */
  mark(place: number): void {
    const count = this.shown?.places.length ?? 0;
    this.current = Math.min(place, count - 1);
    const [step, at] = [this.step, this.current];
    setAttributes(this.cursor, { x: this.x(at) - step / 2, width: step, y: TOP, height: this.height - TOP - BOTTOM });
    this.cursor.style.display = at < 0 ? "none" : "";
    setAttributes(this.element, { "aria-valuenow": Math.max(0, at), "aria-valuetext": this.shown?.words(Math.max(0, at)) ?? "" });
  }

  private get step(): number {
    return (this.width - LEFT - RIGHT) / Math.max(1, this.shown?.places.length ?? 1);
  }

  private x(place: number): number {
    return LEFT + (place + 0.5) * this.step;
  }

  private placeOf(event: MouseEvent): number {
    const box = this.svg.getBoundingClientRect();
    const place = Math.floor((((event.clientX - box.left) / box.width) * this.width - LEFT) / this.step);
    return place >= 0 && place < (this.shown?.places.length ?? 0) ? place : -1;
  }

  private move(place: number): void {
    if (place < 0 || place === this.current) {
      if (place >= 0) this.point(place);
      return;
    }
    this.mark(place);
    this.point(place);
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const last = (this.shown?.places.length ?? 1) - 1;
    const step: Record<string, number> = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, Home: -last, End: last };
    const by = step[event.key];
    if (by !== undefined) this.move(Math.min(last, Math.max(0, this.current + by)));
    else if (event.key === "Enter" || event.key === " ") this.choose(this.current);
    else return;
    event.preventDefault();
  }

  private line(one: Series, { y }: Scale): SVGElement[] {
    let path = "";
    one.values.forEach((value, i) => {
      if (value === null || !Number.isFinite(value)) return;
      path += `${path ? "L" : "M"}${this.x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    });
    return [svg("path", { d: path, class: "exl2nb-plot-line", "data-style": one.style % 4 })];
  }

  private bars(one: Series, n: number, { y, floor }: Scale, of: number): SVGElement[] {
    const width = Math.max(1, (this.step * 0.84) / of);
    const found: SVGElement[] = [];
    one.values.forEach((value, i) => {
      if (value === null || !Number.isFinite(value)) return;
      const [top, bottom] = [Math.min(y(value), floor), Math.max(y(value), floor)];
      const x = this.x(i) - this.step * 0.42 + n * width;
      const size = { x, y: top, width: Math.max(0.5, width - 0.5), height: Math.max(0.8, bottom - top) };
      found.push(svg("rect", { ...size, class: "exl2nb-plot-bar", "data-style": one.style % 4 }));
    });
    return found;
  }
}

interface Scale {
  y: (value: number) => number;
  floor: number;
  ticks: number[];
}

function scaleOf(known: number[], { log, low, high }: Shown, height: number): Scale {
  const inside = height - TOP - BOTTOM;
  if (log) {
    const logs = known.filter((value) => value > 0).map(Math.log10);
    if (low) logs.push(Math.log10(low));
    const [from, to] = [Math.min(...logs, 0) - 0.05, Math.max(...logs) + 0.05];
    const bottom = logs.length ? Math.max(Math.min(...logs) - 0.05, to - 8) : from;
    const ticks = [];
    for (let power = Math.ceil(bottom); power <= to; power++) ticks.push(10 ** power);
    const y = (value: number) => TOP + ((to - Math.log10(Math.max(value, 10 ** bottom))) / (to - bottom || 1)) * inside;
    return { y, floor: height - BOTTOM, ticks: ticks.length > 1 ? ticks : [10 ** bottom, 10 ** to] };
  }
  const [from, to] = [Math.min(low ?? Number.POSITIVE_INFINITY, ...known), Math.max(high ?? Number.NEGATIVE_INFINITY, ...known)];
  const step = niceStep((to - from) / 4 || Math.abs(to) / 4 || 1);
  const [bottom, top] = [Math.floor(from / step) * step, Math.ceil(to / step + 1e-9) * step];
  const y = (value: number) => TOP + ((top - value) / (top - bottom || 1)) * inside;
  const ticks = [];
  for (let at = bottom; at <= top + step / 2; at += step) ticks.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return { y, floor: y(Math.min(top, Math.max(bottom, 0))), ticks };
}

/** 1, 2 or 5 times a power of ten, at least `least`. */
export function niceStep(least: number): number {
  const power = 10 ** Math.floor(Math.log10(least));
  return (([1, 2, 5].find((n) => n * power >= least * (1 - 1e-9)) ?? 10) as number) * power;
}

function key(one: Series): HTMLElement {
  const line = svg("svg", { viewBox: "0 0 26 8", width: 26, height: 8, "aria-hidden": "true" });
  line.append(svg("path", { d: "M0 4L26 4", class: "exl2nb-plot-line", "data-style": one.style % 4 }));
  const named = h("span", {}, "");
  named.append(line, ` ${one.name}`);
  return named;
}

function text(x: number, y: number, words: string, anchor: string): SVGElement {
  const element = svg("text", { x, y, "text-anchor": anchor });
  element.textContent = words;
  return element;
}

export function svg(name: string, attributes: Record<string, string | number>): SVGElement {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  setAttributes(element, attributes);
  return element;
}

// Rate-distortion curve as SVG: KL on a logarithmic scale over bits per weight. Line: predicted; dashed: expected of a conversion here;
// rings: measured; filled: the bitrate shown.
import type { CurvePoint, Mark } from "../protocol.gen";
import { h, setAttributes } from "../shared/dom";

const WIDTH = 340;
const HEIGHT = 150;
const [LEFT, RIGHT, TOP, BOTTOM] = [54, 10, 10, 30];
const NOTABLE = 1.05; // times the predicted KL: below it the two lines are one

export interface Scale {
  x(bpw: number): number;
  y(kl: number): number;
  ticks: number[];
}

export interface Shown {
  curve: CurvePoint[];
  marks: Mark[];
  /** KL of a conversion over the predicted one, with so many tokens of calibration. */
  expected: number;
  tokens: number;
  bpw: number;
  kl: number;
  label: string;
}

/** Positions in the picture; ticks are the powers of ten in sight. */
export function scaleOf(curve: CurvePoint[], marks: Mark[], expected = 1): Scale {
  const rates = [...curve.map((p) => p[0]), ...marks.map((m) => m[0])];
  const costs = [...curve.flatMap((p) => [p[2], p[2] * expected]), ...marks.map((m) => m[1])].filter((kl) => kl > 0).map(Math.log10);
  const [left, right] = [Math.min(...rates), Math.max(...rates)];
  const [low, high] = [Math.min(...costs) - 0.1, Math.max(...costs) + 0.1];
  const ticks = [];
  for (let power = Math.ceil(low); power <= high; power++) ticks.push(10 ** power);
  return {
    x: (bpw) => LEFT + ((bpw - left) / (right - left || 1)) * (WIDTH - LEFT - RIGHT),
    y: (kl) => TOP + ((high - Math.log10(Math.max(kl, 1e-12))) / (high - low || 1)) * (HEIGHT - TOP - BOTTOM),
    ticks,
  };
}

export class CurveView {
  readonly element = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "exl2nb-curve", role: "img" });
  readonly legend = h("div", { class: "exl2nb-curve-legend exl2nb-muted" });
  private readonly still = svg("g", {});
  private readonly cross = svg("line", { class: "exl2nb-cross" });
  private readonly dot = svg("circle", { r: 5, class: "exl2nb-dot" });
  private scale: Scale | null = null;
  private drawn: unknown[] = [];

  constructor() {
    this.element.append(this.still, this.cross, this.dot);
  }

  draw({ curve, marks, expected, tokens, bpw, kl, label }: Shown): void {
    setAttributes(this.element, { "aria-label": label });
    if (curve.length < 2) return;
    const key = [curve, marks, expected, tokens];
    if (key.some((part, i) => this.drawn[i] !== part)) {
      this.drawn = key;
      this.background(curve, marks, expected);
      this.drawLegend(marks, expected, tokens);
    }
    const scale = this.scale as Scale;
    setAttributes(this.dot, { cx: scale.x(bpw), cy: scale.y(kl) });
    setAttributes(this.cross, { x1: scale.x(bpw), x2: scale.x(bpw), y1: TOP, y2: HEIGHT - BOTTOM });
  }

  private drawLegend(marks: Mark[], expected: number, tokens: number): void {
    const key = (sample: SVGElement, words: string) => {
      const box = svg("svg", { viewBox: "0 0 18 10", width: 18, height: 10, "aria-hidden": "true" });
      box.append(sample);
      return h("span", { class: "exl2nb-curve-key" }, box, words);
    };
    const line = (name: string) => svg("line", { x1: 0, x2: 18, y1: 5, y2: 5, class: name });
    const parts = [key(line("exl2nb-line"), "predicted")];
    if (expected > NOTABLE) parts.push(key(line("exl2nb-line exl2nb-expected"), `expected (${tokens.toLocaleString("en-US")} tokens)`));
    if (marks.length) parts.push(key(svg("circle", { cx: 9, cy: 5, r: 4, class: "exl2nb-mark" }), "measured"));
    this.legend.replaceChildren(...parts);
  }

  private background(curve: CurvePoint[], marks: Mark[], expected: number): void {
    const scale = scaleOf(curve, marks, expected);
    this.scale = scale;
    const parts: Element[] = [];
    for (const tick of scale.ticks) {
      parts.push(svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: scale.y(tick), y2: scale.y(tick), class: "exl2nb-rule" }));
      parts.push(text(LEFT - 5, scale.y(tick) + 4, "end", String(tick)));
    }
    const [first, last] = [curve[0] as CurvePoint, curve[curve.length - 1] as CurvePoint];
    for (let bits = Math.ceil(first[0]); bits <= last[0]; bits++)
      parts.push(text(scale.x(bits), HEIGHT - BOTTOM + 13, "middle", String(bits)));
    parts.push(text((LEFT + WIDTH) / 2, HEIGHT - 3, "middle", "bits per weight"));
    const title = text(0, 0, "middle", "KL, nats");
    title.setAttribute("transform", `translate(10 ${(HEIGHT - BOTTOM) / 2 + 5}) rotate(-90)`);
    const path = (times: number) =>
      curve.map(([bpw, _nbytes, kl], i) => `${i ? "L" : "M"}${scale.x(bpw).toFixed(1)} ${scale.y(kl * times).toFixed(1)}`).join("");
    parts.push(title, svg("path", { d: path(1), class: "exl2nb-line" }));
    if (expected > NOTABLE) parts.push(svg("path", { d: path(expected), class: "exl2nb-line exl2nb-expected" }));
    for (const [bpw, kl, name] of marks) {
      const ring = svg("circle", { cx: scale.x(bpw), cy: scale.y(kl), r: 4, class: "exl2nb-mark" });
      const tip = svg("title", {});
      tip.textContent = `${name}: KL ${kl.toPrecision(3)} measured`;
      ring.append(tip);
      parts.push(ring);
    }
    this.still.replaceChildren(...parts);
  }
}

function svg(name: string, attributes: Record<string, string | number>): SVGElement {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  setAttributes(element, attributes);
  return element;
}

function text(x: number, y: number, anchor: string, words: string): SVGElement {
  const element = svg("text", { x, y, "text-anchor": anchor });
  element.textContent = words;
  return element;
}

// The 32 weights over the levels they can take: a dot where the file puts each, a ring where the original had it.
import type { WeightSlice } from "../protocol.gen";
import { setAttributes } from "../shared/dom";
import { css } from "../shared/palette";
import { short } from "./stages";
import { fieldColour } from "./words";

const WIDTH = 760;
const HEIGHT = 170;
const [LEFT, RIGHT, TOP, BOTTOM] = [62, 8, 8, 8];
const MOST_LINES = 40;

export class LevelsView {
  readonly element = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "exl2nb-levels", role: "img" });
  private readonly still = svg("g", {});
  private readonly band = svg("rect", { y: TOP, height: HEIGHT - TOP - BOTTOM, class: "exl2nb-band" });
  private step = (WIDTH - LEFT - RIGHT) / 32;

  constructor(point: (value: number) => void, choose: (value: number) => void) {
    this.element.append(this.band, this.still);
    const at = (event: MouseEvent) => {
      const box = this.element.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * WIDTH;
      const value = Math.floor((x - LEFT) / this.step);
      return value >= 0 && value < 32 ? value : -1;
    };
    this.element.addEventListener("pointermove", (event) => point(at(event)));
    this.element.addEventListener("pointerleave", () => point(-1));
    this.element.addEventListener("click", (event) => {
      const value = at(event);
      if (value >= 0) choose(value);
    });
  }

  draw(slice: WeightSlice): void {
    const values = [...slice.weights, ...slice.original];
    const room = slice.step / 2 || 1e-6;
    const [low, high] = [Math.min(...values) - room, Math.max(...values) + room];
    const y = (value: number) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const x = (i: number) => LEFT + (i + 0.5) * this.step;
    const parts = [...this.lines(slice, low, high, y)];
    slice.weights.forEach((weight, i) => {
      const original = slice.original[i];
      if (original !== undefined) {
        parts.push(svg("line", { x1: x(i), x2: x(i), y1: y(weight), y2: y(original), class: "exl2nb-miss" }));
        parts.push(svg("circle", { cx: x(i), cy: y(original), r: 5, class: "exl2nb-ring" }));
      }
      parts.push(svg("circle", { cx: x(i), cy: y(weight), r: 3.5, class: "exl2nb-stored", fill: css(fieldColour(slice, i)) }));
    });
    this.still.replaceChildren(...parts);
    const what = slice.original.length ? "; rings are the original weights" : "";
    setAttributes(this.element, { "aria-label": `The 32 weights on levels ${short(slice.step)} apart${what}; the grid below lists them` });
  }

  mark(value: number): void {
    setAttributes(this.band, { x: LEFT + value * this.step, width: this.step });
  }

  /** A line per level in sight; where they are many, only those that carry a number. */
  private lines(slice: WeightSlice, low: number, high: number, y: (value: number) => number): SVGElement[] {
    if (slice.step <= 0) return [];
    const [first, last] = [Math.ceil(low / slice.step), Math.floor(high / slice.step)];
    const every = Math.ceil((last - first + 1) / MOST_LINES);
    const named = Math.max(every, Math.ceil((last - first + 1) / 7));
    const parts = [];
    for (let level = first; level <= last; level++) {
      const [drawn, said] = [level % every === 0, level % named === 0];
      const at = y(level * slice.step);
      if (drawn || said)
        parts.push(svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at, class: level ? "exl2nb-rule" : "exl2nb-rule exl2nb-zero" }));
      if (!said) continue;
      const text = svg("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" });
      text.textContent = short(level * slice.step);
      parts.push(text);
    }
    return parts;
  }
}

function svg(name: string, attributes: Record<string, string | number>): SVGElement {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  setAttributes(element, attributes);
  return element;
}

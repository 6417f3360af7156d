// What the colours of a map mean: a bar of them with numbers.
import type { BitCell } from "../protocol.gen";
import { h, setAttributes } from "./dom";
import { EXPLAINED, type Metric } from "./metrics";
import { colour, css, diverging, ink, type Rgb, shade } from "./palette";

const STOPS = 12;

interface Tick {
  /** Place on the bar, 0 to 1. */
  at: number;
  text: string;
}

/** Colour at each place of the bar, and its numbers. Scales depend on the extremes, as in `painter`. */
export function scaleOf(cells: BitCell[], metric: Metric): { colour: (at: number) => Rgb; ticks: Tick[] } {
  if (metric === "bpw") {
    const ticks = [2, 3, 4, 5, 6, 8].map((bits) => ({ at: (bits - 2) / 6, text: String(bits) }));
    return { colour: (at) => colour(2 + 6 * at), ticks };
  }
  if (metric === "difference") {
    const ticks = [-2, -1, 0, 1, 2].map((bits) => ({ at: (bits + 2) / 4, text: bits > 0 ? `+${bits}` : String(bits).replace("-", "−") }));
    return { colour: (at) => diverging(4 * at - 2), ticks };
  }
  const known = cells.map((cell) => (metric === "error" ? cell.error : cell.share)).filter((value): value is number => value !== null);
  const [low, high] = metric === "error" ? [Math.min(...known.filter((value) => value > 0)), Math.max(...known)] : [0, Math.max(...known)];
  const text = (value: number) => (metric === "error" ? value.toPrecision(2) : `${(100 * value).toFixed(1)} %`);
  return {
    colour: shade,
    ticks: [
      { at: 0, text: text(low) },
      { at: 1, text: text(high) },
    ],
  };
}

export class ColourBar {
  readonly element = h("div", { class: "exl2nb-colourbar", role: "img" });
  private readonly words = h("span", { "aria-hidden": "true" });
  private readonly bar = h("div", { "aria-hidden": "true" });
  private drawn = "";

  constructor() {
    this.element.append(this.words, this.bar);
  }

  draw(cells: BitCell[], metric: Metric): void {
    const { colour: at, ticks } = scaleOf(cells, metric);
    const key = JSON.stringify([metric, ticks]);
    if (this.drawn === key) return;
    this.drawn = key;
    this.words.textContent = EXPLAINED[metric];
    this.bar.style.background = `linear-gradient(to right, ${Array.from({ length: STOPS + 1 }, (_, i) => css(at(i / STOPS))).join(", ")})`;
    this.bar.replaceChildren(
      ...ticks.map((tick) => {
        const mark = h("span", {}, tick.text);
        mark.style.cssText = `inset-inline-start:${(100 * tick.at).toFixed(1)}%;color:${ink(at(tick.at))}`;
        if (tick.at === 0 || tick.at === 1) mark.dataset.end = String(tick.at);
        return mark;
      }),
    );
    setAttributes(this.element, {
      "aria-label": `${EXPLAINED[metric]}: colours from ${ticks[0]?.text} to ${ticks[ticks.length - 1]?.text}`,
    });
  }
}

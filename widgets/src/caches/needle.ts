// The needle: what is hidden, and how likely its answer is under each cache at each depth, as a table that fills.
import type { CachesState, NeedleHit } from "../protocol.gen";
import type { State } from "../shared/afm";
import { h } from "../shared/dom";
import { percent } from "../shared/format";

export class NeedleTable {
  readonly element = h("div", { class: "exl2nb-needle-result" });
  private drawn: unknown = null;

  constructor(private readonly caches: State<CachesState>) {}

  draw(): void {
    const get = this.caches.get;
    const hits = get("_needle");
    if (this.drawn === hits) return;
    this.drawn = hits;
    this.element.hidden = hits.length === 0;
    if (hits.length) this.element.replaceChildren(table(hits, get("_needle_modes"), get("_needle_depths")));
  }
}

/** Position of the fact, in words. */
export function place(depth: number | null): string {
  if (depth === null) return "absent (control)";
  if (depth === 0) return "at the start";
  if (depth === 1) return "at the end";
  return `${Math.round(100 * depth)} % of the way`;
}

function table(hits: NeedleHit[], modes: string[], depths: (number | null)[]): HTMLElement {
  const head = h(
    "tr",
    {},
    h("th", { scope: "col" }, "position of the fact"),
    ...modes.map((m) => h("th", { scope: "col" }, m.toUpperCase())),
  );
  const rows = depths.map((depth) => {
    const cells = modes.map((mode) => {
      const hit = hits.find(([m, d]) => m === mode && d === depth);
      if (!hit) return h("td", {}, "");
      const bar = h("i", { "aria-hidden": "true" });
      bar.style.inlineSize = `${(100 * hit[2]).toFixed(1)}%`;
      return h("td", { title: `first token at rank ${hit[3]}` }, bar, h("span", {}, percent(hit[2])));
    });
    return h("tr", depth === null ? { class: "exl2nb-control-row" } : {}, h("th", { scope: "row" }, place(depth)), ...cells);
  });
  const caption = h("caption", { class: "exl2nb-sr" }, "Probability of the answer by position of the fact and by cache");
  return h("table", { class: "exl2nb-needle-table" }, caption, h("thead", {}, head), h("tbody", {}, ...rows));
}

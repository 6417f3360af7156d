// The chain as a table: a column per step, a row per token; and the line that the draw walks along.
import type { LinePart, SampleStep, SampleToken } from "../protocol.gen";
import { h, setAttributes } from "../shared/dom";
import { count, percent, visible } from "../shared/format";

const NARROW = 0.035; // of the line: below it a piece has no room for its text

/** Height of a column's funnel, 0..1: survivors on a logarithmic scale. */
export function funnel(survivors: number, vocab: number): number {
  return vocab > 1 ? Math.log1p(survivors) / Math.log1p(vocab) : 1;
}

/** What a step took away, in words. */
export function removed({ name, removed: gone, mass }: SampleStep): string {
  if (name === "logits") return "the whole vocabulary";
  return gone ? `− ${count(gone, "token")}, ${percent(mass)}` : "none removed";
}

export function chainTable(steps: SampleStep[], tokens: SampleToken[], drawn: number, vocab: number): HTMLElement {
  const most = Math.max(...steps.flatMap(({ probs }) => probs.map((p) => p ?? 0)), 1e-9);
  const head = h("tr", {}, h("th", { scope: "col" }, "token"));
  for (const step of steps) head.append(heading(step, vocab));
  const rows = tokens.map(([id, text], row) => {
    const mark = h("span", { class: "exl2nb-mark", "aria-hidden": "true" }, id === drawn ? "▸" : "");
    const name = h("th", { scope: "row", title: `id ${id}` }, mark, h("code", {}, visible(text)), id === drawn ? sr("drawn") : "");
    const line = h("tr", {}, name, ...steps.map((step) => cell(step.probs[row] ?? null, most)));
    if (id === drawn) line.dataset.drawn = "";
    return line;
  });
  return h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows));
}

function heading(step: SampleStep, vocab: number): HTMLElement {
  const { name, settings, survivors, temperature, entropy_bits: entropy } = step;
  const bar = h("i");
  bar.style.blockSize = `${(100 * funnel(survivors, vocab)).toFixed(1)}%`;
  const told = settings.includes("=") && !settings.includes(",") ? settings.slice(settings.indexOf("=") + 1) : "";
  const facts = [`entropy ${entropy.toFixed(2)} bits`, settings, temperature !== 1 ? `temperature so far ${temperature}` : ""];
  return h(
    "th",
    { scope: "col", title: facts.filter(Boolean).join("; ") },
    h("div", { class: "exl2nb-funnel", "aria-hidden": "true" }, bar),
    h("div", {}, name.replace(/_/g, " "), told ? ` ${told}` : ""),
    h("div", { class: "exl2nb-left" }, `${survivors.toLocaleString("en-US")} left`),
    h("div", { class: "exl2nb-muted" }, removed(step)),
  );
}

function cell(prob: number | null, most: number): HTMLElement {
  if (prob === null) return h("td", { class: "exl2nb-gone" }, h("span", { "aria-hidden": "true" }, "×"), sr("removed"));
  const bar = h("i", { "aria-hidden": "true" });
  bar.style.inlineSize = `${((100 * prob) / most).toFixed(1)}%`;
  return h("td", {}, h("span", { class: "exl2nb-bar" }, bar), percent(prob));
}

/** Probabilities in order of ids, end to end; the random number points at one of them. */
export class LineView {
  readonly element = h("div", { class: "exl2nb-line", role: "img" });

  draw(parts: LinePart[], drawn: number, uniform: number | null): void {
    const pieces = parts.map(([id, text, prob]) => {
      const piece = h("span", { title: `${id < 0 ? text : visible(text)}: ${percent(prob)}` });
      piece.style.flex = `${prob} ${prob} 0`;
      if (prob >= NARROW) piece.textContent = id < 0 ? "…" : visible(text);
      if (id < 0) piece.dataset.many = "";
      if (id === drawn) piece.dataset.drawn = "";
      return piece;
    });
    const here = h("i", { class: "exl2nb-here" });
    here.hidden = uniform === null;
    here.style.insetInlineStart = `${100 * (uniform ?? 0)}%`;
    this.element.replaceChildren(h("div", {}, ...pieces), here);
    const at = uniform === null ? "no random number" : `the random number ${uniform.toFixed(4)} selects one of them`;
    setAttributes(this.element, { "aria-label": `Probabilities of the tokens left, in order of their ids; ${at}` });
  }
}

function sr(text: string): HTMLElement {
  return h("span", { class: "exl2nb-sr" }, text);
}

// One matrix as its file has it: a bar per run of groups, its width true to rows, from the top row to the last.
import type { BitCell, BitPart, Run } from "../protocol.gen";
import { h } from "./dom";
import { bytes } from "./format";
import { colour, css, ink } from "./palette";

/** "12 groups of 6 bits, 52 of 4": groups by width, in the order of the file. */
export function legend(runs: Run[]): string {
  const groups = new Map<number, number>();
  for (const [bits, _rows, n] of runs) groups.set(bits, (groups.get(bits) ?? 0) + n);
  const parts = [...groups].map(([bits, n], i) => (i ? `${n} of ${bits}` : `${n} group${n === 1 ? "" : "s"} of ${bits} bits`));
  return parts.join(", ");
}

export function strip(cell: BitCell): HTMLElement {
  const { layer, matrix, bpw, nbytes, rows, columns, experts, error, share, parts } = cell;
  const where = layer < 0 ? matrix : `layer ${layer}, ${matrix}`;
  const shape = rows && columns ? `${rows} × ${columns}` : "";
  const facts = [shape, `${bpw.toFixed(3)} bits per weight`, bytes(nbytes), experts > 1 ? `${experts} experts` : ""];
  if (share !== null) facts.push(`${(100 * share).toFixed(1)} % of the predicted KL`);
  if (error !== null) facts.push(`error ${error.toPrecision(3)}`);
  const box = h("div", { class: "exl2nb-strip-box" });
  box.append(h("div", {}, h("b", {}, where), `: ${facts.filter(Boolean).join(" · ")}`));
  for (const part of parts) box.append(...lane(part, parts.length > 1));
  const hidden = experts - parts.length;
  if (hidden > 0) box.append(h("div", { class: "exl2nb-muted" }, `${hidden} more experts not shown`));
  return box;
}

function lane([name, bpw, format, runs]: BitPart, named: boolean): HTMLElement[] {
  const words = runs.length
    ? `${legend(runs)}, ${bpw.toFixed(2)} on average`
    : format && format !== "exl2"
      ? `stored as ${format}`
      : "groups unknown";
  const bars = h("div", { class: "exl2nb-strip", role: "img", "aria-label": words });
  for (const [bits, rows, n] of runs) {
    const total = rows * n;
    const back = colour(bits);
    const bar = h("div", { title: `${n} × ${rows} rows of ${bits} bits` }, String(bits));
    bar.style.cssText = `flex:${total} ${total} 0;background-color:${css(back)};color:${ink(back)};--n:${n}`;
    bars.append(bar);
  }
  const text = h("div", { class: "exl2nb-muted" }, named ? `${name}: ${words}` : words);
  return runs.length ? [bars, text] : [text];
}

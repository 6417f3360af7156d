// One line per column: size, mean KL, agreement and speed over all prompts, so that the trade-off is visible at once.
import type { CellSpeed, CompareColumn, KlToken } from "../protocol.gen";
import { h } from "../shared/dom";
import { bytes, percent, rate } from "../shared/format";
import { klText, summary } from "../shared/kl";

export function summaryTable(columns: CompareColumn[], cells: readonly (readonly KlToken[])[], speeds: CellSpeed[]): HTMLElement {
  const names = ["", "bits per weight", "weights", "mean KL", "top-1 agreement", "tok/s"];
  const head = h("tr", {}, ...names.map((name) => (name ? h("th", { scope: "col" }, name) : h("td", {}))));
  const rows = columns.map(([label, note, nbytes, bpw], column) => {
    const tokens = cells.filter((_, cell) => cell % columns.length === column).flat();
    const { mean, same } = summary(tokens);
    const found = speeds.filter(([cell, tps]) => cell % columns.length === column && tps > 0).map(([_cell, tps]) => tps);
    const speed = found.length ? rate(found.reduce((a, b) => a + b, 0) / found.length) : "";
    const values = [bpw === null ? "" : bpw.toFixed(2), nbytes === null ? "" : bytes(nbytes)];
    if (column === 0) values.push("reference", "");
    else values.push(mean === null ? "" : klText(mean), same === null ? "" : percent(same));
    const name = h("th", { scope: "row" }, label, ...(note ? [h("span", { class: "exl2nb-muted" }, ` ${note}`)] : []));
    return h("tr", {}, name, ...[...values, speed].map((value) => h("td", {}, value)));
  });
  const caption = h("caption", { class: "exl2nb-sr" }, "Columns over all prompts");
  return h("table", { class: "exl2nb-summary" }, caption, h("thead", {}, head), h("tbody", {}, ...rows));
}

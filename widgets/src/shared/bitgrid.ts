// The heat map of bits: an ARIA grid navigated by the arrow keys. Knows nothing of models or of the kernel.
import { h, setAttributes } from "./dom";
import { css, ink, type Rgb } from "./palette";

export const OUTSIDE = -1;

/** Row and column of a cell. */
export interface Place {
  layer: number;
  matrix: string;
}

/** How a cell looks and what is said of it. */
export interface Paint {
  text: string;
  colour: Rgb | null;
  label: string;
}

export class BitGridView {
  readonly element: HTMLElement;
  private cells: HTMLElement[] = [];
  private rows: number[][] = [];
  private places: Place[] = [];
  private current = 0;

  constructor(
    private readonly choose: (place: Place | null) => void,
    private readonly point: (index: number) => void,
    label = "Bits per weight: matrices down, layers across",
  ) {
    this.element = h("div", { class: "exl2nb-grid", role: "grid", "aria-label": label });
    this.element.addEventListener("click", (event) => {
      const index = indexOf(event.target);
      if (index >= 0) this.toggle(index);
    });
    this.element.addEventListener("pointerover", (event) => this.point(indexOf(event.target)));
    this.element.addEventListener("pointerleave", () => this.point(-1));
    this.element.addEventListener("focusin", (event) => {
      const index = indexOf(event.target);
      if (index < 0) return;
      this.move(index, false);
      this.point(index);
    });
    this.element.addEventListener("focusout", () => this.point(-1));
    this.element.addEventListener("keydown", (event) => this.key(event));
  }

  /** Make the cells anew: only when the model changes, not when its bits do. */
  build(matrices: string[], layers: number[], places: Place[]): void {
    this.places = places;
    this.cells = places.map((_, i) => h("div", { class: "exl2nb-cell", role: "gridcell", tabindex: -1, "data-i": i }));
    const at = new Map(places.map((place, i) => [`${place.layer}/${place.matrix}`, i]));
    const head = h("div", { role: "row", class: "exl2nb-grid-row exl2nb-grid-head" }, h("div", { role: "columnheader" }, "layer"));
    for (const layer of layers) head.append(h("div", { role: "columnheader" }, String(layer)));
    this.rows = [];
    const made = matrices.map((matrix) => this.row(matrix, layers, at));
    this.element.replaceChildren(head, ...made);
    this.element.style.setProperty("--exl-columns", String(Math.max(1, layers.length)));
    this.current = 0;
    if (this.cells[0]) this.cells[0].tabIndex = 0;
  }

  private row(matrix: string, layers: number[], at: Map<string, number>): HTMLElement {
    const row = h("div", { role: "row", class: "exl2nb-grid-row" }, h("div", { role: "rowheader", title: matrix }, matrix));
    const inside = layers.map((layer) => at.get(`${layer}/${matrix}`) ?? -1);
    const alone = at.get(`${OUTSIDE}/${matrix}`);
    const indices = inside.some((i) => i >= 0) || alone === undefined ? inside : [alone];
    for (const i of indices) row.append(this.cells[i] ?? h("div", { role: "gridcell", class: "exl2nb-empty" }));
    this.rows.push(indices.filter((i) => i >= 0));
    return row;
  }

  paint(of: (index: number) => Paint): void {
    this.cells.forEach((cell, i) => {
      const { text, colour, label } = of(i);
      if (cell.textContent !== text) cell.textContent = text;
      cell.style.background = colour ? css(colour) : "";
      cell.style.color = colour ? ink(colour) : "";
      setAttributes(cell, { "aria-label": label });
    });
  }

  mark(selected: Place | null): void {
    this.cells.forEach((cell, i) => {
      const place = this.places[i] as Place;
      const on = selected !== null && place.layer === selected.layer && place.matrix === selected.matrix;
      setAttributes(cell, { "aria-selected": String(on) });
      if (on) this.move(i, false);
    });
  }

  private toggle(index: number): void {
    const on = this.cells[index]?.getAttribute("aria-selected") === "true";
    this.choose(on ? null : (this.places[index] as Place));
  }

  private move(index: number, focus = true): void {
    const [from, to] = [this.cells[this.current], this.cells[index]];
    if (!to) return;
    if (from) from.tabIndex = -1;
    to.tabIndex = 0;
    this.current = index;
    if (focus) to.focus();
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" || event.key === " ") this.toggle(this.current);
    else if (event.key === "Escape") this.choose(null);
    else {
      const next = this.target(event.key);
      if (next === null) return;
      this.move(next);
    }
    event.preventDefault();
  }

  private target(key: string): number | null {
    const y = this.rows.findIndex((row) => row.includes(this.current));
    const row = this.rows[y] ?? [];
    const x = row.indexOf(this.current);
    if (key === "ArrowRight") return row[Math.min(row.length - 1, x + 1)] ?? null;
    if (key === "ArrowLeft") return row[Math.max(0, x - 1)] ?? null;
    if (key === "Home") return row[0] ?? null;
    if (key === "End") return row[row.length - 1] ?? null;
    const step = key === "ArrowDown" ? 1 : key === "ArrowUp" ? -1 : 0;
    if (!step) return null;
    const other = this.rows[Math.min(this.rows.length - 1, Math.max(0, y + step))] ?? row;
    return other[Math.min(other.length - 1, x)] ?? null;
  }
}

function indexOf(target: EventTarget | null): number {
  const cell = target instanceof HTMLElement ? target.closest<HTMLElement>("[data-i]") : null;
  return cell ? Number(cell.dataset.i) : -1;
}

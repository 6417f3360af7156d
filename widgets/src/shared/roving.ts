// Cells in rows navigated by the arrow keys: one of them has the tab stop, the pointer and the focus say which is looked at.
import { setAttributes } from "./dom";

export interface Roving {
  /** New cells; `columns` of them make a row. The tab stop stays where it was, if there is one. */
  set(cells: HTMLElement[], columns: number): void;
  /** Give the tab stop, and with `focus` the focus, to a cell. */
  move(index: number, focus?: boolean): void;
}

/** `point` hears the index under the pointer or the focus (-1: none), `choose` that of a click, of Enter, Space or an arrow key. */
export function roving(box: HTMLElement, point: (index: number) => void, choose: (index: number) => void): Roving {
  let cells: HTMLElement[] = [];
  let columns = 1;
  let current = 0;
  const indexOf = (target: EventTarget | null) => {
    const cell = target instanceof HTMLElement ? target.closest<HTMLElement>("[data-i]") : null;
    return cell ? Number(cell.dataset.i) : -1;
  };
  const move = (index: number, focus = false) => {
    const to = cells[index];
    if (!to) return;
    setAttributes(cells[current] ?? to, { tabindex: -1 });
    setAttributes(to, { tabindex: 0 });
    current = index;
    if (focus) to.focus();
  };
  box.addEventListener("pointerover", (event) => point(indexOf(event.target)));
  box.addEventListener("pointerleave", () => point(-1));
  box.addEventListener("focusin", (event) => point(indexOf(event.target)));
  box.addEventListener("focusout", () => point(-1));
  box.addEventListener("click", (event) => {
    const index = indexOf(event.target);
    if (index < 0) return;
    move(index, true);
    choose(index);
  });
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const index = indexOf(event.target);
    if (index < 0) return;
    const to = target(event.key, index, columns, cells.length);
    if (to === null) return;
    event.preventDefault();
    move(to, true);
    choose(to);
  });
  return {
    set(next, perRow) {
      cells = next;
      columns = Math.max(1, perRow);
      current = Math.min(current, Math.max(0, cells.length - 1));
      cells.forEach((cell, i) => {
        setAttributes(cell, { "data-i": i, tabindex: i === current ? 0 : -1 });
      });
    },
    move,
  };
}

function target(key: string, index: number, columns: number, count: number): number | null {
  const inside = (i: number) => (i >= 0 && i < count ? i : index);
  if (key === "ArrowRight") return inside(index + 1);
  if (key === "ArrowLeft") return inside(index - 1);
  if (key === "ArrowDown") return inside(index + columns);
  if (key === "ArrowUp") return inside(index - columns);
  if (key === "Home") return index - (index % columns);
  if (key === "End") return Math.min(count - 1, index - (index % columns) + columns - 1);
  return key === "Enter" || key === " " ? index : null;
}

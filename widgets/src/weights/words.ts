// The words of one unit as rows of bits, bit 31 on the left, each field in the colour of its code.
import type { WeightSlice } from "../protocol.gen";
import { h } from "../shared/dom";
import { css, diverging, ink } from "../shared/palette";
import { hex, pieces, signed, valueAt } from "./stages";

export function fieldColour(slice: WeightSlice, i: number) {
  return diverging((2 * ((slice.codes[i] as number) - slice.zero)) / slice.zero);
}

export class WordsView {
  readonly element = h("div", { class: "exl2nb-words", role: "group", tabindex: 0, "aria-label": "The words, bit by bit" });
  private bits: HTMLElement[][] = [];

  constructor(point: (value: number) => void, choose: (value: number) => void) {
    const at = (target: EventTarget | null) => (target instanceof HTMLElement && target.dataset.v ? Number(target.dataset.v) : -1);
    this.element.addEventListener("pointerover", (event) => point(at(event.target)));
    this.element.addEventListener("pointerleave", () => point(-1));
    this.element.addEventListener("click", (event) => {
      const value = at(event.target);
      if (value >= 0) choose(value);
    });
  }

  draw(slice: WeightSlice): void {
    this.bits = slice.codes.map(() => []);
    const rows = slice.words.map((word, w) => this.row(slice, word, w));
    this.element.replaceChildren(...rows);
  }

  /** Ring the bits of one value. */
  mark(value: number): void {
    this.bits.forEach((cells, v) => {
      for (const cell of cells) cell.classList.toggle("exl2nb-on", v === value);
    });
  }

  private row(slice: WeightSlice, word: number, w: number): HTMLElement {
    const cells = [];
    for (let bit = 31; bit >= 0; bit--) {
      const value = valueAt(w, bit, slice.bits);
      const colour = fieldColour(slice, value);
      const cell = h("span", { "data-v": value }, String((word >>> bit) & 1));
      cell.style.cssText = `background:${css(colour)};color:${ink(colour)}`;
      const [piece] = pieces(value, slice.bits).filter((one) => one.word === w);
      if (piece?.high === bit) cell.dataset.first = "";
      (this.bits[value] as HTMLElement[]).push(cell);
      cells.push(cell);
    }
    const inside = slice.codes.map((code, v) => ({ code, v })).filter(({ v }) => pieces(v, slice.bits).some((one) => one.word === w));
    const label = `word ${slice.first_word + w}: ${hex(word)}; levels ${inside.map(({ code }) => signed(code - slice.zero)).join(" ")}`;
    return h(
      "div",
      { class: "exl2nb-word", role: "img", "aria-label": label },
      h("span", { class: "exl2nb-muted" }, String(slice.first_word + w)),
      h("code", {}, hex(word)),
      h("span", { class: "exl2nb-bits" }, ...cells),
    );
  }
}

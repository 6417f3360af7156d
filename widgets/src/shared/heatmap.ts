// A matrix of any size as a canvas, one pixel a cell, scaled by the page: thousands of cells are drawn in a few milliseconds. The pointer and
// the arrow keys move its cursor; what is under it is said in words.
import { h, setAttributes } from "./dom";
import { diverging, type Rgb, shade } from "./palette";

export interface Heat {
  columns: number;
  rows: number;
  /** Colour of a cell as a pixel of image data; 0 = transparent. Take it from a table: it is asked for every cell. */
  pixel: (column: number, row: number) => number;
  label: string;
}

/** A colour as a pixel of image data, whose bytes are red, green, blue, alpha. */
function packed([red, green, blue]: Rgb): number {
  return ((255 << 24) | (Math.round(blue) << 16) | (Math.round(green) << 8) | Math.round(red)) >>> 0;
}

/** Light to dark in 256 steps, as pixels. */
export const SHADES = Uint32Array.from({ length: 256 }, (_, step) => packed(shade(step / 255)));

/** Red through light to blue in 511 steps, as pixels; step 255 is light. */
export const SIGNED = Uint32Array.from({ length: 511 }, (_, step) => packed(diverging((step - 255) / 127.5)));

/** The pixel of a share of 0 to 1. */
export function shadePixel(share: number): number {
  return SHADES[Math.round(255 * Math.min(1, Math.max(0, share)))] as number;
}

/** The bytes that travelled as base64. */
export function bytesOf(base64: string): Uint8Array {
  const text = atob(base64);
  const found = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) found[i] = text.charCodeAt(i);
  return found;
}

export class HeatMap {
  readonly element = h("div", { class: "exl2nb-heat", role: "application", tabindex: 0, "aria-roledescription": "heat map" });
  readonly canvas = h("canvas", { "aria-hidden": "true" });
  private readonly cursor = h("div", { class: "exl2nb-heat-cursor", "aria-hidden": "true", hidden: true });
  private columns = 0;
  private rows = 0;
  private at: [number, number] = [-1, -1];

  constructor(
    private readonly point: (column: number, row: number) => void,
    private readonly choose: (column: number, row: number) => void = () => {},
  ) {
    this.element.append(this.canvas, this.cursor);
    this.element.addEventListener("pointermove", (event) => this.point(...this.placeOf(event)));
    this.element.addEventListener("pointerleave", () => this.point(-1, -1));
    this.element.addEventListener("click", (event) => {
      const [x, y] = this.placeOf(event);
      if (x >= 0) this.choose(x, y);
    });
    this.element.addEventListener("focus", () => {
      if (this.at[0] < 0 && this.columns) this.mark(0, 0);
      this.point(...this.at);
    });
    this.element.addEventListener("keydown", (event) => this.key(event));
  }

  draw({ columns, rows, pixel, label }: Heat): void {
    [this.columns, this.rows] = [columns, rows];
    setAttributes(this.element, { "aria-label": label });
    this.canvas.width = Math.max(1, columns);
    this.canvas.height = Math.max(1, rows);
    const context = this.canvas.getContext("2d");
    if (!context || !columns || !rows) return;
    const image = context.createImageData(columns, rows);
    const pixels = new Uint32Array(image.data.buffer);
    for (let y = 0; y < rows; y++) {
      for (let x = 0; x < columns; x++) pixels[y * columns + x] = pixel(x, y);
    }
    context.putImageData(image, 0, 0);
    this.mark(...this.at);
  }

  /** Put the cursor on a cell; -1 hides it. A row of -1 marks the whole column, a column of -1 the whole row. */
  mark(column: number, row: number): void {
    this.at = [Math.min(column, this.columns - 1), Math.min(row, this.rows - 1)];
    const [x, y] = this.at;
    this.cursor.hidden = (x < 0 && y < 0) || !this.columns || !this.rows;
    const share = (n: number) => `${(100 * n).toFixed(4)}%`;
    this.cursor.style.insetInlineStart = share(x < 0 ? 0 : x / this.columns);
    this.cursor.style.inlineSize = share(x < 0 ? 1 : 1 / this.columns);
    this.cursor.style.insetBlockStart = share(y < 0 ? 0 : y / this.rows);
    this.cursor.style.blockSize = share(y < 0 ? 1 : 1 / this.rows);
  }

  private placeOf(event: MouseEvent): [number, number] {
    const box = this.canvas.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left) / box.width) * this.columns);
    const y = Math.floor(((event.clientY - box.top) / box.height) * this.rows);
    return x >= 0 && y >= 0 && x < this.columns && y < this.rows ? [x, y] : [-1, -1];
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const steps: Record<string, [number, number]> = {
      ...{ ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] },
      ...{ Home: [-this.columns, 0], End: [this.columns, 0], PageUp: [0, -this.rows], PageDown: [0, this.rows] },
    };
    const step = steps[event.key];
    if (event.key === "Enter" || event.key === " ") this.choose(...this.at);
    else if (step) {
      const inside = (value: number, count: number) => Math.min(count - 1, Math.max(0, value));
      this.mark(inside(this.at[0] + step[0], this.columns), inside(this.at[1] + step[1], this.rows));
      this.point(...this.at);
    } else return;
    event.preventDefault();
  }
}

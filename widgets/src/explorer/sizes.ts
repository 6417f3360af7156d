// The bitrate by its size: files of so many bytes, or a memory that weights and a cache must fit in. The kernel finds the largest that fits.
import type { SolveSize } from "../protocol.gen";
import { h, uniqueId } from "../shared/dom";

const CACHES = ["fp16", "q8", "q6", "q4"];
const CONTEXT = 4096;

/** What one unit of the number field is: GiB where the largest model takes one. */
export function unitOf(largest: number): [name: string, bytes: number] {
  return largest >= 2 ** 30 ? ["GiB", 2 ** 30] : ["MiB", 2 ** 20];
}

export class SizesView {
  readonly element: HTMLElement;
  private readonly kind: HTMLSelectElement;
  private readonly number = h("input", { type: "number", min: 0, step: "any", "aria-label": "Size" });
  private readonly unit = h("span");
  private readonly context = h("input", { type: "number", min: 0, step: 256, value: CONTEXT, "aria-label": "Tokens of the cache" });
  private readonly cache: HTMLSelectElement;
  private readonly beside: HTMLElement;
  private scale = 2 ** 20;

  constructor(
    private readonly ask: (wish: SolveSize) => void,
    private readonly free: number | null,
  ) {
    const id = uniqueId("size");
    const option = (value: string, words = value) => h("option", { value }, words);
    this.kind = h("select", { id }, option("bytes", "file size"), option("fits", "memory"));
    this.cache = h("select", { "aria-label": "Cache" }, ...CACHES.map((mode) => option(mode)));
    this.beside = h("span", { class: "exl2nb-beside", hidden: true }, "with", this.context, "tokens of", this.cache, "cache");
    this.element = h("div", { class: "exl2nb-sizes" }, h("label", { for: id }, "Set by"), this.kind, this.number, this.unit, this.beside);
    this.kind.addEventListener("change", () => this.choose());
    for (const field of [this.number, this.context, this.cache]) field.addEventListener("change", () => this.send());
  }

  /** Beside the slider: the number is the size of what is shown, unless the reader is at it or asked for a memory. */
  draw(nbytes: number, largest: number): void {
    const [name, scale] = unitOf(largest);
    this.scale = scale;
    this.unit.textContent = name;
    if (this.kind.value === "bytes" && document.activeElement !== this.number) this.number.value = (nbytes / scale).toFixed(2);
  }

  private choose(): void {
    const fits = this.kind.value === "fits";
    this.beside.hidden = !fits;
    this.number.value = fits && this.free !== null ? (this.free / this.scale).toFixed(2) : "";
    if (this.number.value) this.send();
    else this.number.focus();
  }

  private send(): void {
    const size = Number(this.number.value) * this.scale;
    const context = Number(this.context.value);
    if (!(size > 0) || !(context >= 0)) return;
    const kind = this.kind.value as SolveSize["kind"];
    this.ask({ type: "solve_size", kind, size: Math.round(size), context: Math.round(context), cache: this.cache.value });
  }
}

// MemoryPlan: one stacked bar against free memory; context, texts and cache mode are answered here, from the formula's coefficients.
import type { PlanState } from "../protocol.gen";
import type { State } from "../shared/afm";
import { h, setAttributes, uniqueId } from "../shared/dom";
import { bytes } from "../shared/format";
import { snapshot } from "../shared/snapshot";
import { tools, tsv } from "../shared/tools";
import { View, widget } from "../shared/view";
import { advice, type Choice, fittingContext, PARTS, type Part, parts } from "./formula";
import "./plan.css";

const GIB = 2 ** 30;
const NAMES: Record<Part, string> = {
  weights: "weights",
  cache: "cache",
  work: "activations",
  graphs: "graphs",
  logits: "logits",
  rounding: "rounding",
  adapters: "LoRA adapters",
};
const MOST_TEXTS = 256;
const STEPS = 48; // stops of the context slider, evenly in the logarithm

class PlanView extends View<PlanState> {
  private readonly title = h("b");
  private readonly device = h("span", { class: "exl2nb-muted" });
  private readonly slider: HTMLInputElement;
  private readonly context: HTMLInputElement;
  private readonly batch: HTMLInputElement;
  private readonly mode: HTMLSelectElement;
  private readonly free: HTMLInputElement;
  private readonly bar = h("div", { class: "exl2nb-bar", role: "img" });
  private readonly limit = h("div", { class: "exl2nb-limit" });
  private readonly verdict = h("div", { class: "exl2nb-verdict" });
  private readonly rows = h("tbody");

  constructor(plan: State<PlanState>) {
    super(plan, "plan", "Memory plan");
    const number = (low: number, high: number, step: number | "any") => h("input", { type: "number", min: low, max: high, step });
    const longest = plan.get("_formula").longest;
    this.slider = h("input", { type: "range", min: 0, max: STEPS, step: 1, "aria-label": "Context, slider" });
    this.context = number(1, longest, 1);
    this.batch = number(1, MOST_TEXTS, 1);
    this.mode = h("select");
    for (const mode of plan.get("_modes")) this.mode.append(h("option", { value: mode }, mode));
    this.free = number(0.01, 4096, "any");
    const controls = h("div", { class: "exl2nb-controls" });
    controls.append(
      field("Context, tokens", this.context, this.slider),
      field("Sequences", this.batch),
      field("Cache", this.mode),
      field("Free memory, GiB", this.free),
    );
    const head = h(
      "thead",
      {},
      h("tr", {}, h("th", { scope: "col" }, "part"), h("th", { scope: "col" }, "memory"), h("th", { scope: "col" }, "share")),
    );
    const table = h("table", {}, head, this.rows);
    const box = h("div", { class: "exl2nb-barbox" }, this.bar, this.limit);
    const taken = tools("plan", { text: () => this.text(), picture: () => snapshot(this.root) });
    const name = h("div", { class: "exl2nb-head" }, this.title, this.device, taken);
    this.root.append(h("div", { class: "exl2nb-card" }, name, controls, this.error, box, this.verdict, table), this.spoken);
    this.listen();
    this.begin(["name", "device", "context", "batch", "cache_mode", "free", "_formula", "error"]);
  }

  private listen(): void {
    this.slider.addEventListener("input", () => this.put("context", this.stop(Number(this.slider.value))));
    this.context.addEventListener("change", () => this.put("context", whole(this.context)));
    this.batch.addEventListener("change", () => this.put("batch", whole(this.batch)));
    this.mode.addEventListener("change", () => this.put("cache_mode", this.mode.value));
    this.free.addEventListener("change", () => {
      const gib = Number(this.free.value);
      if (this.free.value.trim() === "") this.put("free", null);
      else if (gib > 0) this.put("free", Math.round(Math.min(4096, gib) * GIB));
      else this.frame.request();
    });
    for (const element of [this.slider, this.context, this.batch, this.mode, this.free]) {
      element.addEventListener("change", () => this.say());
      element.addEventListener("blur", () => this.frame.request());
    }
  }

  private put<K extends "context" | "batch" | "cache_mode" | "free">(name: K, value: PlanState[K]): void {
    this.widget.set(name, value);
    this.widget.save();
    this.frame.request();
  }

  private say(): void {
    this.draw();
    this.spoken.textContent = this.verdict.textContent;
  }

  /** Tokens at a stop of the slider: whole pages, from one to the longest. */
  private stop(at: number): number {
    const { page_tokens: page, longest } = this.widget.get("_formula");
    const most = Math.max(1, Math.ceil(longest / page));
    return Math.min(longest, page * Math.round(most ** (at / STEPS)));
  }

  protected draw(): void {
    const get = this.widget.get;
    const formula = get("_formula");
    const free = get("free");
    const choice: Choice = { context: get("context"), batch: get("batch"), mode: get("cache_mode") };
    const sizes = parts(formula, choice);
    const total = PARTS.reduce((sum, part) => sum + sizes[part], 0);
    this.title.textContent = get("name");
    this.device.textContent = get("device") === "cuda" ? "on the GPU" : "on the CPU";
    this.drawControls(choice, free);
    const most = Math.max(1, total, free ?? 0);
    const shown = PARTS.filter((part) => sizes[part] > 0);
    this.drawBar(shown, sizes, most, free);
    const words = verdict(
      total,
      free,
      free === null ? "" : advice(formula, free, choice),
      fittingContext(formula, free ?? 0, choice.batch, choice.mode),
    );
    this.verdict.textContent = words;
    this.root.dataset.fits = free === null ? "" : String(total <= free);
    setAttributes(this.bar, { "aria-label": `${shown.map((part) => `${NAMES[part]} ${bytes(sizes[part])}`).join(", ")}. ${words}` });
    const rows = shown.map((part) => row(part, NAMES[part], sizes[part], total));
    const sum = h(
      "tr",
      { "data-part": "total", "data-bytes": total },
      h("th", { scope: "row" }, "total"),
      h("td", {}, bytes(total)),
      h("td"),
    );
    this.rows.replaceChildren(...rows, sum);
    this.drawError();
  }

  private text(): string {
    const get = this.widget.get;
    const sizes = parts(get("_formula"), { context: get("context"), batch: get("batch"), mode: get("cache_mode") });
    return tsv([["part", "bytes"], ...PARTS.filter((part) => sizes[part] > 0).map((part) => [NAMES[part], sizes[part]])]);
  }

  private drawControls({ context, batch, mode }: Choice, free: number | null): void {
    const { page_tokens: page, longest } = this.widget.get("_formula");
    const most = Math.max(2, Math.ceil(longest / page));
    const at = Math.round((STEPS * Math.log(Math.max(1, context / page))) / Math.log(most));
    if (document.activeElement !== this.slider) this.slider.value = String(at);
    setAttributes(this.slider, { "aria-valuetext": `${context} tokens` });
    for (const [input, value] of [
      [this.context, String(context)],
      [this.batch, String(batch)],
      [this.free, free === null ? "" : String(Number((free / GIB).toFixed(2)))],
    ] as const)
      if (document.activeElement !== input) input.value = value; // what is being typed stays
    this.mode.value = mode;
  }

  private drawBar(shown: readonly Part[], sizes: Sizes, most: number, free: number | null): void {
    let at = 0;
    const pieces: HTMLElement[] = [];
    for (const part of shown) {
      const piece = h("div", { class: `exl2nb-piece exl2nb-part-${part}`, title: `${NAMES[part]}: ${bytes(sizes[part])}` });
      piece.style.width = `${(100 * sizes[part]) / most}%`;
      at += sizes[part];
      pieces.push(piece);
    }
    if (free !== null && at > free) {
      const over = h("div", { class: "exl2nb-over", title: `${bytes(at - free)} too much` });
      over.style.insetInlineStart = `${(100 * free) / most}%`;
      over.style.width = `${(100 * (at - free)) / most}%`;
      pieces.push(over);
    }
    this.bar.replaceChildren(...pieces);
    this.limit.hidden = free === null;
    if (free !== null) {
      this.limit.style.insetInlineStart = `${(100 * free) / most}%`;
      setAttributes(this.limit, { title: `free: ${bytes(free)}` });
    }
  }
}

type Sizes = ReturnType<typeof parts>;

function verdict(total: number, free: number | null, ways: string, longest: number): string {
  if (free === null) return `${bytes(total)} in all; free memory is not known: enter it`;
  const both = `${bytes(total)} in all, ${bytes(free)} free`;
  if (total <= free) return `${both}: fits, with memory for ${longest.toLocaleString("en-US")} tokens of context`;
  return `${both}: ${bytes(total - free)} too much; ${ways}`;
}

function row(part: Part, name: string, size: number, total: number): HTMLElement {
  const swatch = h("span", { class: `exl2nb-swatch exl2nb-part-${part}`, "aria-hidden": "true" });
  const share = `${((100 * size) / Math.max(1, total)).toFixed(size / total < 0.1 ? 1 : 0)} %`;
  return h(
    "tr",
    { "data-part": part, "data-bytes": size },
    h("th", { scope: "row" }, swatch, name),
    h("td", {}, bytes(size)),
    h("td", {}, share),
  );
}

function field(label: string, input: HTMLElement, ...more: HTMLElement[]): HTMLElement {
  const id = uniqueId("plan");
  setAttributes(input, { id });
  return h("div", { class: "exl2nb-field" }, h("label", { for: id }, label), input, ...more);
}

function whole(input: HTMLInputElement): number {
  const value = Math.round(Number(input.value));
  return Math.min(Number(input.max), Math.max(1, Number.isFinite(value) ? value : 1));
}

export default widget(PlanView, false);

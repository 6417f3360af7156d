// MemoryPlan: one stacked bar against free memory; context, texts and cache mode are answered here, from the formula's coefficients. Of
// several devices see split.ts.
import type { AnyModel } from "@anywidget/types";
import { PLAN_COLOURS, PLAN_PARTS } from "../constants.gen";
import type { PlanState } from "../protocol.gen";
import { type State, state } from "../shared/afm";
import { h, setAttributes } from "../shared/dom";
import { bytes } from "../shared/format";
import { snapshot } from "../shared/snapshot";
import { tools, tsv } from "../shared/tools";
import { show, View } from "../shared/view";
import { amount, Controls, field, number, write } from "./controls";
import { advice, fittingContext, type Part, parts, type Sizes } from "./formula";
import { SplitView } from "./split";
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
class PlanView extends View<PlanState> {
  private readonly title = h("b");
  private readonly device = h("span", { class: "exl2nb-muted" });
  private readonly controls: Controls;
  private readonly free = number(0.01, 4096, "any");
  private readonly bar = h("div", { class: "exl2nb-bar", role: "img" });
  private readonly limit = h("div", { class: "exl2nb-limit" });
  private readonly verdict = h("div", { class: "exl2nb-verdict" });
  private readonly rows = h("tbody");

  constructor(plan: State<PlanState>) {
    super(plan, "plan", "Memory plan");
    this.controls = new Controls(
      plan,
      () => this.frame.request(),
      () => this.say(),
    );
    this.controls.element.append(field("Free memory, GiB", this.free));
    this.free.addEventListener("change", () => {
      const free = amount(this.free, GIB);
      if (free === undefined) this.frame.request();
      else this.controls.put("free", free);
    });
    this.controls.follow(this.free);
    const head = h(
      "thead",
      {},
      h("tr", {}, h("th", { scope: "col" }, "part"), h("th", { scope: "col" }, "memory"), h("th", { scope: "col" }, "share")),
    );
    const table = h("table", {}, head, this.rows);
    const box = h("div", { class: "exl2nb-barbox" }, this.bar, this.limit);
    const taken = tools("plan", { text: () => this.text(), picture: () => snapshot(this.root) });
    const name = h("div", { class: "exl2nb-head" }, this.title, this.device, taken);
    this.root.append(h("div", { class: "exl2nb-card" }, name, this.controls.element, this.error, box, this.verdict, table), this.spoken);
    this.begin(["name", "device", "context", "batch", "cache_mode", "free", "_formula", "error"]);
  }

  private say(): void {
    this.draw();
    this.spoken.textContent = this.verdict.textContent;
  }

  protected draw(): void {
    const get = this.widget.get;
    const formula = get("_formula");
    const free = get("free");
    const choice = this.controls.choice;
    const sizes = parts(formula, choice);
    const total = PLAN_PARTS.reduce((sum, part) => sum + sizes[part], 0);
    this.title.textContent = get("name");
    this.device.textContent = get("device") === "cuda" ? "on the GPU" : "on the CPU";
    this.controls.draw();
    write(this.free, free === null ? "" : String(Number((free / GIB).toFixed(2))));
    const most = Math.max(1, total, free ?? 0);
    const shown = PLAN_PARTS.filter((part) => sizes[part] > 0);
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
    const sizes = parts(this.widget.get("_formula"), this.controls.choice);
    return tsv([["part", "bytes"], ...PLAN_PARTS.filter((part) => sizes[part] > 0).map((part) => [NAMES[part], sizes[part]])]);
  }

  private drawBar(shown: readonly Part[], sizes: Sizes, most: number, free: number | null): void {
    let at = 0;
    const pieces: HTMLElement[] = [];
    for (const part of shown) {
      const piece = h("div", { class: "exl2nb-piece", title: `${NAMES[part]}: ${bytes(sizes[part])}` });
      piece.style.width = `${(100 * sizes[part]) / most}%`;
      piece.style.backgroundColor = PLAN_COLOURS[part];
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

function verdict(total: number, free: number | null, ways: string, longest: number): string {
  if (free === null) return `${bytes(total)} in all; free memory is not known: enter it`;
  const both = `${bytes(total)} in all, ${bytes(free)} free`;
  if (total <= free) return `${both}: fits, with memory for ${longest.toLocaleString("en-US")} tokens of context`;
  return `${both}: ${bytes(total - free)} too much; ${ways}`;
}

function row(part: Part, name: string, size: number, total: number): HTMLElement {
  const swatch = h("span", { class: "exl2nb-swatch", style: `background-color:${PLAN_COLOURS[part]}`, "aria-hidden": "true" });
  const share = `${((100 * size) / Math.max(1, total)).toFixed(size / total < 0.1 ? 1 : 0)} %`;
  return h(
    "tr",
    { "data-part": part, "data-bytes": size },
    h("th", { scope: "row" }, swatch, name),
    h("td", {}, bytes(size)),
    h("td", {}, share),
  );
}

export default {
  render: (place: { model: AnyModel; el: HTMLElement }) => {
    const plan = state<PlanState>(place.model);
    return show(plan.get("_split") ? new SplitView(plan) : new PlanView(plan), place, false);
  },
};

// Context, sequences and cache mode of a memory plan; both of its views begin with them.
import type { PlanState } from "../protocol.gen";
import type { State } from "../shared/afm";
import { h, setAttributes, uniqueId } from "../shared/dom";
import type { Choice } from "./formula";

const MOST_TEXTS = 256;
const STEPS = 48; // stops of the context slider, evenly in the logarithm

type Chosen = "context" | "batch" | "cache_mode" | "free" | "borders" | "limits" | "speeds";

export class Controls {
  readonly element = h("div", { class: "exl2nb-controls" });
  private readonly slider: HTMLInputElement;
  private readonly context: HTMLInputElement;
  private readonly batch: HTMLInputElement;
  private readonly mode = h("select");

  /** changed: a trait has a new value; settled: by an action that is over. */
  constructor(
    private readonly widget: State<PlanState>,
    private readonly changed: () => void,
    private readonly settled: () => void,
  ) {
    this.slider = h("input", { type: "range", min: 0, max: STEPS, step: 1, "aria-label": "Context, slider" });
    this.context = number(1, widget.get("_formula").longest, 1);
    this.batch = number(1, MOST_TEXTS, 1);
    for (const mode of widget.get("_modes")) this.mode.append(h("option", { value: mode }, mode));
    this.element.append(field("Context, tokens", this.context, this.slider), field("Sequences", this.batch), field("Cache", this.mode));
    this.slider.addEventListener("input", () => this.put("context", this.stop(Number(this.slider.value))));
    this.context.addEventListener("change", () => this.put("context", whole(this.context)));
    this.batch.addEventListener("change", () => this.put("batch", whole(this.batch)));
    this.mode.addEventListener("change", () => this.put("cache_mode", this.mode.value));
    for (const element of [this.slider, this.context, this.batch, this.mode]) this.follow(element);
  }

  /** Say what comes of a change, and show what is chosen when the field is left. Comes after the listener that takes the change over. */
  follow(element: HTMLElement): void {
    element.addEventListener("change", () => this.settled());
    element.addEventListener("blur", () => this.changed());
  }

  get choice(): Choice {
    const get = this.widget.get;
    return { context: get("context"), batch: get("batch"), mode: get("cache_mode") };
  }

  put<K extends Chosen>(name: K, value: PlanState[K]): void {
    this.widget.set(name, value);
    this.widget.save();
    this.changed();
  }

  draw(): void {
    const { context, batch, mode } = this.choice;
    const { page_tokens: page, longest } = this.widget.get("_formula");
    const most = Math.max(2, Math.ceil(longest / page));
    const at = Math.round((STEPS * Math.log(Math.max(1, context / page))) / Math.log(most));
    if (document.activeElement !== this.slider) this.slider.value = String(at);
    setAttributes(this.slider, { "aria-valuetext": `${context} tokens` });
    write(this.context, String(context));
    write(this.batch, String(batch));
    this.mode.value = mode;
  }

  /** Tokens at a stop of the slider: whole pages, from one to the longest. */
  private stop(at: number): number {
    const { page_tokens: page, longest } = this.widget.get("_formula");
    const most = Math.max(1, Math.ceil(longest / page));
    return Math.min(longest, page * Math.round(most ** (at / STEPS)));
  }
}

/** Put a value into a field; what is being typed stays. */
export function write(input: HTMLInputElement, value: string): void {
  if (document.activeElement !== input) input.value = value;
}

export function number(low: number, high: number, step: number | "any"): HTMLInputElement {
  return h("input", { type: "number", min: low, max: high, step });
}

export function field(label: string, input: HTMLElement, ...more: HTMLElement[]): HTMLElement {
  const id = uniqueId("plan");
  setAttributes(input, { id });
  return h("div", { class: "exl2nb-field" }, h("label", { for: id }, label), input, ...more);
}

function whole(input: HTMLInputElement): number {
  const value = Math.round(Number(input.value));
  return Math.min(Number(input.max), Math.max(1, Number.isFinite(value) ? value : 1));
}

/** What a field says times `unit`: null where it is empty, undefined where it is no number above 0. */
export function amount(input: HTMLInputElement, unit: number): number | null | undefined {
  const value = Number(input.value);
  if (input.value.trim() === "") return null;
  return value > 0 ? Math.round(Math.min(Number(input.max), value) * unit) : undefined;
}

// The sliders of the microscope and what each filter does, in words.
import { h, uniqueId } from "../shared/dom";

interface Control {
  name: string;
  label: string;
  hint: string;
  off: number | null;
  min: number;
  max: number;
  step: number;
}

const CONTROLS: readonly Control[] = [
  { name: "temperature", label: "Temperature", hint: "0 = greedy", off: 1, min: 0, max: 2, step: 0.05 },
  { name: "top_k", label: "Top-k", hint: "0 = off", off: 0, min: 0, max: 100, step: 1 },
  { name: "top_p", label: "Top-p", hint: "1 = off", off: 1, min: 0.05, max: 1, step: 0.01 },
  { name: "min_p", label: "Min-p", hint: "0 = off", off: 0, min: 0, max: 0.5, step: 0.01 },
  { name: "repetition_penalty", label: "Repetition penalty", hint: "1 = off", off: 1, min: 1, max: 2, step: 0.05 },
];
const MORE: readonly Control[] = [
  { name: "typical_p", label: "Typical-p", hint: "1 = off", off: 1, min: 0.05, max: 1, step: 0.01 },
  { name: "tfs", label: "Tail-free", hint: "1 = off", off: 1, min: 0.05, max: 1, step: 0.01 },
  { name: "top_a", label: "Top-a", hint: "0 = off", off: 0, min: 0, max: 1, step: 0.01 },
  { name: "xtc_probability", label: "XTC probability", hint: "0 = off", off: 0, min: 0, max: 1, step: 0.05 },
  { name: "xtc_threshold", label: "XTC threshold", hint: "0.5 or more = off", off: null, min: 0, max: 0.5, step: 0.01 },
  { name: "presence_penalty", label: "Presence penalty", hint: "0 = off", off: 0, min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency penalty", hint: "0 = off", off: 0, min: -2, max: 2, step: 0.1 },
  { name: "smoothing_factor", label: "Smoothing", hint: "0 = off", off: 0, min: 0, max: 5, step: 0.1 },
  { name: "skew", label: "Skew", hint: "0 = off", off: 0, min: -5, max: 5, step: 0.1 },
];

/** One sentence per step of the chain. */
export const EXPLAINED: Record<string, string> = {
  logits: "the model's raw output",
  constraint: "keeps the tokens that the grammar allows here",
  allowed_tokens: "keeps the tokens of a list",
  banned_tokens: "removes the tokens of a list",
  min_tokens: "bans the end tokens up to the minimum length",
  repetition_penalty: "divides the logits of tokens already in the text",
  presence_penalty: "subtracted once from tokens already generated",
  frequency_penalty: "subtracted for every occurrence in the generated text",
  dry: "penalises tokens that would extend a repeated sequence; grows with its length",
  logit_bias: "added to the logits of chosen tokens",
  smoothing: "quadratic transform around the top logit",
  temperature: "divides the logits: below 1 sharper, above 1 flatter",
  top_k: "keeps the k most likely tokens",
  top_p: "keeps the most likely tokens up to a total probability of p",
  top_a: "keeps tokens above a × (top probability)²",
  min_p: "keeps tokens above p × the top probability",
  tail_free: "removes the flat tail of the distribution",
  typical: "keeps tokens whose surprise is near the entropy",
  mirostat: "keeps the surprise of the text near a target",
  dynamic_temperature: "sets the temperature from the entropy",
  xtc: "sometimes removes every token above the threshold but the least likely of them",
  skew: "favours less (> 0) or more (< 0) likely tokens",
  greedy: "the most likely token; no random number",
};

export class Controls {
  readonly element = h("div", { class: "exl2nb-controls" });
  private readonly inputs = new Map<string, [HTMLInputElement, HTMLInputElement, Control]>();
  readonly seed = h("input", { type: "number", id: uniqueId("seed"), min: 0, step: 1 });
  private readonly more: HTMLDetailsElement;
  private readonly count = h("span", { class: "exl2nb-muted" });

  constructor(
    private readonly change: (name: string, value: number) => void,
    fixed: boolean,
  ) {
    const first = h("div", { class: "exl2nb-grid" }, ...CONTROLS.map((control) => this.slider(control, fixed)), this.seedField(fixed));
    const rest = h("div", { class: "exl2nb-grid" }, ...MORE.map((control) => this.slider(control, fixed)));
    this.more = h("details", {}, h("summary", {}, "More samplers ", this.count), rest);
    this.element.append(first, this.more);
  }

  draw(settings: Record<string, number>, seed: string): void {
    let on = 0;
    for (const [name, [range, number, control]] of this.inputs) {
      const value = settings[name] ?? control.min;
      range.value = String(value);
      range.style.setProperty("--exl-fill", `${((100 * (Number(range.value) - control.min)) / (control.max - control.min)).toFixed(1)}%`);
      if (document.activeElement !== number) number.value = String(Number(value.toFixed(4)));
      const active = control.off !== null && value !== control.off;
      range.closest(".exl2nb-control")?.classList.toggle("exl2nb-active", active);
      if (active && MORE.includes(control)) on += 1;
    }
    this.count.textContent = on ? `(${on} on)` : "";
    if (document.activeElement !== this.seed) this.seed.value = seed;
  }

  private slider(control: Control, fixed: boolean): HTMLElement {
    const { name, label, hint, min, max, step } = control;
    const id = uniqueId(name);
    const number = h("input", { id, type: "number", min, step, "aria-describedby": `${id}-hint`, disabled: fixed });
    const range = h("input", { type: "range", class: "exl2nb-range", min, max, step, "aria-label": `${label}, slider`, disabled: fixed });
    this.inputs.set(name, [range, number, control]);
    range.addEventListener("input", () => this.change(name, Number(range.value)));
    number.addEventListener("change", () => {
      if (number.value.trim() !== "" && Number.isFinite(Number(number.value))) this.change(name, Number(number.value));
    });
    const top = h("div", { class: "exl2nb-control-top" }, h("label", { for: id }, label), number);
    return h("div", { class: "exl2nb-control" }, top, range, h("div", { class: "exl2nb-muted", id: `${id}-hint` }, hint));
  }

  private seedField(fixed: boolean): HTMLElement {
    this.seed.disabled = fixed;
    this.seed.addEventListener("change", () => {
      const value = Math.round(Number(this.seed.value));
      if (this.seed.value.trim() !== "" && Number.isSafeInteger(value) && value >= 0) this.change("seed", value);
    });
    const top = h("div", { class: "exl2nb-control-top" }, h("label", { for: this.seed.id }, "Seed"), this.seed);
    const resample = h("button", { type: "button", class: "exl2nb-button", disabled: fixed }, "Resample");
    resample.addEventListener("click", () => this.change("seed", Math.floor(Math.random() * 1_000_000)));
    return h("div", { class: "exl2nb-control" }, top, resample);
  }
}

// The sampling controls: a slider and a number box per setting, kept equal, with one line that says what "off" is.
import type { PlaygroundState, Settings } from "../protocol.gen";
import type { State } from "../shared/afm";
import { h, uniqueId } from "../shared/dom";

interface Control {
  name: keyof Settings;
  label: string;
  hint: string;
  min: number;
  max: number;
  step: number;
}

export const CONTROLS: readonly Control[] = [
  { name: "temperature", label: "Temperature", hint: "0 takes the likeliest token", min: 0, max: 2, step: 0.05 },
  { name: "top_p", label: "Top-p", hint: "1 is off", min: 0.05, max: 1, step: 0.05 },
  { name: "top_k", label: "Top-k", hint: "0 is off", min: 0, max: 200, step: 1 },
  { name: "min_p", label: "Min-p", hint: "0 is off", min: 0, max: 0.5, step: 0.01 },
  { name: "repetition_penalty", label: "Repetition penalty", hint: "1 is off", min: 1, max: 2, step: 0.05 },
  { name: "max_tokens", label: "Max tokens", hint: "where to end", min: 1, max: 2048, step: 1 },
];
const SEED_MAX = 2 ** 31 - 1;

/** What is switched on, in one line: the summary of the closed panel. */
export function summary(settings: Settings): string {
  const { temperature, top_k, top_p, min_p, repetition_penalty, max_tokens, seed } = settings;
  const parts = [temperature === 0 ? "greedy" : `temperature ${temperature}`];
  if (temperature !== 0 && top_k > 0) parts.push(`top-k ${top_k}`);
  if (temperature !== 0 && top_p < 1) parts.push(`top-p ${top_p}`);
  if (temperature !== 0 && min_p > 0) parts.push(`min-p ${min_p}`);
  if (repetition_penalty !== 1) parts.push(`repetition penalty ${repetition_penalty}`);
  if (seed !== null) parts.push(`seed ${seed}`);
  parts.push(`${max_tokens} tokens`);
  return parts.join(" · ");
}

/** A typed number as a setting: inside the allowed range, whole where the step is whole; null where it is no number. */
export function clamp(control: Pick<Control, "min" | "step"> & { max?: number }, typed: string): number | null {
  const value = Number(typed);
  if (typed.trim() === "" || !Number.isFinite(value)) return null;
  const whole = Number.isInteger(control.step) ? Math.round(value) : value;
  return Math.min(control.max ?? Number.MAX_SAFE_INTEGER, Math.max(control.min, whole));
}

export function readSettings(playground: State<PlaygroundState>): Settings {
  return {
    max_tokens: playground.get("max_tokens"),
    temperature: playground.get("temperature"),
    top_k: playground.get("top_k"),
    top_p: playground.get("top_p"),
    min_p: playground.get("min_p"),
    repetition_penalty: playground.get("repetition_penalty"),
    seed: playground.get("seed"),
  };
}

export class SettingsPanel {
  readonly element: HTMLDetailsElement;
  private readonly line = h("span", { class: "exl2nb-summary-line" });
  private readonly refreshers: (() => void)[] = [];
  private readonly undo: () => void;

  constructor(
    private readonly playground: State<PlaygroundState>,
    readOnly: boolean,
  ) {
    const grid = h("div", { class: "exl2nb-grid" }, ...CONTROLS.map((control) => this.control(control, readOnly)), this.seed(readOnly));
    this.element = h("details", { class: "exl2nb-settings" }, h("summary", {}, h("b", {}, "Sampling"), this.line), grid);
    this.undo = playground.observe([...CONTROLS.map((control) => control.name), "seed"], () => this.refresh());
    this.refresh();
  }

  close(): void {
    this.undo();
  }

  private refresh(): void {
    this.line.textContent = summary(readSettings(this.playground));
    for (const refresh of this.refreshers) refresh();
  }

  private control(control: Control, readOnly: boolean): HTMLElement {
    const id = uniqueId(control.name);
    const { name, label, hint, min, max, step } = control;
    const number = h("input", { id, type: "number", min, max, step, "aria-describedby": `${id}-hint`, disabled: readOnly });
    const slider = h("input", {
      type: "range",
      class: "exl2nb-range",
      min,
      max,
      step,
      "aria-label": `${label}, slider`,
      disabled: readOnly,
    });
    const put = (typed: string, save: boolean) => {
      const value = clamp({ min, step, ...(name === "max_tokens" ? {} : { max: name === "top_k" ? 1_000_000 : max }) }, typed);
      if (value === null) return this.refresh();
      this.playground.set(name, value);
      if (save) this.playground.save();
    };
    slider.addEventListener("input", () => put(slider.value, false));
    slider.addEventListener("change", () => put(slider.value, true));
    number.addEventListener("change", () => put(number.value, true));
    this.refreshers.push(() => {
      const value = this.playground.get(name) ?? min;
      slider.value = number.value = String(value);
      slider.style.setProperty("--exl-fill", `${Math.min(100, Math.max(0, ((value - min) / (max - min)) * 100)).toFixed(1)}%`);
    });
    const top = h("div", { class: "exl2nb-control-top" }, h("label", { for: id }, label), number);
    return h("div", { class: "exl2nb-control" }, top, slider, h("div", { class: "exl2nb-hint", id: `${id}-hint` }, hint));
  }

  private seed(readOnly: boolean): HTMLElement {
    const id = uniqueId("seed");
    const number = h("input", {
      id,
      type: "number",
      min: 0,
      max: SEED_MAX,
      step: 1,
      placeholder: "random",
      "aria-describedby": `${id}-hint`,
      disabled: readOnly,
    });
    number.addEventListener("change", () => {
      this.playground.set("seed", clamp({ min: 0, max: SEED_MAX, step: 1 }, number.value));
      this.playground.save();
    });
    this.refreshers.push(() => {
      number.value = String(this.playground.get("seed") ?? "");
    });
    const top = h("div", { class: "exl2nb-control-top" }, h("label", { for: id }, "Seed"), number);
    return h(
      "div",
      { class: "exl2nb-control" },
      top,
      h("div", { class: "exl2nb-hint", id: `${id}-hint` }, "a number repeats the same text; empty is random"),
    );
  }
}

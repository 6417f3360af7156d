// The sampling controls: the usual ones open, the others folded away.
import type { PlaygroundState, SamplerValues, Settings } from "../protocol.gen";
import type { State } from "../shared/afm";
import { h, uniqueId } from "../shared/dom";
import { type Control, clamp, numberControl } from "./control";
import { changes, moreSamplers, NAMES, readSamplers } from "./samplers";

type Usual = "temperature" | "top_p" | "top_k" | "min_p" | "repetition_penalty" | "max_tokens";

const CONTROLS: readonly (Control & { name: Usual })[] = [
  { name: "temperature", label: "Temperature", hint: "0 = greedy", min: 0, max: 2, step: 0.05 },
  { name: "top_p", label: "Top-p", hint: "1 = off", min: 0.05, max: 1, step: 0.05 },
  { name: "top_k", label: "Top-k", hint: "0 = off", min: 0, max: 200, step: 1 },
  { name: "min_p", label: "Min-p", hint: "0 = off", min: 0, max: 0.5, step: 0.01 },
  { name: "repetition_penalty", label: "Repetition penalty", hint: "1 = off", min: 1, max: 2, step: 0.05 },
  { name: "max_tokens", label: "Max tokens", hint: "length limit", min: 1, max: 2048, step: 1 },
];
const SEED_MAX = 2 ** 31 - 1;

/** What is switched on, in one line: the summary of the closed panel. */
export function summary(settings: Omit<Settings, keyof SamplerValues> & Partial<SamplerValues>): string {
  const { temperature, top_k, top_p, min_p, repetition_penalty, max_tokens, seed } = settings;
  const parts = [temperature === 0 ? "greedy" : `temperature ${temperature}`];
  if (temperature !== 0 && top_k > 0) parts.push(`top-k ${top_k}`);
  if (temperature !== 0 && top_p < 1) parts.push(`top-p ${top_p}`);
  if (temperature !== 0 && min_p > 0) parts.push(`min-p ${min_p}`);
  if (repetition_penalty !== 1) parts.push(`repetition penalty ${repetition_penalty}`);
  parts.push(...changes(settings));
  if (seed !== null) parts.push(`seed ${seed}`);
  parts.push(`${max_tokens} tokens`);
  return parts.join(" · ");
}

export function readSettings(playground: State<PlaygroundState>): Settings {
  return {
    ...readSamplers(playground),
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
    const [more, refreshMore] = moreSamplers(playground, readOnly);
    this.refreshers.push(refreshMore);
    const defaults = playground.get("_defaults");
    const note = h("p", { class: "exl2nb-hint exl2nb-defaults", hidden: !defaults }, `Defaults: ${defaults}`);
    this.element = h("details", { class: "exl2nb-settings" }, h("summary", {}, h("b", {}, "Sampling"), this.line), note, grid, more);
    this.undo = playground.observe([...CONTROLS.map((control) => control.name), ...NAMES, "seed"], () => this.refresh());
    this.refresh();
  }

  close(): void {
    this.undo();
  }

  private refresh(): void {
    this.line.textContent = summary(readSettings(this.playground));
    for (const refresh of this.refreshers) refresh();
  }

  private control(control: (typeof CONTROLS)[number], readOnly: boolean): HTMLElement {
    const { name, min, max, step } = control;
    const [element, refresh] = numberControl(control, readOnly, {
      read: () => this.playground.get(name) ?? min,
      parse: (typed) => clamp({ min, step, ...(name === "max_tokens" ? {} : { max: name === "top_k" ? 1_000_000 : max }) }, typed),
      write: (value, save) => {
        this.playground.set(name, value);
        if (save) this.playground.save();
      },
    });
    this.refreshers.push(refresh);
    return element;
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
      h("div", { class: "exl2nb-hint", id: `${id}-hint` }, "same seed, same text; empty = random"),
    );
  }
}

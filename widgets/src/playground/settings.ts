// The sampling controls: the common ones open, the others folded away.
import type { PlaygroundState, SamplerControl } from "../protocol.gen";
import type { State } from "../shared/afm";
import { clamp } from "../shared/control";
import { h, uniqueId } from "../shared/dom";
import { changes, moreSamplers, readSettings, type Settings, samplerControl } from "./samplers";

const SEED = { low: 0, high: 2 ** 31 - 1, step: 1 };
const WITHOUT_EFFECT_ON_GREEDY = ["top_k", "top_p", "min_p"];

/** What is switched on, in one line: the summary of the closed panel. */
export function summary(controls: readonly SamplerControl[], settings: Settings): string {
  const { temperature, max_tokens, seed } = settings;
  const greedy = temperature === 0;
  const told = ["temperature", "max_tokens", ...(greedy ? WITHOUT_EFFECT_ON_GREEDY : [])];
  const others = controls.filter(({ name }) => !told.includes(name));
  const ordered = [...others.filter(({ common }) => common), ...others.filter(({ common }) => !common)];
  const parts = [greedy ? "greedy" : `temperature ${temperature}`, ...changes(ordered, settings)];
  if (seed != null) parts.push(`seed ${seed}`);
  parts.push(`${max_tokens} tokens`);
  return parts.join(" · ");
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
    const controls = playground.get("_samplers");
    const common = controls.filter((control) => control.common).map((control) => samplerControl(playground, control, readOnly));
    const [more, refreshMore] = moreSamplers(playground, readOnly);
    const grid = h("div", { class: "exl2nb-grid" }, ...common.map(([element]) => element), this.seed(readOnly));
    this.refreshers.push(...common.map(([, refresh]) => refresh), refreshMore);
    const defaults = playground.get("_defaults");
    const note = h("p", { class: "exl2nb-hint exl2nb-defaults", hidden: !defaults }, `Defaults: ${defaults}`);
    this.element = h("details", { class: "exl2nb-settings" }, h("summary", {}, h("b", {}, "Sampling"), this.line), note, grid, more);
    const watched = [...controls.map(({ name }) => name), "seed"] as (keyof PlaygroundState)[];
    this.undo = playground.observe(watched, () => this.refresh());
    this.refresh();
  }

  close(): void {
    this.undo();
  }

  private refresh(): void {
    this.line.textContent = summary(this.playground.get("_samplers"), readSettings(this.playground));
    for (const refresh of this.refreshers) refresh();
  }

  private seed(readOnly: boolean): HTMLElement {
    const id = uniqueId("seed");
    const number = h("input", {
      id,
      type: "number",
      min: SEED.low,
      max: SEED.high,
      step: SEED.step,
      placeholder: "random",
      "aria-describedby": `${id}-hint`,
      disabled: readOnly,
    });
    number.addEventListener("change", () => {
      this.playground.set("seed", clamp(SEED, number.value));
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

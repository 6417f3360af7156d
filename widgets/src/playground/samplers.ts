// One control for each option of the list that Python made the traits from: the common ones, and the folded group of the others.
import type { PlaygroundState, SamplerControl } from "../protocol.gen";
import type { State } from "../shared/afm";
import { type Bound, numberControl } from "../shared/control";
import { h, uniqueId } from "../shared/dom";

/** Values of sampling options by name. */
export type Settings = Record<string, number | boolean | null>;

/** The traits that Python made for the controls. */
function traits(playground: State<PlaygroundState>): State<Record<string, number | boolean | null>> {
  return playground as unknown as State<Record<string, number | boolean | null>>;
}

/** What is switched on, as parts of a line. */
export function changes(controls: readonly SamplerControl[], settings: Settings): string[] {
  return controls.flatMap(({ name, label, neutral }) => {
    const value = settings[name] ?? neutral;
    if (value === neutral) return [];
    const words = label.replace(/^[A-Z](?=[a-z])/, (first) => first.toLowerCase());
    return [value === true ? words : `${words} ${value}`];
  });
}

export function readSettings(playground: State<PlaygroundState>): Settings {
  const names = [...playground.get("_samplers").map(({ name }) => name), "seed"];
  return Object.fromEntries(names.map((name) => [name, traits(playground).get(name)]));
}

/** The control of one option. */
export function samplerControl(playground: State<PlaygroundState>, control: SamplerControl, readOnly: boolean): Bound {
  if (control.step === 0) return toggle(playground, control, readOnly);
  return numberControl(control, readOnly, {
    read: () => Number(traits(playground).get(control.name) ?? control.neutral),
    write: (value, save) => {
      traits(playground).set(control.name, value);
      if (save) playground.save();
    },
  });
}

/** The folded group, and what brings it up to date. */
export function moreSamplers(playground: State<PlaygroundState>, readOnly: boolean): Bound {
  const folded = playground.get("_samplers").filter(({ common }) => !common);
  const line = h("span", { class: "exl2nb-summary-line" });
  const made = folded.map((control) => samplerControl(playground, control, readOnly));
  const grid = h("div", { class: "exl2nb-grid" }, ...made.map(([element]) => element));
  const element = h("details", { class: "exl2nb-more" }, h("summary", {}, h("b", {}, "More samplers"), line), grid);
  const refresh = () => {
    const on = changes(folded, readSettings(playground)).length;
    line.textContent = on ? `${on} changed` : "all off";
    for (const [, one] of made) one();
  };
  return [element, refresh];
}

function toggle(playground: State<PlaygroundState>, { name, label, hint }: SamplerControl, readOnly: boolean): Bound {
  const id = uniqueId(name);
  const input = h("input", { id, type: "checkbox", "aria-describedby": `${id}-hint`, disabled: readOnly });
  input.addEventListener("change", () => {
    traits(playground).set(name, input.checked);
    playground.save();
  });
  const top = h("div", { class: "exl2nb-control-top" }, h("label", { for: id }, label), input);
  const element = h("div", { class: "exl2nb-control" }, top, h("div", { class: "exl2nb-hint", id: `${id}-hint` }, hint));
  const refresh = () => {
    input.checked = traits(playground).get(name) === true;
  };
  return [element, refresh];
}

// The folded group of samplers: one control for each entry of the list that Python made the traits from.

import { SAMPLERS } from "../constants.gen";
import type { PlaygroundState, Sampler, SamplerValues } from "../protocol.gen";
import type { State } from "../shared/afm";
import { h, uniqueId } from "../shared/dom";
import { type Bound, clamp, numberControl } from "./control";

type Name = keyof SamplerValues;
export const NAMES = SAMPLERS.map(([name]) => name as Name);

/** What is switched on, as parts of a line. */
export function changes(settings: Partial<SamplerValues>): string[] {
  return SAMPLERS.flatMap(([name, label, , , , , , , off]) => {
    const value = settings[name as Name] ?? off;
    if (value === off) return [];
    const words = label.replace(/^[A-Z](?=[a-z])/, (first) => first.toLowerCase());
    return [value === true ? words : `${words} ${value}`];
  });
}

export function readSamplers(playground: State<PlaygroundState>): SamplerValues {
  return Object.fromEntries(NAMES.map((name) => [name, playground.get(name)])) as unknown as SamplerValues;
}

/** The group, and what brings it up to date. */
export function moreSamplers(playground: State<PlaygroundState>, readOnly: boolean): [HTMLElement, () => void] {
  const line = h("span", { class: "exl2nb-summary-line" });
  const made = SAMPLERS.map((sampler) =>
    sampler[5] === 0 ? toggle(playground, sampler, readOnly) : number(playground, sampler, readOnly),
  );
  const grid = h("div", { class: "exl2nb-grid" }, ...made.map(([element]) => element));
  const element = h("details", { class: "exl2nb-more" }, h("summary", {}, h("b", {}, "More samplers"), line), grid);
  const refresh = () => {
    const on = changes(readSamplers(playground)).length;
    line.textContent = on ? `${on} changed` : "all off";
    for (const [, one] of made) one();
  };
  return [element, refresh];
}

function number(playground: State<PlaygroundState>, sampler: Sampler, readOnly: boolean): Bound {
  const [name, label, hint, min, max, step, low, high] = sampler;
  const key = name as Name;
  return numberControl({ name, label, hint, min, max, step }, readOnly, {
    read: () => Number(playground.get(key)),
    parse: (typed) => clamp({ min: low, max: high, step }, typed),
    write: (value, save) => {
      playground.set(key, value as never);
      if (save) playground.save();
    },
  });
}

function toggle(playground: State<PlaygroundState>, [name, label, hint]: Sampler, readOnly: boolean): Bound {
  const key = name as Name;
  const id = uniqueId(name);
  const input = h("input", { id, type: "checkbox", "aria-describedby": `${id}-hint`, disabled: readOnly });
  input.addEventListener("change", () => {
    playground.set(key, input.checked as never);
    playground.save();
  });
  const top = h("div", { class: "exl2nb-control-top" }, h("label", { for: id }, label), input);
  const element = h("div", { class: "exl2nb-control" }, top, h("div", { class: "exl2nb-hint", id: `${id}-hint` }, hint));
  const refresh = () => {
    input.checked = playground.get(key) === true;
  };
  return [element, refresh];
}

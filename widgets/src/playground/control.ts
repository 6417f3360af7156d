// One number: a slider and a box, kept in sync, with a hint that names the neutral value.
import { h, uniqueId } from "../shared/dom";

export interface Control {
  name: string;
  label: string;
  hint: string;
  min: number;
  max: number;
  step: number;
}

/** An element, and what brings it up to date. */
export type Bound = [element: HTMLElement, refresh: () => void];

interface Value {
  read(): number;
  /** What was typed, inside the allowed range; null: no number. */
  parse(typed: string): number | null;
  write(value: number, save: boolean): void;
}

/** A typed number as a setting: inside the allowed range, whole where the step is whole; null where it is no number. */
export function clamp(control: Pick<Control, "min" | "step"> & { max?: number }, typed: string): number | null {
  const value = Number(typed);
  if (typed.trim() === "" || !Number.isFinite(value)) return null;
  const whole = Number.isInteger(control.step) ? Math.round(value) : value;
  return Math.min(control.max ?? Number.MAX_SAFE_INTEGER, Math.max(control.min, whole));
}

export function numberControl({ name, label, hint, min, max, step }: Control, readOnly: boolean, value: Value): Bound {
  const id = uniqueId(name);
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
  const refresh = () => {
    const now = value.read();
    slider.value = number.value = String(now);
    slider.style.setProperty("--exl-fill", `${Math.min(100, Math.max(0, ((now - min) / (max - min)) * 100)).toFixed(1)}%`);
  };
  const put = (typed: string, save: boolean) => {
    const parsed = value.parse(typed);
    if (parsed === null) refresh();
    else value.write(parsed, save);
  };
  slider.addEventListener("input", () => put(slider.value, false));
  slider.addEventListener("change", () => put(slider.value, true));
  number.addEventListener("change", () => put(number.value, true));
  const top = h("div", { class: "exl2nb-control-top" }, h("label", { for: id }, label), number);
  const element = h("div", { class: "exl2nb-control" }, top, slider, h("div", { class: "exl2nb-hint", id: `${id}-hint` }, hint));
  return [element, refresh];
}

// One number: a slider and a box, kept in sync, with a hint that names the neutral value.
import type { SamplerControl } from "../protocol.gen";
import { h, uniqueId } from "./dom";

/** An element, and what brings it up to date. */
export type Bound = [element: HTMLElement, refresh: () => void];

interface Value {
  read(): number;
  write(value: number, save: boolean): void;
}

/** A typed number as a setting: inside the allowed range, whole where the step is whole; null where it is no number. */
export function clamp(control: Pick<SamplerControl, "low" | "high" | "step">, typed: string): number | null {
  const value = Number(typed);
  if (typed.trim() === "" || !Number.isFinite(value)) return null;
  const whole = Number.isInteger(control.step) ? Math.round(value) : value;
  return Math.min(control.high, Math.max(control.low, whole));
}

export function numberControl(control: SamplerControl, readOnly: boolean, value: Value): Bound {
  const { name, label, hint, min, max, step } = control;
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
  let typing = false;
  const refresh = () => {
    const now = value.read();
    slider.value = String(now);
    if (!typing) number.value = String(Number(now.toFixed(4)));
    slider.style.setProperty("--exl-fill", `${Math.min(100, Math.max(0, ((now - min) / (max - min)) * 100)).toFixed(1)}%`);
  };
  const put = (typed: string, save: boolean) => {
    const parsed = clamp(control, typed);
    if (parsed === null) refresh();
    else value.write(parsed, save);
  };
  slider.addEventListener("input", () => put(slider.value, false));
  slider.addEventListener("change", () => put(slider.value, true));
  number.addEventListener("input", () => {
    typing = true;
  });
  number.addEventListener("change", () => {
    typing = false;
    put(number.value, true);
  });
  number.addEventListener("blur", () => {
    typing = false;
    refresh();
  });
  const top = h("div", { class: "exl2nb-control-top" }, h("label", { for: id }, label), number);
  const element = h("div", { class: "exl2nb-control" }, top, slider, h("div", { class: "exl2nb-hint", id: `${id}-hint` }, hint));
  return [element, refresh];
}

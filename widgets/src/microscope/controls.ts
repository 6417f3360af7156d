// The sliders of the microscope, one for each control that the kernel lists, and the seed.
import type { SamplerControl } from "../protocol.gen";
import { type Bound, numberControl } from "../shared/control";
import { h, uniqueId } from "../shared/dom";

export class Controls {
  readonly element = h("div", { class: "exl2nb-controls" });
  private readonly bound: Bound[];
  private readonly more: HTMLDetailsElement;
  private readonly count = h("span", { class: "exl2nb-muted" });
  private readonly seed = h("input", { type: "number", id: uniqueId("seed"), min: 0, step: 1 });
  private settings: Record<string, number> = {};

  constructor(
    private readonly controls: readonly SamplerControl[],
    private readonly change: (name: string, value: number) => void,
    fixed: boolean,
  ) {
    this.bound = controls.map((control) => this.slider(control, fixed));
    const those = (common: boolean) => this.bound.filter((_, i) => controls[i]?.common === common).map(([element]) => element);
    const first = h("div", { class: "exl2nb-grid" }, ...those(true), this.seedField(fixed));
    this.more = h("details", {}, h("summary", {}, "More samplers ", this.count), h("div", { class: "exl2nb-grid" }, ...those(false)));
    this.element.append(first, this.more);
  }

  draw(settings: Record<string, number>, seed: string): void {
    this.settings = { ...settings };
    let on = 0;
    this.controls.forEach(({ name, neutral, common, turns_on }, i) => {
      const [element, refresh] = this.bound[i] as Bound;
      refresh();
      const active = turns_on && settings[name] !== neutral;
      element.classList.toggle("exl2nb-active", active);
      if (active && !common) on += 1;
    });
    this.count.textContent = on ? `(${on} on)` : "";
    if (document.activeElement !== this.seed) this.seed.value = seed;
  }

  private slider(control: SamplerControl, fixed: boolean): Bound {
    return numberControl(control, fixed, {
      read: () => this.settings[control.name] ?? control.min,
      write: (value) => {
        if (value === this.settings[control.name]) return; // the slider was let go where it is
        this.settings[control.name] = value;
        this.change(control.name, value);
      },
    });
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

// Trial: a number with a button that raises it.
import type { TrialState } from "../protocol.gen";
import type { State } from "../shared/afm";
import { h } from "../shared/dom";
import { View, widget } from "../shared/view";
import "../shared/base.css";

class TrialView extends View<TrialState> {
  private readonly count = h("button", { type: "button", class: "exl2nb-button" });

  constructor(trial: State<TrialState>) {
    super(trial, "trial", "Trial");
    this.count.addEventListener("click", () => trial.send({ type: "count_up", by: 1 }));
    this.root.append(h("div", { class: "exl2nb-card" }, this.count, this.error), this.spoken);
    this.begin(["count", "error"]);
  }

  protected draw(): void {
    this.count.textContent = `count ${this.widget.get("count")}`;
    this.drawError();
  }
}

export default widget(TrialView);

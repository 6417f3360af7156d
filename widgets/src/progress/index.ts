// ProgressView: one line, updated in place. All state is in traits (the last value wins); there is no feed.
import type { ProgressState } from "../protocol.gen";
import type { State } from "../shared/afm";
import { h, icon, setAttributes } from "../shared/dom";
import { duration } from "../shared/format";
import { stageName } from "../shared/stages";
import { View, widget } from "../shared/view";
import { figures, history } from "./words";
import "./progress.css";

const SQUARE = "M3.5 3.5h9v9h-9z";
const WATCHED: (keyof ProgressState)[] = [
  ...(["status", "error", "title", "stage", "done", "total", "unit", "detail"] as const),
  ...(["rate", "share", "elapsed_s", "eta_s", "finished", "cancellable"] as const),
];

class ProgressLine extends View<ProgressState> {
  private readonly name = h("span", { class: "exl2nb-stage" });
  private readonly percent = h("span", { class: "exl2nb-percent" });
  private readonly figures = h("span", { class: "exl2nb-figures" });
  private readonly fill = h("div", { class: "exl2nb-fill" });
  private readonly track = h("div", { class: "exl2nb-track", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100 }, this.fill);
  private readonly detail = h("div", { class: "exl2nb-detail" });
  private readonly cancel = h("button", { type: "button", class: "exl2nb-button exl2nb-cancel" }, icon(SQUARE), "Stop");
  private cancelling = false;

  constructor(progress: State<ProgressState>) {
    super(progress, "progress", "Progress");
    const line = h("div", { class: "exl2nb-line" }, this.name, this.track, this.percent, this.figures, this.cancel);
    this.root.append(line, this.detail, this.error, this.spoken);
    this.cancel.addEventListener("click", () => {
      if (this.cancelling) return;
      this.cancelling = true;
      progress.send({ type: "stop" });
      this.draw();
    });
    this.begin(WATCHED);
  }

  protected draw(): void {
    const get = this.widget.get;
    const status = get("status");
    const running = status === "running";
    if (!running) this.cancelling = false;
    const share = get("share") ?? null;
    const stage = stageName(get("stage"));
    const named = get("title") !== get("stage") && (running || status === "error");
    const name = [get("title"), named ? stage : ""].filter(Boolean).join(": ") || stage;
    this.root.dataset.status = status;
    this.name.textContent = `${{ done: "✓ ", error: "✕ ", stopped: "■ " }[status as string] ?? ""}${name}`;
    this.track.hidden = !(running || status === "idle");
    this.percent.textContent = running && share !== null ? `${Math.floor(share * 100)} %` : "";
    this.figures.textContent = this.cancelling ? "Stopping…" : this.words(status);
    this.fill.style.inlineSize = share === null ? "" : `${(share * 100).toFixed(1)}%`;
    this.root.toggleAttribute("data-unknown", running && share === null);
    setAttributes(this.track, { "aria-label": name || "Progress", "aria-valuenow": share === null ? undefined : Math.round(share * 100) });
    this.detail.textContent = running ? get("detail") : history(get("finished"));
    this.detail.hidden = this.detail.textContent === "" || (!running && get("finished").length < 2);
    this.drawError();
    this.cancel.hidden = !running || !get("cancellable") || get("_static");
    setAttributes(this.cancel, { "aria-disabled": String(this.cancelling) });
    const words = running ? `${name}: started` : `${name}: ${status}`;
    if (status !== "idle" && this.spoken.textContent !== words) this.spoken.textContent = words;
  }

  private words(status: string): string {
    const get = this.widget.get;
    if (status === "idle") return "waiting";
    const total = get("finished").reduce((sum, [_stage, elapsed]) => sum + elapsed, 0);
    if (status === "done") return duration(total);
    if (status === "stopped") return `stopped after ${duration(total)}`;
    if (status === "error") return "failed";
    return figures({
      done: get("done"),
      total: get("total"),
      unit: get("unit"),
      rate: get("rate"),
      eta_s: get("eta_s"),
      elapsed_s: get("elapsed_s"),
    });
  }
}

export default widget(ProgressLine);

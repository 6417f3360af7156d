// ProgressView: one line, updated in place. All state is in traits (the last value wins); there is no feed.
import type { AnyModel } from "@anywidget/types";
import type { ProgressState } from "../protocol.gen";
import { type State, state } from "../shared/afm";
import { guardKeys, h, icon, root, setAttributes } from "../shared/dom";
import { duration } from "../shared/format";
import { perFrame } from "../shared/frame";
import { watchKernel } from "../shared/kernel";
import { stageName } from "../shared/stages";
import { figures, history } from "./words";
import "./progress.css";

const SQUARE = "M3.5 3.5h9v9h-9z";
const WATCHED: (keyof ProgressState)[] = [
  ...(["status", "error", "title", "stage", "done", "total", "unit", "detail"] as const),
  ...(["rate", "share", "elapsed_s", "eta_s", "finished", "cancellable"] as const),
];

class ProgressLine {
  readonly root = root("progress", "Progress");
  private readonly name = h("span", { class: "exl2nb-stage" });
  private readonly percent = h("span", { class: "exl2nb-percent" });
  private readonly figures = h("span", { class: "exl2nb-figures" });
  private readonly fill = h("div", { class: "exl2nb-fill" });
  private readonly track = h("div", { class: "exl2nb-track", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100 }, this.fill);
  private readonly detail = h("div", { class: "exl2nb-detail" });
  private readonly error = h("div", { class: "exl2nb-error", role: "alert", hidden: true });
  private readonly spoken = h("div", { class: "exl2nb-sr", role: "status" });
  private readonly cancel = h("button", { type: "button", class: "exl2nb-button exl2nb-cancel" }, icon(SQUARE), "Stop");
  private readonly frame = perFrame(() => this.draw());
  private readonly undo: (() => void)[];
  private cancelling = false;

  constructor(private readonly progress: State<ProgressState>) {
    const line = h("div", { class: "exl2nb-line" }, this.name, this.track, this.percent, this.figures, this.cancel);
    this.root.append(line, this.detail, this.error, this.spoken);
    this.cancel.addEventListener("click", () => {
      if (this.cancelling) return;
      this.cancelling = true;
      progress.send({ type: "stop" });
      this.draw();
    });
    this.undo = [guardKeys(this.root), progress.observe(WATCHED, () => this.frame.request())];
    this.draw();
  }

  close(): void {
    for (const undo of this.undo) undo();
    this.frame.cancel();
    this.root.remove();
  }

  private draw(): void {
    const get = this.progress.get;
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
    this.error.textContent = get("error");
    this.error.hidden = get("error") === "";
    this.cancel.hidden = !running || !get("cancellable") || get("_static");
    setAttributes(this.cancel, { "aria-disabled": String(this.cancelling) });
    const words = running ? `${name}: started` : `${name}: ${status}`;
    if (status !== "idle" && this.spoken.textContent !== words) this.spoken.textContent = words;
  }

  private words(status: string): string {
    const get = this.progress.get;
    if (status === "idle") return "waiting";
    const total = get("finished").reduce((sum, [, elapsed]) => sum + elapsed, 0);
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

export default {
  render({ model, el }: { model: AnyModel; el: HTMLElement }) {
    const line = new ProgressLine(state<ProgressState>(model));
    el.append(line.root);
    const undo = watchKernel(line.root, model);
    return () => {
      undo();
      line.close();
    };
  },
};

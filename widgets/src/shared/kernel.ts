// Shows a notice when the kernel no longer answers; a dead kernel cannot tell the page itself. The output stays.
import type { AnyModel } from "@anywidget/types";
import { lastSent } from "./afm";
import { h } from "./dom";

const SILENCE_MS = 5000;
const TICK_MS = 1000;
const WORDS = "The kernel does not respond: it is busy or was restarted. The output is kept; after a restart, run the cell again.";

/**
 * Watch the line to the kernel while the widget runs or waits for an answer: after 5 s without a word ask for one, and show a notice in
 * `root` when none comes.
 * A disconnection that the notebook reports is shown at once. Returns the undo.
 */
export function watchKernel(root: HTMLElement, model: AnyModel, now: () => number = () => performance.now()): () => void {
  const notice = h("div", { class: "exl2nb-lost", role: "status", hidden: true });
  root.prepend(notice);
  let [heard, asked] = [now(), Number.POSITIVE_INFINITY];

  const show = (lost: boolean) => {
    notice.hidden = !lost;
    const words = lost ? WORDS : "";
    if (notice.textContent !== words) notice.textContent = words;
  };
  const hear = () => {
    [heard, asked] = [now(), Number.POSITIVE_INFINITY];
    show(false);
  };
  const cut = () => show(true);
  const tick = () => {
    if (model.get("_static") || !(model.get("status") === "running" || lastSent(model) > heard)) return;
    const time = now();
    if (time - asked >= SILENCE_MS) show(true);
    if (time - heard >= SILENCE_MS && asked === Number.POSITIVE_INFINITY) {
      asked = time;
      try {
        model.send({ type: "ping" });
      } catch {
        cut(); // JupyterLab refuses to send to a kernel that it knows to be dead
      }
    }
  };
  const events: [string, () => void][] = [
    ["msg:custom", hear],
    ["change", hear],
    ["comm_live_update", cut],
  ];
  for (const [name, callback] of events) model.on(name, callback);
  const timer = setInterval(tick, TICK_MS);
  return () => {
    clearInterval(timer);
    for (const [name, callback] of events) model.off(name, callback);
    notice.remove();
  };
}

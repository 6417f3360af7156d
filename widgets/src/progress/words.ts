// What the progress line says. Pure, so the tests read it without a browser.
import type { Finished, ProgressState } from "../protocol.gen";
import { duration, rate } from "../shared/format";
import { stageName } from "../shared/stages";

export type Numbers = Pick<ProgressState, "done" | "total" | "unit" | "rate" | "eta_s" | "elapsed_s">;

/** "12 of 48 layers · 3.1 layers/s · 12 s left". */
export function figures(numbers: Numbers): string {
  const { done, total, unit, eta_s, elapsed_s } = numbers;
  const count = total > 0 ? `${amount(done)} of ${amount(total)} ${unit}` : done > 0 ? `${amount(done)} ${unit}` : "";
  const speed = numbers.rate > 0 ? `${rate(numbers.rate)} ${unit || "steps"}/s` : "";
  const left = eta_s !== null ? `${duration(eta_s)} left` : elapsed_s >= 1 ? duration(elapsed_s) : "";
  return [count.trim(), speed, left].filter(Boolean).join(" · ");
}

function amount(value: number): string {
  return value.toLocaleString("en-US", { maximumFractionDigits: 1 });
}

/** "loading 0.3 s · measuring sensitivity 41 s": the stages that are over. */
export function history(finished: Finished[]): string {
  return finished.map(([stage, elapsed]) => `${stageName(stage)} ${duration(elapsed)}`).join(" · ");
}

// What the progress line says. Pure, so the tests read it without a browser.
import type { Finished, ProgressState } from "../protocol.gen";
import { duration, rate } from "../shared/format";

export type Numbers = Pick<ProgressState, "done" | "total" | "unit" | "rate" | "eta_s" | "elapsed_s">;

/** Share done as 0..1, or null while the total is unknown. */
export function fraction({ done, total }: Pick<Numbers, "done" | "total">): number | null {
  return total > 0 ? Math.min(1, Math.max(0, done / total)) : null;
}

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

/** "load 0.3 s · measure 41 s": the stages that are over. */
export function history(finished: Finished[]): string {
  return finished.map(([stage, elapsed]) => `${stage} ${duration(elapsed)}`).join(" · ");
}

// The words of the status line. Pure, so the tests read them without a browser.
import type { Stats, Status } from "../protocol.gen";
import { count, duration, rate } from "../shared/format";

const REASONS: Record<string, string> = {
  length: "reached the token limit",
  eos: "the model ended the text",
  stop: "a stop string was found",
  context: "the context is full",
};

export interface Situation {
  status: Status;
  stopping: boolean;
  hasModel: boolean;
  reason: string;
  stats: Stats;
}

/** What is going on, in words. */
export function headline({ status, stopping, hasModel, reason, stats }: Situation): string {
  if (status === "running") {
    if (stopping) return "Stopping…";
    return stats.n ? "Generating…" : "Reading the prompt…";
  }
  if (status === "stopped") return `Stopped after ${count(stats.n, "token")}`;
  if (status === "error") return stats.n ? `Failed after ${count(stats.n, "token")}` : "Failed";
  if (status === "done") {
    const why = REASONS[reason];
    return why ? `Done: ${why}` : "Done";
  }
  if (status === "loading") return "Loading the model…";
  return hasModel ? "Ready" : "No model attached: Playground(llm)";
}

/** Count (unless the words before it say it), speed, time to the first token. */
export function figures({ n, tps, ttft_s }: Stats, withCount = true): string {
  if (!n) return "";
  const parts = withCount ? [count(n, "token")] : [];
  if (tps > 0) parts.push(`${rate(tps)} tok/s`);
  if (ttft_s !== null) parts.push(`first token after ${duration(ttft_s)}`);
  return parts.join(" · ");
}

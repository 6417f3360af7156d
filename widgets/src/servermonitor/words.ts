// What the monitor says and draws. Pure, so the tests read it without a browser.
import type { ServedRequest, ServerMonitorState } from "../protocol.gen";
import { duration, rate } from "../shared/format";

export type Load = Pick<ServerMonitorState, "active" | "queued" | "max_queue" | "tok_s" | "ttft_p50_s" | "ttft_p99_s">;

/** The figures of the top line, as pairs of a name and a value. */
export function facts(load: Load): [string, string][] {
  const last = load.tok_s[load.tok_s.length - 1] ?? 0;
  const found: [string, string][] = [
    ["requests", `${load.active} of ${load.max_queue}`],
    ["queued", String(load.queued)],
    ["tok/s", last > 0 ? rate(last) : "0"],
  ];
  if (load.ttft_p50_s !== null) found.push(["first token", duration(load.ttft_p50_s)]);
  if (load.ttft_p99_s !== null) found.push(["99 %", duration(load.ttft_p99_s)]);
  return found;
}

/** An SVG path through samples in a box of `width` by `height`; "" for fewer than two. */
export function curve(samples: number[], width: number, height: number): string {
  if (samples.length < 2) return "";
  const most = Math.max(...samples, 1);
  const step = width / (samples.length - 1);
  return samples
    .map((value, i) => `${i === 0 ? "M" : "L"}${(i * step).toFixed(1)} ${(height - (value / most) * height).toFixed(1)}`)
    .join("");
}

/** Cells of a request's row. */
export function cells(request: ServedRequest): string[] {
  const [number, route, client, state, seconds, ttft, prompt, tokens] = request;
  return [String(number), route, client, state, duration(seconds), ttft === null ? "" : duration(ttft), String(prompt), String(tokens)];
}

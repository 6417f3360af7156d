// Numbers and tokens as people read them.
import { SIZE_UNITS, SURPRISE_LIMITS } from "../constants.gen";

export function percent(p: number): string {
  const value = p * 100;
  if (value >= 99.95) return "100 %";
  if (value >= 10) return `${value.toFixed(0)} %`;
  if (value >= 1) return `${value.toFixed(1)} %`;
  if (value >= 0.01) return `${value.toFixed(2)} %`;
  return value > 0 ? "< 0.01 %" : "0 %";
}

export function duration(seconds: number): string {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.round(seconds - minutes * 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export function count(n: number, noun: string, plural = `${noun}s`): string {
  return `${n.toLocaleString("en-US")} ${n === 1 ? noun : plural}`;
}

export function rate(perSecond: number): string {
  if (perSecond >= 100) return perSecond.toFixed(0);
  if (perSecond >= 10) return perSecond.toFixed(1);
  return perSecond.toPrecision(2);
}

/** White space made visible, so that " dog" and "dog" differ. */
export function visible(text: string): string {
  if (text === "") return "∅";
  return text.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍");
}

/** The same for a screen reader. */
export function spoken(text: string): string {
  const name = { "": "nothing", " ": "space", "\n": "new line", "\t": "tab" }[text];
  return name ?? `“${text.trim() || text}”`;
}

/** Step 0 (at least 90 %) to 4 (below 5 %); -1 when the probability is not known. The legend prints the same limits. */
export function surprise(p: number | null): number {
  return p === null ? -1 : SURPRISE_LIMITS.filter((limit) => p < limit).length;
}
export const SURPRISE_LABELS = ["≥ 90 %", "50–90", "20–50", "5–20", "< 5 %"] as const;

/** Readable bytes: 7.80 MiB. */
export function bytes(count: number): string {
  for (const [unit, scale] of SIZE_UNITS) if (count >= scale) return `${(count / scale).toFixed(2)} ${unit}`;
  return `${count} bytes`;
}

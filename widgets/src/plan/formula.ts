// The arithmetic of exl2nb/llm/memory.py, line for line: bytes from context, batch and cache mode. tests/ui/test_plan_page.py compares.
import type { PlanFormula } from "../protocol.gen";

export const PARTS = ["weights", "cache", "work", "graphs", "logits", "rounding", "adapters"] as const;
export type Part = (typeof PARTS)[number];
export type Sizes = Record<Part, number>;

export interface Choice {
  context: number;
  batch: number;
  mode: string;
}

export function parts(f: PlanFormula, { context, batch, mode }: Choice): Sizes {
  const pages = batch * Math.ceil(context / f.page_tokens);
  const tokens = Math.min(f.chunk, batch * context);
  const work = f.stages.reduce((most, [fixed, token, long]) => Math.max(most, fixed + token * tokens + long * context), 0);
  const cache = pages * (f.page_bytes[mode] ?? 0);
  return {
    weights: f.weights,
    cache,
    work,
    graphs: f.graph_fixed + f.graph_row * rows(batch),
    logits: f.logits_row * batch,
    rounding: f.segments ? segment(f.weights) - f.weights + segment(cache) - cache : 0,
    adapters: f.adapters,
  };
}

const MIB = 2 ** 20;

/** What torch takes from a GPU for one tensor: `segment_bytes` there. */
function segment(size: number): number {
  if (size <= MIB) return 2 * MIB;
  return size < 10 * MIB ? 20 * MIB : 2 * MIB * Math.ceil(size / (2 * MIB));
}

export function total(f: PlanFormula, choice: Choice): number {
  const sizes = parts(f, choice);
  return PARTS.reduce((sum, part) => sum + sizes[part], 0);
}

/** The most tokens of context, whole pages, at which everything fits; 0 where not even one page does. */
export function fittingContext(f: PlanFormula, free: number, batch: number, mode: string): number {
  let low = 0;
  let high = Math.ceil(f.longest / f.page_tokens);
  while (low < high) {
    const middle = Math.floor((low + high + 1) / 2);
    if (total(f, { context: middle * f.page_tokens, batch, mode }) <= free) low = middle;
    else high = middle - 1;
  }
  return low * f.page_tokens;
}

/** Texts that the graph of a decode step is made for. */
function rows(batch: number): number {
  if (batch > 8) return Math.min(64, 8 * Math.ceil(batch / 8));
  let power = 1;
  while (power < batch) power *= 2;
  return power;
}

/** What to do where it does not fit: the mode of most bits that does, and the context that would. */
export function advice(f: PlanFormula, free: number, { context, batch, mode }: Choice): string {
  const here = f.page_bytes[mode] ?? 0;
  const smaller = Object.keys(f.page_bytes)
    .filter((other) => (f.page_bytes[other] ?? 0) < here && total(f, { context, batch, mode: other }) <= free)
    .sort((a, b) => (f.page_bytes[b] ?? 0) - (f.page_bytes[a] ?? 0))[0];
  const fitting = fittingContext(f, free, batch, mode);
  const ways = [
    ...(smaller ? [`a ${smaller} cache`] : []),
    ...(fitting ? [`${fitting.toLocaleString("en-US")} tokens of context`] : []),
    ...(!fitting && batch > 1 && fittingContext(f, free, 1, mode) ? ["fewer sequences"] : []),
  ];
  return ways.length ? `try ${ways.join(" or ")}` : "use fewer bits per weight";
}

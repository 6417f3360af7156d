// Computes the terms of a memory plan, which exl2nb/llm/memory.py and split_plan.py declare. tests/widgets/test_twins.py compares.
import { PLAN_PARTS, PLAN_TERMS } from "../constants.gen";
import type { PlanFormula } from "../protocol.gen";

export type Part = (typeof PLAN_PARTS)[number];
export type Sizes = Record<Part, number>;

export interface Choice {
  context: number;
  batch: number;
  mode: string;
}

const add = (...values: number[]) => values.reduce((sum, value) => sum + value, 0);
const OPERATIONS: Record<string, (...operands: never[]) => number> = {
  "+": add,
  "*": (...values: number[]) => values.reduce((product, value) => product * value, 1),
  min: Math.min,
  ceil: (a: number, b: number) => Math.ceil(a / b),
  floor: (a: number, b: number) => Math.floor(a / b),
  at: (table: Record<string | number, number>, key: string | number) => table[key] ?? 0,
  sum: (table: number[], start: number, end: number) => add(...table.slice(start, end)),
  most: (rows: number[][], ...values: number[]) =>
    Math.max(0, ...rows.map(([fixed = 0, ...factors]) => add(fixed, ...factors.map((factor, i) => factor * (values[i] ?? 0))))),
  step(value: number, ...steps: number[]) {
    const limit = steps.findIndex((limit, i) => i % 2 === 0 && i + 1 < steps.length && value <= limit);
    return steps[limit < 0 ? steps.length - 1 : limit + 1] ?? 0;
  },
};

/** The values of the terms, each of which may name those before it: `evaluate` in Python. */
export function evaluate(terms: readonly (readonly [name: string, term: unknown])[], known: object): Record<string, number> {
  const found = { ...known } as Record<string, unknown>;
  const value = (term: unknown): unknown => {
    if (Array.isArray(term)) return OPERATIONS[term[0]]?.(...(term.slice(1).map(value) as never[]));
    return typeof term === "string" ? found[term] : term;
  };
  for (const [name, term] of terms) found[name] = value(term);
  return found as Record<string, number>;
}

export function parts(f: PlanFormula, choice: Choice): Sizes {
  const found = evaluate(PLAN_TERMS, { ...f, ...choice });
  return Object.fromEntries(PLAN_PARTS.map((part) => [part, found[part]])) as Sizes;
}

export function total(f: PlanFormula, choice: Choice): number {
  return add(...Object.values(parts(f, choice)));
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

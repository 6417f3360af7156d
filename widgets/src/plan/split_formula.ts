// The arithmetic of exl2nb/llm/split_plan.py, line for line: what each device holds between its borders. tests/ui/test_plan_split_page.py compares.
import type { PlanSplit } from "../protocol.gen";
import { type Choice, parts } from "./formula";

export interface Share {
  device: string;
  first: number;
  last: number;
  weights: number;
  cache: number;
  work: number;
  read: number;
  total: number;
}

export function layersOf(split: PlanSplit): number {
  return (Object.values(split.kinds)[0]?.parts.length ?? 2) - 2;
}

/** What layers [first, last) take on the device of this number. */
export function share(split: PlanSplit, number: number, first: number, last: number, choice: Choice): Share {
  const [device, kind] = split.devices[number] ?? ["", ""];
  const found = split.kinds[kind];
  if (!found || last <= first) return { device, first, last, weights: 0, cache: 0, work: 0, read: 0, total: 0 };
  const sizes = parts(found.formula, choice);
  const layers = layersOf(split);
  const weights = withEnds(found.parts, first, last);
  const cache = Math.floor(sizes.cache / layers) * (last - first);
  const work = sizes.work + sizes.graphs + sizes.logits + sizes.rounding + found.stream;
  return { device, first, last, weights, cache, work, read: withEnds(found.read, first, last), total: weights + cache + work };
}

/** Of every device, those without layers included. */
export function shares(split: PlanSplit, borders: readonly number[], choice: Choice): Share[] {
  const ends = [0, ...borders, layersOf(split)];
  const found = split.devices.map((_, i) => share(split, i, ends[i] ?? 0, ends[i + 1] ?? 0, choice));
  const host = found[0];
  const gpu = found.findIndex((one, i) => i > 0 && one.last > one.first);
  if (!split.lends || !host || host.last === 0 || split.devices[0]?.[1] !== "cpu") return found;
  if (gpu < 0 || split.devices[gpu]?.[1] !== "cuda") return found;
  return found.map((one, i) =>
    i === 0 ? withLent(split, one, i, host.last, -1, choice) : i === gpu ? withLent(split, one, i, host.last, 1, choice) : one,
  );
}

/** Which of so many layers of the CPU are lent while tokens are decoded; `lent_layers` in exl2nb/model/streaming.py. */
function lentLayers(count: number): number[] {
  return Array.from({ length: 2 * Math.floor(count / 8) }, (_, k) => 2 + 3 * k);
}

/** A share with the lent layers of `count` on the CPU (sign 1), or without them (-1). */
function withLent(split: PlanSplit, one: Share, number: number, count: number, sign: 1 | -1, choice: Choice): Share {
  const kind = split.kinds[split.devices[number]?.[1] ?? ""];
  if (!kind) return one;
  const lent = lentLayers(count);
  const cache = one.cache + sign * lent.length * Math.floor(parts(kind.formula, choice).cache / layersOf(split));
  const work = one.work + lent.length * kind.lent;
  const read = one.read + sign * lent.reduce((sum, layer) => sum + (kind.read[layer + 1] ?? 0), 0);
  return { ...one, cache, work, read, total: one.weights + cache + work };
}

function withEnds(sizes: readonly number[], first: number, last: number): number {
  const part = sizes.slice(first === 0 ? 0 : first + 1, last === sizes.length - 2 ? sizes.length : last + 1);
  return part.reduce((sum, size) => sum + size, 0);
}

/** Tokens a second that reading the weights allows; null: a speed is not known. */
export function tokensPerSecond(found: readonly Share[], speeds: readonly (number | null)[]): number | null {
  let spent = 0;
  for (const [i, one] of found.entries()) {
    if (one.last === one.first) continue;
    const speed = speeds[i];
    if (!speed) return null;
    spent += one.read / speed;
  }
  return spent ? 1 / spent : null;
}

/** Borders at which every device but the first holds as many layers as it may, the last one first. Without a limit: all that are left. */
export function filled(split: PlanSplit, limits: readonly (number | null)[], choice: Choice): number[] {
  const borders: number[] = [];
  let last = layersOf(split);
  for (let i = split.devices.length - 1; i > 0; i--) {
    const limit = limits[i] ?? Number.POSITIVE_INFINITY;
    let first = last;
    const total = (from: number) => {
      const plain = share(split, i, from, last, choice);
      const lends = split.lends && i === 1 && split.devices[0]?.[1] === "cpu";
      return (lends ? withLent(split, plain, i, from, 1, choice) : plain).total;
    };
    while (first > 0 && total(first - 1) <= limit) first--;
    borders.unshift(first);
    last = first;
  }
  return borders;
}

/** Borders after one of them was moved: it stays between 0 and the last layer and pushes others along. */
export function moved(split: PlanSplit, borders: readonly number[], number: number, to: number): number[] {
  const at = Math.min(layersOf(split), Math.max(0, to));
  return borders.map((border, i) => (i < number ? Math.min(border, at) : i > number ? Math.max(border, at) : at));
}

/** Python that loads the model so; `SplitPlan.load_line`. */
export function loadLine(split: PlanSplit, found: readonly Share[], { context, batch, mode }: Choice): string {
  const held = found.filter((one) => one.last > one.first);
  const [rest, ...others] = held;
  const sizes = `context=${context}, cache='${mode}'${batch > 1 ? `, cache_tokens=${context * batch}` : ""}`;
  const count = (one: Share) => one.last - one.first;
  let place = `device='${rest?.device}'`;
  if (held.length === 2 && rest?.device === "cpu" && others[0]?.device === "cuda") place = `gpu_layers=${count(others[0])}`;
  else if (others.length) {
    const counts = others.map((one) => `'${one.device}': '${count(one)} layer${count(one) > 1 ? "s" : ""}'`);
    const first = `'${rest?.device}': 'rest'`; // GPUs run in the order of their names here, the CPU always first
    place = `devices={${(rest?.device === "cpu" ? [...counts, first] : [first, ...counts]).join(", ")}}`;
  }
  return `llm = ex.load(${split.source}, ${place}, ${sizes})`;
}

// What each device holds between its borders, from the terms of exl2nb/llm/split_plan.py; borders that are moved or filled; the line of Python.
import { PLAN_TERMS, SHARE_TERMS } from "../constants.gen";
import type { PlanSplit } from "../protocol.gen";
import { type Choice, evaluate } from "./formula";

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
  return Object.values(split.kinds)[0]?.layers ?? 0;
}

/** What layers [first, last) take on the device of this number. host, sign: as in `SHARE_TERMS`. */
function share(split: PlanSplit, number: number, first: number, last: number, choice: Choice, host = 0, sign = 1): Share {
  const { name: device = "", kind = "" } = split.devices[number] ?? {};
  const known = split.kinds[kind];
  if (!known || last <= first) return { device, first, last, weights: 0, cache: 0, work: 0, read: 0, total: 0 };
  const found = evaluate([...PLAN_TERMS, ...SHARE_TERMS], { ...known.formula, ...known, ...choice, first, last, host, sign });
  const [weights = 0, cache = 0, work = 0, read = 0] = ["weights", "cache", "work", "read"].map((part) => found[`share_${part}`]);
  return { device, first, last, weights, cache, work, read, total: weights + cache + work };
}

/** Of every device, those without layers included. */
export function shares(split: PlanSplit, borders: readonly number[], choice: Choice): Share[] {
  const ends = [0, ...borders, layersOf(split)];
  const gpu = split.devices.findIndex((_, i) => i > 0 && (ends[i + 1] ?? 0) > (ends[i] ?? 0));
  const host = split.lends && split.devices[0]?.kind === "cpu" && split.devices[gpu]?.kind === "cuda" ? (ends[1] ?? 0) : 0;
  const lent = (i: number) => (i === 0 || i === gpu ? host : 0);
  return split.devices.map((_, i) => share(split, i, ends[i] ?? 0, ends[i + 1] ?? 0, choice, lent(i), i ? 1 : -1));
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
    const lends = split.lends && i === 1 && split.devices[0]?.kind === "cpu";
    const total = (from: number) => share(split, i, from, last, choice, lends ? from : 0).total;
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

// The sampling chain of exl2nb/sampling for the settings that a page without a kernel knows: what each step does to one row of logits, and the
// draw. Numbers are f32 where Python's are. tests/site/test_browser.py compares every step with `explain`.
import type { LinePart, SampleStep, SampleToken } from "../src/protocol.gen";
import { type Settings, uniform } from "./engine";

const SHOWN = 14;
const LEAST = 0.004; // probability below which neighbours on the line become one piece
const NEUTRAL: Settings = { temperature: 1, top_k: 0, top_p: 1, min_p: 0 };

export interface Explained {
  token: number;
  prob: number;
  uniform: number | null;
  steps: SampleStep[];
  tokens: SampleToken[];
  line: LinePart[];
}

interface Step {
  name: string;
  settings: string;
  logits: Float32Array;
  probs: Float64Array;
  left: number;
  removed: number;
  mass: number;
  heat: number;
}

const highest = (row: Float32Array) => row.reduce((most, value) => Math.max(most, value), Number.NEGATIVE_INFINITY);
const round = (value: number, digits: number) => Number(value.toFixed(digits));

/** exp of the distances to the highest logit, f32. */
function weights(row: Float32Array): Float32Array {
  const most = highest(row);
  return row.map((value) => Math.exp(Math.fround(value - most)));
}

function softmax(row: Float32Array): Float64Array {
  const most = highest(row);
  const probs = Float64Array.from(row, (value) => Math.exp(value - most));
  const sum = probs.reduce((all, weight) => all + weight, 0);
  return probs.map((weight) => weight / sum);
}

const keep = (row: Float32Array, stays: (at: number) => boolean) => row.map((value, at) => (stays(at) ? value : Number.NEGATIVE_INFINITY));

const CUTS: { [name in keyof Settings]: (row: Float32Array, value: number) => Float32Array } = {
  temperature: (row, value) => row.map((logit) => logit / Math.fround(value)),
  top_k(row, k) {
    const least = row.slice().sort()[Math.max(0, row.length - k)] ?? 0;
    return keep(row, (at) => (row[at] ?? 0) >= least);
  },
  top_p(row, p) {
    const values = row.slice().sort();
    const most = values[values.length - 1] ?? 0;
    let sum = 0;
    const below = Float64Array.from(values, (value) => {
      sum += Math.fround(Math.exp(Math.fround(value - most)));
      return sum;
    });
    const limit = (1 - p) * sum;
    const found = below.findIndex((value) => value > limit);
    const least = values[Math.min(found < 0 ? values.length : found, values.length - 1)] ?? 0;
    return keep(row, (at) => (row[at] ?? 0) >= least);
  },
  min_p(row, share) {
    const relative = weights(row);
    return keep(row, (at) => (relative[at] ?? 0) >= Math.fround(share));
  },
};

/** The place at which the summed weights, in order of ids, pass the random number. */
function draw(row: Float32Array, random: number): number {
  const some = weights(row);
  const target = random * some.reduce((all, weight) => all + weight, 0);
  let through = 0;
  let last = 0;
  for (let id = 0; id < some.length; id++) {
    const weight = some[id] ?? 0;
    through += weight;
    if (through > target) return id;
    if (weight > 0) last = id;
  }
  return last;
}

/** What `SamplerMicroscope` shows of number `index` of the seed's stream. name: the text of a token. */
export function explain(row: Float32Array, settings: Settings, seed: number, index: number, name: (id: number) => string): Explained {
  const steps: Step[] = [];
  const add = (title: string, words: string, logits: Float32Array, heat: number) => {
    const before = steps[steps.length - 1];
    const probs = softmax(logits);
    const alive = logits.reduce((count, value) => count + (value > Number.NEGATIVE_INFINITY ? 1 : 0), 0);
    const mass = before ? before.probs.reduce((sum, prob, id) => sum + ((logits[id] ?? 0) > Number.NEGATIVE_INFINITY ? 0 : prob), 0) : 0;
    steps.push({ name: title, settings: words, logits, probs, left: alive, removed: (before?.left ?? alive) - alive, mass, heat });
  };
  add("logits", "", row.slice(), 1);
  const greedy = settings.temperature === 0;
  let heat = 1;
  for (const cut of ["temperature", "top_k", "top_p", "min_p"] as const) {
    const value = settings[cut];
    if (greedy || value === NEUTRAL[cut]) continue;
    if (cut === "temperature") heat *= value;
    add(cut, `${cut}=${Number(value.toPrecision(6))}`, CUTS[cut](steps[steps.length - 1]?.logits ?? row, value), heat);
  }
  const last = steps[steps.length - 1]?.logits ?? row;
  const random = greedy ? null : uniform(seed, index);
  const token = random === null ? last.indexOf(highest(last)) : draw(last, random);
  if (greedy)
    add(
      "greedy",
      "",
      keep(last, (at) => at === token),
      heat,
    );
  const end = steps[steps.length - 1] as Step;
  const first = steps[0] as Step;
  const shown = [...new Set([token, ...best(first), ...best(end)])].sort((a, b) => (first.probs[b] ?? 0) - (first.probs[a] ?? 0) || a - b);
  return {
    token,
    prob: end.probs[token] ?? 0,
    uniform: random,
    steps: steps.map((step) => [
      step.name,
      step.settings,
      step.left,
      step.removed,
      ...figures(step),
      shown.map((id) => shownProb(step, id)),
    ]),
    tokens: shown.map((id) => [id, name(id)]),
    line: line(end, token, name),
  };
}

const alive = (step: Step, id: number) => (step.logits[id] ?? 0) > Number.NEGATIVE_INFINITY;
const shownProb = (step: Step, id: number) => (alive(step, id) ? round(step.probs[id] ?? 0, 7) : null);

function figures(step: Step): [mass: number, temperature: number, entropy: number] {
  const entropy = step.probs.reduce((sum, prob) => (prob > 0 ? sum - prob * Math.log2(prob) : sum), 0);
  return [round(step.mass, 7), round(step.heat, 6), round(entropy, 4)];
}

/** The most probable tokens, best first; ties in order of id. */
function best(step: Step): number[] {
  const ids = Array.from(step.probs.keys()).filter((id) => alive(step, id));
  return ids.sort((a, b) => (step.probs[b] ?? 0) - (step.probs[a] ?? 0) || a - b).slice(0, SHOWN);
}

/** The line that the draw walks along: probabilities in order of ids; where they are tiny, neighbours are one piece. */
function line(step: Step, token: number, name: (id: number) => string): LinePart[] {
  const parts: LinePart[] = [];
  let count = 0;
  let sum = 0;
  const flush = () => {
    if (count) parts.push([-1, `${count} token${count > 1 ? "s" : ""}`, round(sum, 7)]);
    [count, sum] = [0, 0];
  };
  for (let id = 0; id < step.probs.length; id++) {
    if (!alive(step, id)) continue;
    const prob = step.probs[id] ?? 0;
    if (prob >= LEAST || id === token) {
      flush();
      parts.push([id, name(id), round(prob, 7)]);
    } else {
      count++;
      sum += prob;
    }
  }
  flush();
  return parts;
}

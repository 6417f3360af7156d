// What a SamplerMicroscope shows of one row of logits. The engine says what each step leaves and what is drawn. tests/site/test_browser.py
// compares every step with the Python widget's.
import { LINE_PROB, SHOWN_TOKENS } from "../src/constants.gen";
import type { LinePart, SampleStep, SampleToken } from "../src/protocol.gen";
import { type Engine, type Settings, uniform } from "./engine";

const NEUTRAL: Settings = { temperature: 1, top_k: 0, top_p: 1, min_p: 0 };

export interface Explained {
  token: number;
  prob: number;
  uniform: number | null;
  steps: SampleStep[];
  tokens: SampleToken[];
  line: LinePart[];
}

/** probs: of every token after the step; -1 where it is removed. */
interface Step {
  name: string;
  settings: string;
  probs: Float64Array;
  temperature: number;
}

const round = (value: number, digits: number) => Number(value.toFixed(digits));
const probOf = (step: Step, id: number) => step.probs[id] ?? -1;

/** What number `index` of the seed's stream draws from the engine's logits, and each step on the way. name: the text of a token. */
export function explain(engine: Engine, settings: Settings, seed: number, index: number, name: (id: number) => string): Explained {
  const steps: Step[] = [{ name: "logits", settings: "", probs: engine.probabilities(NEUTRAL), temperature: 1 }];
  const greedy = settings.temperature === 0;
  if (greedy) steps.push({ name: "greedy", settings: "", probs: engine.probabilities(settings), temperature: 1 });
  const applied = { ...NEUTRAL };
  for (const cut of ["temperature", "top_k", "top_p", "min_p"] as const) {
    if (greedy || settings[cut] === NEUTRAL[cut]) continue;
    applied[cut] = settings[cut];
    const words = `${cut}=${Number(settings[cut].toPrecision(6))}`;
    steps.push({ name: cut, settings: words, probs: engine.probabilities(applied), temperature: applied.temperature });
  }
  const random = greedy ? null : uniform(seed, index);
  const token = engine.draw(settings, random ?? 0, 0).id;
  const [first, last] = [steps[0] as Step, steps[steps.length - 1] as Step];
  const shown = [...new Set([token, ...best(first), ...best(last)])].sort((a, b) => probOf(first, b) - probOf(first, a) || a - b);
  return {
    token,
    prob: probOf(last, token),
    uniform: random,
    steps: steps.map((step, i) => asShown(step, steps[i - 1] ?? step, shown)),
    tokens: shown.map((id) => [id, name(id)]),
    line: line(last, token, name),
  };
}

function asShown(step: Step, before: Step, shown: number[]): SampleStep {
  const left = (probs: Float64Array) => probs.reduce((count, prob) => count + (prob >= 0 ? 1 : 0), 0);
  const mass = before.probs.reduce((sum, prob, id) => (prob > 0 && probOf(step, id) < 0 ? sum + prob : sum), 0);
  const entropy = step.probs.reduce((sum, prob) => (prob > 0 ? sum - prob * Math.log2(prob) : sum), 0);
  return {
    name: step.name,
    settings: step.settings,
    survivors: left(step.probs),
    removed: left(before.probs) - left(step.probs),
    mass: round(mass, 7),
    temperature: round(step.temperature, 6),
    entropy_bits: round(entropy, 4),
    probs: shown.map((id) => (probOf(step, id) < 0 ? null : round(probOf(step, id), 7))),
  };
}

/** The most probable tokens, best first; ties in order of id. */
function best(step: Step): number[] {
  const ids = Array.from(step.probs.keys()).filter((id) => probOf(step, id) >= 0);
  return ids.sort((a, b) => probOf(step, b) - probOf(step, a) || a - b).slice(0, SHOWN_TOKENS);
}

/** The line that the draw walks along: probabilities in order of ids; where they are tiny, neighbours are one piece. */
function line(step: Step, token: number, name: (id: number) => string): LinePart[] {
  const parts: LinePart[] = [];
  let [count, sum] = [0, 0];
  const flush = () => {
    if (count) parts.push([-1, `${count} token${count > 1 ? "s" : ""}`, round(sum, 7)]);
    [count, sum] = [0, 0];
  };
  step.probs.forEach((prob, id) => {
    if (prob >= LINE_PROB || id === token) {
      flush();
      parts.push([id, name(id), round(prob, 7)]);
    } else if (prob >= 0) [count, sum] = [count + 1, sum + prob];
  });
  flush();
  return parts;
}

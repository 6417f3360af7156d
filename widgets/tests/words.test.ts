import assert from "node:assert/strict";
import { test } from "node:test";
import { summary } from "../src/playground/settings";
import { figures, headline } from "../src/playground/status";
import { describe } from "../src/playground/tip";
import { history, figures as progressFigures } from "../src/progress/words";
import type { SamplerControl } from "../src/protocol.gen";
import { clamp } from "../src/shared/control";
import { duration, percent, rate, SURPRISE_LABELS, spoken, surprise, visible } from "../src/shared/format";

const settings = { max_tokens: 128, temperature: 0.8, top_k: 0, top_p: 0.95, min_p: 0, repetition_penalty: 1, seed: null };
const common = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens"];
const control = (name: string, label: string, neutral: number | boolean) =>
  ({ name, label, neutral, common: common.includes(name) }) as SamplerControl;
const controls = [
  control("temperature", "Temperature", 1),
  control("top_k", "Top-k", 0),
  control("top_p", "Top-p", 1),
  control("top_a", "Top-a", 0),
  control("min_p", "Min-p", 0),
  control("typical_p", "Typical-p", 1),
  control("repetition_penalty", "Repetition penalty", 1),
  control("dry_multiplier", "DRY multiplier", 0),
  control("mirostat", "Mirostat", false),
  control("max_tokens", "Max tokens", 256),
];
const line = (changed: object) => summary(controls, { ...settings, ...changed });
const stats = { n: 53, tps: 412.34, ttft_s: 0.0123 };

test("percentages keep what matters and never round a doubt away", () => {
  assert.deepEqual([1, 0.9994, 0.416, 0.0312, 0.0004, 0.00001, 0].map(percent), [
    "100 %",
    "100 %",
    "42 %",
    "3.1 %",
    "0.04 %",
    "< 0.01 %",
    "0 %",
  ]);
});

test("durations and rates", () => {
  assert.deepEqual([0.0123, 1.25, 42.4, 61, 3725].map(duration), ["12 ms", "1.3 s", "42 s", "1 min 01 s", "1 h 02 min"]);
  assert.deepEqual([1187.3, 42.26, 3.06].map(rate), ["1187", "42.3", "3.1"]);
});

test("white space is visible and spoken", () => {
  assert.equal(visible(" a\n\tb"), "␣a↵⇥b");
  assert.equal(visible(""), "∅");
  assert.equal(spoken("\n"), "new line");
  assert.equal(spoken(" dog"), "“dog”");
});

test("steps of surprise match the legend and the Python twin", () => {
  assert.deepEqual([1, 0.9, 0.89, 0.5, 0.2, 0.05, 0.049, 0, null].map(surprise), [0, 0, 1, 1, 2, 3, 4, 4, -1]);
  assert.equal(SURPRISE_LABELS.length, 5);
});

test("the closed settings say what is on", () => {
  assert.equal(line({}), "temperature 0.8 · top-p 0.95 · 128 tokens");
  assert.equal(line({ temperature: 0, top_k: 40, seed: 7 }), "greedy · seed 7 · 128 tokens");
  assert.equal(line({ top_k: 40, top_p: 1, min_p: 0.1 }), "temperature 0.8 · top-k 40 · min-p 0.1 · 128 tokens");
  const more = { dry_multiplier: 0.8, typical_p: 1, mirostat: true, top_a: 0.1 };
  assert.equal(line(more), "temperature 0.8 · top-p 0.95 · top-a 0.1 · DRY multiplier 0.8 · mirostat · 128 tokens");
});

test("typed numbers are kept in range, and nonsense is refused", () => {
  assert.equal(clamp({ low: 0, high: 2, step: 0.05 }, "7"), 2);
  assert.equal(clamp({ low: 1, high: 100, step: 1 }, "12.6"), 13);
  assert.equal(clamp({ low: 0, high: 1, step: 0.1 }, "0.33"), 0.33);
  assert.equal(clamp({ low: 0, high: 1, step: 1 }, " "), null);
  assert.equal(clamp({ low: 0, high: 1, step: 1 }, "ten"), null);
});

test("the status line says what is going on", () => {
  const at = (changes: object) => headline({ status: "running", stopping: false, hasModel: true, reason: "", stats, ...changes } as never);
  assert.equal(at({}), "Generating…");
  assert.equal(at({ stopping: true }), "Stopping…");
  assert.equal(at({ stats: { ...stats, n: 0 } }), "Reading the prompt…");
  assert.equal(at({ status: "stopped" }), "Stopped after 53 tokens");
  assert.equal(at({ status: "stopped", stats: { ...stats, n: 1 } }), "Stopped after 1 token");
  assert.equal(at({ status: "done", reason: "length" }), "Done: reached the token limit");
  assert.equal(at({ status: "done", reason: "something new" }), "Done");
  assert.equal(at({ status: "idle", hasModel: false }), "No model attached: Playground(llm)");
  assert.equal(figures(stats), "53 tokens · 412 tok/s · first token after 12 ms");
  assert.equal(figures(stats, false), "412 tok/s · first token after 12 ms");
  assert.equal(figures({ n: 0, tps: 0, ttft_s: null }), "");
});

test("a token is described in one sentence", () => {
  const top: [string, number][] = [
    [" the", 0.5],
    [" dog", 0.25],
    [" a", 0.1],
  ];
  assert.equal(describe([" dog", 9, 0.25, 2, top]), "Token “dog”; 25 % likely; rank 2; alternatives: “the” 50 %, “a” 10 %");
  assert.equal(describe(["x", 9, null, null, []]), "Token “x”; id 9");
});

test("progress in words", () => {
  const numbers = { done: 3, total: 12, unit: "layers", rate: 1.5, eta_s: 6, elapsed_s: 2 };
  assert.equal(progressFigures(numbers), "3 of 12 layers · 1.5 layers/s · 6.0 s left");
  assert.equal(progressFigures({ ...numbers, total: 0, eta_s: null, rate: 0 }), "3 layers · 2.0 s");
  assert.equal(progressFigures({ ...numbers, done: 0, total: 0, eta_s: null, rate: 0, elapsed_s: 0.1 }), "");
  assert.equal(
    history([
      ["load", 0.3, "done"],
      ["measure", 41, "done"],
      ["anything else", 2, "done"],
    ]),
    "loading 300 ms · measuring sensitivity 41 s · anything else 2.0 s",
  );
});

// Where texts part, what was measured of which token, and the scale of the KL; the Python half has the same rules.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Cells } from "../src/compare/cells";
import type { CellMeasure, KlToken } from "../src/protocol.gen";
import { firstDifference, klHeight, klStep, klText, summary, tokenWords } from "../src/shared/kl";

const token = (text: string, cell = 0, kl: number | null = null): KlToken => [
  cell,
  text,
  1,
  0.5,
  0.25,
  kl,
  kl === null ? null : kl < 0.1,
  null,
];
const tokens = (...texts: string[]) => texts.map((text) => token(text));

test("texts are compared, not tokens", () => {
  assert.equal(firstDifference(tokens(" a", " b"), tokens(" a", " b"), true), -1);
  assert.equal(firstDifference(tokens(" ab"), tokens(" a", "b"), true), -1);
  assert.equal(firstDifference(tokens(" a", " b"), tokens(" a", " c"), false), 1);
  assert.equal(firstDifference(tokens(" a", " b"), tokens(" a"), false), -1, "it is only behind");
  assert.equal(firstDifference(tokens(" a", " b"), tokens(" a"), true), 1, "it ended sooner");
  assert.equal(firstDifference([], [], true), -1);
});

test("steps and heights", () => {
  assert.deepEqual([null, 0, 0.0009, 0.001, 0.05, 0.5, 1, 9].map(klStep), [-1, 0, 0, 1, 2, 3, 4, 4]);
  assert.deepEqual([null, 0, 1e-5, 1e-4, 1e-2, 1, 50].map(klHeight), [0, 0, 0, 0, 0.5, 1, 1]);
  assert.deepEqual([0, 0.00002, 0.0123, 1.5].map(klText), ["0", "2e-5", "0.012", "1.5"]);
});

test("summary and words", () => {
  assert.deepEqual(summary([token("a", 0, 0.1), token("b", 0, 0.3), token("c")]), { n: 3, mean: 0.2, same: 0 });
  assert.deepEqual(summary([]), { n: 0, mean: null, same: null });
  assert.equal(tokenWords(token("a", 0, 0.02), "FP16"), "50 % here, 25 % in FP16, KL 0.020");
  assert.equal(tokenWords([0, "a", 1, null, null, null, null, " b"], "FP16"), "not measured; FP16 prefers ␣b");
});

test("a measured token is a new one, and the same one from then on", () => {
  const cells = new Cells();
  const items = [token("a", 1), token("b", 1), token("c", 9)];
  assert.deepEqual(cells.of(items, [], 2), [[], [items[0], items[1]]], "a cell that is not there is left out");
  const measures: CellMeasure[] = [[1, [0.5], [0.1], [false]]];
  const first = cells.of(items, measures, 2);
  assert.deepEqual(first[1]?.[0]?.slice(3, 7), [0.5, 0.1, 0.5, false]);
  assert.deepEqual(first[1]?.[1]?.slice(4, 7), [null, null, null], "not measured to its end");
  assert.equal(cells.of(items, measures, 2)[1]?.[0], first[1]?.[0]);
});

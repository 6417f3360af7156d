import assert from "node:assert/strict";
import { test } from "node:test";
import type { WeightSlice } from "../src/protocol.gen";
import { binary, describe, errorWords, hex, pieces, relativeError, short, signed, valueAt } from "../src/weights/stages";

test("every bit of a unit belongs to one value, at every width", () => {
  for (const bits of [2, 3, 4, 5, 6, 8]) {
    const seen = new Map<number, number>();
    for (let i = 0; i < 32; i++)
      for (const { word, low, high } of pieces(i, bits))
        for (let bit = low; bit <= high; bit++) {
          assert.equal(valueAt(word, bit, bits), i);
          seen.set(32 * word + bit, i);
        }
    assert.equal(seen.size, 32 * bits);
  }
  assert.deepEqual(pieces(6, 5), [
    { word: 0, low: 30, high: 31 },
    { word: 1, low: 0, high: 2 },
  ]);
});

test("numbers as people read them", () => {
  assert.equal(binary(5, 4), "0101");
  assert.equal(hex(0xfedcba98), "0xFEDCBA98");
  assert.equal(signed(-3), "−3");
  assert.equal(signed(0), "0");
  assert.equal(short(-0.01234567), "−0.01235");
  assert.equal(short(0.000012345), "1.23e-5");
});

test("the error of a value in words", () => {
  const slice = {
    weights: [0.5, 1],
    original: [0.25, 1],
    codes: [9, 10],
    rows: [7, 3],
    step: 0.5,
    bits: 4,
    zero: 8,
  } as unknown as WeightSlice;
  assert.equal(errorWords(slice, 0), "+0.25 (0.50 steps)");
  assert.ok(Math.abs((relativeError(slice) as number) - Math.sqrt(0.0625 / 1.0625)) < 1e-12);
  assert.match(describe(slice, 0), /^row 7, bits 1001, code 9, level \+1, weight 0\.5, original 0\.25, error \+0\.25/);
  assert.equal(relativeError({ ...slice, original: [] }), null);
  assert.equal(errorWords({ ...slice, original: [] }, 0), "");
});

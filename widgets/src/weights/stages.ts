// The arithmetic of one weight, in words. Pure, so the tests read it without a browser.
import type { WeightSlice } from "../protocol.gen";

/** Where the bits of value i lie: pieces of words, low bits first. */
export interface Piece {
  word: number;
  low: number;
  high: number;
}

export function pieces(i: number, bits: number): Piece[] {
  const first = i * bits;
  const word = Math.floor(first / 32);
  const low = first % 32;
  const high = low + bits - 1;
  if (high < 32) return [{ word, low, high }];
  return [
    { word, low, high: 31 },
    { word: word + 1, low: 0, high: high - 32 },
  ];
}

/** Which value bit `bit` of word `word` of the unit belongs to. */
export function valueAt(word: number, bit: number, bits: number): number {
  return Math.floor((32 * word + bit) / bits);
}

export function binary(code: number, bits: number): string {
  return code.toString(2).padStart(bits, "0");
}

export function hex(word: number, digits = 8): string {
  return `0x${word.toString(16).toUpperCase().padStart(digits, "0")}`;
}

export function signed(level: number): string {
  return level < 0 ? `−${-level}` : level > 0 ? `+${level}` : "0";
}

/** A weight as people compare them: four digits that count, a true minus. */
export function short(value: number): string {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size < 0.0001 ? size.toExponential(2) : String(Number(size.toPrecision(4)));
  return value < 0 ? `−${text}` : text;
}

/** Share of a step that the error is, as text; "" where nothing is known. */
export function errorWords(slice: WeightSlice, i: number): string {
  const original = slice.original[i];
  if (original === undefined) return "";
  const error = (slice.weights[i] as number) - original;
  const share = slice.step > 0 ? ` (${Math.abs(error / slice.step).toFixed(2)} steps)` : "";
  return `${error > 0 ? "+" : ""}${short(error)}${share}`;
}

/** Root mean square of the errors over that of the original weights; null where the original is not known. */
export function relativeError(slice: WeightSlice): number | null {
  if (!slice.original.length) return null;
  let [errors, squares] = [0, 0];
  slice.original.forEach((value, i) => {
    errors += ((slice.weights[i] as number) - value) ** 2;
    squares += value ** 2;
  });
  return squares > 0 ? Math.sqrt(errors / squares) : null;
}

/** One sentence for a screen reader. */
export function describe(slice: WeightSlice, i: number): string {
  const code = slice.codes[i] as number;
  const parts = [
    `row ${slice.rows[i]}`,
    `bits ${binary(code, slice.bits)}`,
    `code ${code}`,
    `level ${signed(code - slice.zero)}`,
    `weight ${short(slice.weights[i] as number)}`,
  ];
  const original = slice.original[i];
  if (original !== undefined) parts.push(`original ${short(original)}`, `error ${errorWords(slice, i)}`);
  return parts.join(", ");
}

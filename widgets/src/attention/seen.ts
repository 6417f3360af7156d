// Where a token looks in the pictures of its prompt. Pure.
import type { LookedAt } from "../protocol.gen";
import type { Pattern } from "./patterns";

/** Attention of a token to each patch of a picture, row by row. A pattern of fewer places than tokens shares each place among its tokens. */
export function looks(pattern: Pattern, picture: LookedAt, token: number, tokens: number): number[] {
  const place = (at: number) => Math.floor((at * pattern.size) / tokens);
  const first = (at: number) => Math.ceil((at * tokens) / pattern.size);
  return picture.tokens.map((key) => {
    const at = place(key);
    return pattern.share(place(token), at) / Math.max(1, first(at + 1) - first(at));
  });
}

/** Index of the largest; -1 of none. */
export function largest(values: readonly number[]): number {
  return values.reduce((best, value, i) => (best < 0 || value > (values[best] ?? 0) ? i : best), -1);
}

/** The pixel of a veil over a patch: clear where it gets most, dark where it gets nothing. */
export function veil(share: number, most: number): number {
  const hidden = 1 - Math.sqrt(most > 0 ? Math.min(1, share / most) : 0);
  return (Math.round(208 * hidden) << 24) >>> 0;
}

// Numbers of tokens measured against a reference, as steps and words. Pure, so the tests read them without a browser.
import { KL_LIMITS } from "../constants.gen";
import type { KlToken } from "../protocol.gen";
import { percent, visible } from "./format";

export const KL_LABELS = ["< 0.001", "0.001–0.01", "0.01–0.1", "0.1–1", "≥ 1 nat"] as const;

/** Step 0 (below 0.001 nats) to 4 (1 and more); -1 when the KL is not known. */
export function klStep(kl: number | null): number {
  return kl === null ? -1 : KL_LIMITS.filter((limit) => kl >= limit).length;
}

/** Height of a bar, 0 to 1: the logarithm of the KL between 0.0001 and 1. */
export function klHeight(kl: number | null): number {
  if (kl === null || kl <= 0) return 0;
  return Math.min(1, Math.max(0, (Math.log10(kl) + 4) / 4));
}

export function klText(kl: number): string {
  if (kl === 0) return "0";
  return kl < 0.001 ? kl.toExponential(0) : kl.toPrecision(2);
}

/** Index of the token of `other` in which its text leaves that of `one`; -1 while it does not, its length where it only ends sooner. */
export function firstDifference(one: readonly KlToken[], other: readonly KlToken[], ended: boolean): number {
  const text = one.map((token) => token[1]).join("");
  let at = 0;
  for (let i = 0; i < other.length; i++) {
    const piece = (other[i] as KlToken)[1];
    if (!text.startsWith(piece, at)) return i;
    at += piece.length;
  }
  return ended && other.length && at < text.length ? other.length : -1;
}

export interface Summary {
  n: number;
  mean: number | null;
  same: number | null;
}

export function summary(tokens: readonly KlToken[]): Summary {
  const kls = tokens.map((token) => token[5]).filter((kl): kl is number => kl !== null);
  const same = tokens.map((token) => token[6]).filter((value): value is boolean => value !== null);
  return {
    n: tokens.length,
    mean: kls.length ? kls.reduce((a, b) => a + b, 0) / kls.length : null,
    same: same.length ? same.filter(Boolean).length / same.length : null,
  };
}

/** "62 % here, 71 % in FP16, KL 0.012; FP16 prefers ␣cat". */
export function tokenWords([, , , prob, reference, kl, , favourite]: KlToken, name: string): string {
  const parts = [];
  if (prob !== null) parts.push(`${percent(prob)} here`);
  if (reference !== null) parts.push(`${percent(reference)} in ${name}`);
  if (kl !== null) parts.push(`KL ${klText(kl)}`);
  const words = parts.join(", ") || "not measured";
  return favourite === null ? words : `${words}; ${name} prefers ${visible(favourite)}`;
}

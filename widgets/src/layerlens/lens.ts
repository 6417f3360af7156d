// The numbers of a logit lens by depth and token. Pure, so the tests read them without a browser. Depth 0 is the embedding.
import type { LensResult } from "../protocol.gen";

export const TOP = 3;
const BEST = 10_000;

export interface Best {
  word: string;
  prob: number;
}

export class Lens {
  readonly tokens: number;
  readonly depths: number;

  constructor(readonly result: LensResult) {
    this.tokens = result.texts.length;
    this.depths = this.tokens ? result.layers + 1 : 0;
  }

  best(side: number, depth: number, token: number): Best[] {
    const at = TOP * (depth * this.tokens + token);
    return Array.from({ length: TOP }, (_, i) => ({
      word: this.result.words[this.result.top[side]?.[at + i] ?? -1] ?? "",
      prob: (this.result.prob[side]?.[at + i] ?? 0) / BEST,
    }));
  }

  chance(side: number, depth: number, token: number): number {
    return (this.result.chance[side]?.[depth * this.tokens + token] ?? 0) / BEST;
  }

  kl(side: number, depth: number, token: number): number {
    return side > 0 ? (this.result.kl[side - 1]?.[depth * this.tokens + token] ?? 0) : 0;
  }

  differs(side: number, depth: number, token: number): boolean {
    const at = TOP * (depth * this.tokens + token);
    return this.result.top[0]?.[at] !== this.result.top[side]?.[at];
  }

  target(token: number): string {
    return this.result.words[this.result.target[token] ?? -1] ?? "";
  }

  /** First depth from which on the favourites differ up to the last one; -1 where they agree in the end. */
  parts(side: number, token: number): number {
    let first = -1;
    for (let depth = this.depths - 1; depth >= 0 && this.differs(side, depth, token); depth--) first = depth;
    return first;
  }

  name(depth: number): string {
    return depth ? `layer ${depth - 1}` : "the embedding";
  }
}

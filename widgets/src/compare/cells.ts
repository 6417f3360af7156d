// Which token belongs to which answer, and what was measured of it. Pure, so the tests read it without a browser.
import type { CellMeasure, KlToken } from "../protocol.gen";

/** Tokens by cell; a token that was measured is a new one, and the same one from then on. */
export class Cells {
  private readonly known = new Map<KlToken, KlToken>();
  private measures: readonly CellMeasure[] = [];

  of(tokens: readonly KlToken[], measures: readonly CellMeasure[], count: number): KlToken[][] {
    if (measures !== this.measures) {
      this.measures = measures;
      this.known.clear();
    }
    const at = new Map(measures.map((measure) => [measure[0], measure]));
    const cells: KlToken[][] = Array.from({ length: count }, () => []);
    for (const token of tokens) {
      const cell = cells[token[0]];
      if (!cell) continue;
      const measure = at.get(token[0]);
      cell.push(measure ? this.measured(token, measure, cell.length) : token);
    }
    return cells;
  }

  private measured(token: KlToken, [_cell, kl, reference, same]: CellMeasure, i: number): KlToken {
    const before = this.known.get(token);
    if (before) return before;
    const [cell, text, id, prob] = token;
    const made: KlToken = [cell, text, id, prob, reference[i] ?? null, kl[i] ?? null, same[i] ?? null, null];
    this.known.set(token, made);
    return made;
  }
}

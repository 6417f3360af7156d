// The figures and labels of speculation. Pure, so the tests read it without a browser.
import type { SpecStats, SpecToken } from "../protocol.gen";
import { count, percent, rate, spoken } from "../shared/format";

/** A pass of the model: its tokens from `first` to `last`, all but the last one accepted draft tokens; `wrong`: rejected after them. */
export interface Pass {
  first: number;
  last: number;
  right: number;
  wrong: number;
}

export function passes(tokens: SpecToken[]): Pass[] {
  const found: Pass[] = [];
  tokens.forEach(([, , , , step, wrong], i) => {
    const now = found[found.length - 1];
    if (now && tokens[now.first]?.[4] === step) Object.assign(now, { last: i, right: i - now.first, wrong: wrong.length });
    else found.push({ first: i, last: i, right: 0, wrong: wrong.length });
  });
  return found;
}

const SOURCES: Record<SpecToken[2], string> = {
  target: "the model's own token",
  draft: "proposed by the draft model, accepted",
  ngram: "proposed by n-gram lookup, accepted",
  forced: "the only token that the grammar allows",
  rewound: "replaces the first token of a banned text",
};

/** One token as a sentence. */
export function describe([text, , source, prob, step, wrong]: SpecToken): string {
  const parts = [`${spoken(text)}: ${SOURCES[source]}`, `pass ${step + 1}`];
  if (prob !== null) parts.push(`${percent(prob)} likely`);
  if (wrong.length) parts.push(`rejected here: ${wrong.map(spoken).join(" ")}`);
  return parts.join("; ");
}

export function figures(stats: SpecStats): { name: string; value: string; note: string }[] {
  const all = stats.steps + stats.plain_steps;
  const perPass = all ? (all + stats.accepted) / all : 1;
  const share = stats.proposed ? stats.accepted / stats.proposed : 0;
  const found = [
    { name: "tokens per pass", value: perPass.toFixed(2), note: `${count(stats.tokens, "token")} in ${count(all, "pass", "passes")}` },
    {
      name: "acceptance rate",
      value: percent(share),
      note: `${stats.accepted} of ${stats.proposed}, in ${count(stats.steps, "pass", "passes")}`,
    },
  ];
  if (stats.plain_tps)
    found.push({
      name: "speedup",
      value: `× ${(stats.tps / stats.plain_tps).toFixed(2)}`,
      note: `${rate(stats.tps)} tok/s, ${rate(stats.plain_tps)} tok/s without speculation`,
    });
  if (stats.same !== null)
    found.push({ name: "output", value: stats.same ? "identical" : "different", note: "with and without speculation" });
  return found;
}

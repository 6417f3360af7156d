import assert from "node:assert/strict";
import { test } from "node:test";
import { funnel, removed } from "../src/microscope/table";
import { chain, counts, describe as page, stripes, summary } from "../src/pagetable/colours";
import type { PageCell, PageFrame, SampleStep, SpecStats, SpecToken } from "../src/protocol.gen";
import { Asker } from "../src/shared/asker";
import { describe, figures, passes } from "../src/speculation/words";

const cell = (state: PageCell[0], tokens: number, owners: number[], parent = -1, event: PageCell[5] = ""): PageCell => [
  state,
  tokens,
  owners,
  "",
  parent,
  event,
];
const frame = {
  page_size: 256,
  pages: [cell("used", 256, [1, 2]), cell("used", 9, [1], 0, "new"), cell("cached", 40, [], 2), cell("free", 0, [])],
  requests: [],
  evictions: 3,
  preemptions: 0,
} as unknown as PageFrame;

test("pages in words", () => {
  assert.deepEqual(counts(frame), { used: 1, shared: 1, cached: 1, free: 1 });
  assert.equal(summary(frame), "4 pages of 256 tokens: 2 used, 1 of them shared, 1 cached, 1 free, 3 evicted so far");
  assert.equal(page(frame, 1), "page 1: used by request 1; 9 of 256 tokens; continues page 0; just allocated");
  assert.deepEqual(chain(frame, 1), [0, 1]);
  assert.deepEqual(chain(frame, 2), [2], "a page that names itself ends the walk");
  assert.match(stripes([1, 2]), /^linear-gradient/);
});

test("passes of the model", () => {
  const token = (source: SpecToken[2], step: number, wrong: string[] = []): SpecToken => ["a", 1, source, 0.5, step, wrong];
  const tokens = [token("target", 0), token("ngram", 1), token("ngram", 1), token("target", 1, ["b", "c"]), token("target", 2)];
  assert.deepEqual(passes(tokens), [
    { first: 0, last: 0, right: 0, wrong: 0 },
    { first: 1, last: 3, right: 2, wrong: 2 },
    { first: 4, last: 4, right: 0, wrong: 0 },
  ]);
  assert.match(describe(tokens[3] as SpecToken), /own token; pass 2; 50 % likely; rejected here: “b” “c”$/);
  const stats: SpecStats = {
    ...{ kind: "ngram", steps: 1, plain_steps: 2, proposed: 4, accepted: 2, lengths: [0, 0, 1], tokens: 5 },
    ...{ tps: 300, plain_tps: 150, same: true },
  };
  assert.deepEqual(
    figures(stats).map(({ value }) => value),
    ["1.67", "50 %", "× 2.00", "identical"],
  );
  assert.equal(figures({ ...stats, plain_tps: null, same: null }).length, 2);
});

test("what a sampler left", () => {
  const about = { temperature: 1, entropy_bits: 2, probs: [] };
  const step: SampleStep = { name: "top_k", settings: "top_k=4", survivors: 4, removed: 96, mass: 0.25, ...about };
  assert.equal(removed(step), "− 96 tokens, 25 %");
  assert.equal(removed({ ...step, name: "min_p", removed: 0, mass: 0 }), "none removed");
  assert.equal(funnel(100, 100), 1);
  assert.ok(funnel(1, 100) > 0 && funnel(1, 100) < 0.2);
});

test("one question on its way, the last wish wins", () => {
  const asked: number[] = [];
  const asker = new Asker<number>((wish) => asked.push(wish));
  for (const wish of [1, 2, 3]) asker.want(wish);
  assert.deepEqual(asked, [1]);
  asker.answered();
  assert.deepEqual(asked, [1, 3]);
  asker.answered();
  asker.want(4);
  assert.deepEqual(asked, [1, 3, 4]);
  asker.close();
});

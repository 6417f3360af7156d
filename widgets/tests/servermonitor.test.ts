import assert from "node:assert/strict";
import { test } from "node:test";
import { cells, curve, facts } from "../src/servermonitor/words";

const idle = { active: 0, queued: 0, max_queue: 8, tok_s: [], ttft_p50_s: null, ttft_p99_s: null };

test("the top line says what is known", () => {
  assert.deepEqual(facts(idle), [
    ["requests", "0 of 8"],
    ["queued", "0"],
    ["tok/s", "0"],
  ]);
  const busy = facts({ ...idle, active: 3, tok_s: [1, 250], ttft_p50_s: 0.05, ttft_p99_s: 2 });
  assert.equal(busy.length, 5);
  assert.match(busy[2]?.[1] ?? "", /250/);
});

test("a curve needs two samples and stays in its box", () => {
  assert.equal(curve([1], 10, 10), "");
  assert.equal(curve([0, 10, 5], 10, 10), "M0.0 10.0L5.0 0.0L10.0 5.0");
  assert.equal(curve([0, 0], 10, 10), "M0.0 10.0L10.0 10.0");
});

test("a request without a token has no time to it", () => {
  assert.deepEqual(cells([1, "chat", "127.0.0.1", "running", 1.5, null, 5, 0]).slice(5), ["", "5", "0"]);
});

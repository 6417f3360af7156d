import assert from "node:assert/strict";
import { test } from "node:test";
import { type Change, Feed, type FeedMessage } from "../src/shared/stream";

const stats = (n: number) => ({ n, tps: 0, ttft_s: null });
const delta = (run: number, seq: number, ...items: string[]): FeedMessage<string> => ({
  type: "delta",
  run,
  seq,
  items,
  stats: stats(items.length),
});
const snapshot = (run: number, seq: number, ...items: string[]): FeedMessage<string> => ({
  type: "snapshot",
  run,
  seq,
  prompt: "p",
  items,
  stats: stats(items.length),
});
const done = (run: number, seq: number): FeedMessage<string> => ({ type: "done", run, seq, reason: "done", stats: stats(0) });

function make() {
  const sent: string[] = [];
  const changes: Change[] = [];
  const clock = { ms: 0 };
  const feed = new Feed<string>(
    (message) => sent.push(message.type),
    () => clock.ms,
  );
  feed.subscribe((change) => changes.push(change));
  return { feed, sent, changes, clock };
}

test("deltas in order are appended and drawn from where they begin", () => {
  const { feed, sent, changes } = make();
  for (const message of [snapshot(1, -1), delta(1, 0, "a", "b"), delta(1, 1, "c"), done(1, 1)]) feed.receive(message);
  assert.deepEqual(feed.items, ["a", "b", "c"]);
  assert.deepEqual(changes, [{ kind: "reset" }, { kind: "append", from: 0 }, { kind: "append", from: 2 }, { kind: "end" }]);
  assert.deepEqual(sent, []);
  assert.equal(feed.ended, true);
});

test("a hole asks for a snapshot, at most once a second, and the snapshot heals it", () => {
  const { feed, sent, clock } = make();
  feed.receive(snapshot(1, -1));
  feed.receive(delta(1, 1, "late"));
  feed.receive(delta(1, 2, "later"));
  assert.deepEqual(feed.items, []);
  assert.deepEqual(sent, ["resync"]);
  clock.ms = 1001;
  feed.receive(delta(1, 3, "still"));
  assert.deepEqual(sent, ["resync", "resync"]);
  feed.receive(snapshot(1, 3, "a", "b", "c", "d"));
  feed.receive(delta(1, 4, "e"));
  assert.deepEqual(feed.items, ["a", "b", "c", "d", "e"]);
});

test("a lost tail is noticed by done", () => {
  const { feed, sent } = make();
  for (const message of [snapshot(1, -1), delta(1, 0, "a"), done(1, 2)]) feed.receive(message);
  assert.deepEqual(sent, ["resync"]);
  feed.receive(snapshot(1, 2, "a", "b", "c"));
  assert.deepEqual(feed.items, ["a", "b", "c"]);
  assert.equal(feed.ended, true);
});

test("deltas that a snapshot already holds, and those of an older run, change nothing", () => {
  const { feed, sent } = make();
  feed.receive(snapshot(2, 1, "a", "b"));
  feed.receive(delta(2, 1, "b"));
  feed.receive(delta(1, 9, "old"));
  feed.receive(done(1, 9));
  assert.deepEqual(feed.items, ["a", "b"]);
  assert.equal(feed.ended, false);
  assert.deepEqual(sent, []);
});

test("a new run whose opening snapshot was lost is noticed", () => {
  const { feed, sent } = make();
  feed.receive(snapshot(1, 0, "a"));
  feed.receive(delta(2, 0, "x"));
  assert.deepEqual(sent, ["resync"]);
  assert.deepEqual(feed.items, ["a"]);
});

test("whatever is lost or doubled, the end is complete", () => {
  for (let seed = 1; seed <= 200; seed++) {
    let state = seed;
    const random = () => {
      state = (state * 1103515245 + 12345) % 2147483648;
      return state / 2147483648;
    };
    const all: string[] = [];
    let seq = -1;
    let wanted = false;
    const feed = new Feed<string>(
      () => {
        wanted = true;
      },
      () => state,
    );
    feed.receive(snapshot(1, -1));
    for (let step = 0; step < 40; step++) {
      seq += 1;
      all.push(`${seq}`);
      const message = delta(1, seq, `${seq}`);
      const copies = random() < 0.2 ? 0 : random() < 0.1 ? 2 : 1;
      for (let i = 0; i < copies; i++) feed.receive(structuredClone(message));
      if (wanted && random() < 0.5) {
        wanted = false;
        feed.receive(snapshot(1, seq, ...all));
      }
    }
    feed.receive(done(1, seq));
    if (wanted) feed.receive(snapshot(1, seq, ...all));
    assert.deepEqual(feed.items, all, `seed ${seed}`);
  }
});

test("saved state is there before any message", () => {
  const { feed } = make();
  feed.seed("Once", ["a"], stats(1));
  assert.equal(feed.prompt, "Once");
  assert.deepEqual(feed.items, ["a"]);
  assert.equal(feed.stats.n, 1);
});

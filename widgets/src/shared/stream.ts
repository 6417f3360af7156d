// The browser half of the streaming protocol: numbered deltas, a snapshot after a gap, `done` so that a lost tail is noticed.
// Knows nothing of the DOM or of what an item is.
import type { Stats } from "../protocol.gen";

/** Delta, Snapshot and Done of protocol.gen.ts, over any kind of item. */
export type FeedMessage<Item> =
  | { type: "delta"; run: number; seq: number; items: Item[]; stats: Stats }
  | { type: "snapshot"; run: number; seq: number; prompt: string; items: Item[]; stats: Stats }
  | { type: "done"; run: number; seq: number; reason: string; stats: Stats };

/** What changed: `reset` redraw all, `append` draw items from `from` on, `end` the run is over. */
export type Change = { kind: "reset" } | { kind: "append"; from: number } | { kind: "end" };

const RESYNC_EVERY_MS = 1000;

export class Feed<Item> {
  items: Item[] = [];
  prompt = "";
  run = -1;
  seq = -1;
  ended = true;
  stats: Stats = { n: 0, tps: 0, ttft_s: null };
  private lastResync = Number.NEGATIVE_INFINITY;
  private readonly listeners = new Set<(change: Change) => void>();

  constructor(
    private readonly send: (message: { type: "ready" } | { type: "resync" }) => void,
    private readonly now: () => number = () => performance.now(),
  ) {}

  /** Fill from saved state (an export, a reopened notebook), before any message. */
  seed(prompt: string, items: Item[], stats: Stats): void {
    this.prompt = prompt;
    this.items = [...items];
    this.stats = stats;
  }

  subscribe(listener: (change: Change) => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Other messages than the feed's are ignored. */
  receive(message: FeedMessage<Item>): void {
    if (!(message.run >= 0) || message.run < this.run) return; // not of a run, or of an older one that was on its way
    if (message.type === "snapshot") this.replace(message);
    else if (message.type === "delta") this.append(message);
    else if (message.type === "done") this.finish(message);
  }

  private replace(message: FeedMessage<Item> & { type: "snapshot" }): void {
    this.ended = message.run === this.run ? this.ended : false;
    this.run = message.run;
    this.seq = message.seq;
    this.prompt = message.prompt;
    this.items = message.items;
    this.stats = message.stats;
    this.lastResync = Number.NEGATIVE_INFINITY;
    this.emit({ kind: "reset" });
  }

  private append(message: FeedMessage<Item> & { type: "delta" }): void {
    if (message.run === this.run && message.seq <= this.seq) return; // the snapshot had it already
    if (message.run !== this.run || message.seq !== this.seq + 1) {
      this.resync();
      return;
    }
    const from = this.items.length;
    this.seq = message.seq;
    this.items.push(...message.items);
    this.stats = message.stats;
    this.emit({ kind: "append", from });
  }

  private finish(message: FeedMessage<Item> & { type: "done" }): void {
    this.ended = true;
    if (message.run !== this.run || message.seq !== this.seq) this.resync(true);
    this.run = message.run;
    this.stats = message.stats;
    this.emit({ kind: "end" });
  }

  private resync(always = false): void {
    const now = this.now();
    if (!always && now - this.lastResync < RESYNC_EVERY_MS) return;
    this.lastResync = now;
    this.send({ type: "resync" });
  }

  private emit(change: Change): void {
    for (const listener of this.listeners) listener(change);
  }
}

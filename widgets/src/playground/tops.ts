// Deltas carry no alternatives: those of a token are fetched when the reader points at it, all of them when the run has ended.
import type { Fates, TokenItem, Tops } from "../protocol.gen";

const known = new WeakMap<TokenItem, Fates>();

/** What the samplers removed at this token; undefined: not requested or not answered yet. */
export function fatesOf(item: TokenItem): Fates | undefined {
  return known.get(item);
}

/** Take the answer to `look_at` or `look_into`. */
export function learn(feed: { run: number; items: TokenItem[] }, message: Tops | Fates): void {
  const ours = (message.type === "tops" || message.type === "fates") && message.run === feed.run;
  const item = ours ? feed.items[message.at] : undefined;
  if (item && message.type === "tops") item[4] = message.top;
  if (item && message.type === "fates") known.set(item, message);
}

/** Take the alternatives of a run's rows as they were saved; rows of another run are told by their ids. */
export function fill(items: TokenItem[], saved: TokenItem[]): void {
  if (items.length !== saved.length || items.some((item, i) => item[1] !== saved[i]?.[1])) return;
  items.forEach((item, i) => {
    item[4] ??= saved[i]?.[4] ?? null;
  });
}

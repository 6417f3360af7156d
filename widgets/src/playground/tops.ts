// Deltas leave the alternatives out: those of a token come when somebody looks at it, all of them when the run has ended.
import type { TokenItem, Tops } from "../protocol.gen";

/** Take the answer to `look_at`. */
export function learn(feed: { run: number; items: TokenItem[] }, message: Tops): void {
  const item = message.type === "tops" && message.run === feed.run ? feed.items[message.at] : undefined;
  if (item) item[4] = message.top;
}

/** Take the alternatives of a run's rows as they were saved; rows of another run are told by their ids. */
export function fill(items: TokenItem[], saved: TokenItem[]): void {
  if (items.length !== saved.length || items.some((item, i) => item[1] !== saved[i]?.[1])) return;
  items.forEach((item, i) => {
    item[4] ??= saved[i]?.[4] ?? null;
  });
}

// Colours and words of pages: a colour per request, by its number.
import { OWNER_COLOURS } from "../constants.gen";
import type { PageCell, PageFrame } from "../protocol.gen";
import { count } from "../shared/format";
import { css, type Rgb } from "../shared/palette";

export function ownerColour(number: number): Rgb {
  return OWNER_COLOURS[number % OWNER_COLOURS.length] as Rgb;
}

/** Stripes in the colours of the requests that reference a page. */
export function stripes(owners: number[]): string {
  const colours = owners.slice(0, 4).map((owner) => css(ownerColour(owner)));
  if (colours.length < 2) return colours[0] ?? css(ownerColour(0));
  const stops = colours.map((colour, i) => `${colour} ${(100 * i) / colours.length}% ${(100 * (i + 1)) / colours.length}%`);
  return `linear-gradient(135deg, ${stops.join(", ")})`;
}

export const EVENTS: Record<PageCell[5], string> = {
  "": "",
  new: "just allocated",
  found: "just reused from the cache",
  joined: "just shared with one more request",
  evicted: "just evicted and allocated again",
  freed: "just freed",
  cleared: "just cleared",
};
export const MARKS: Record<PageCell[5], string> = { "": "", new: "+", found: "↻", joined: "↻", evicted: "×", freed: "−", cleared: "−" };

/** What is known of one page, as a sentence. */
export function describe(frame: PageFrame, page: number): string {
  const cell = frame.pages[page];
  if (!cell) return "";
  const [state, tokens, owners, key, parent, event] = cell;
  const held = owners.length > 1 ? `shared by requests ${owners.join(", ")}` : owners.length ? `used by request ${owners[0]}` : state;
  const parts = [`page ${page}: ${held}`];
  if (tokens) parts.push(`${tokens} of ${frame.page_size} tokens`);
  if (parent >= 0) parts.push(`continues page ${parent}`);
  if (key) parts.push(`hash ${key.slice(0, 8)}`);
  if (event) parts.push(EVENTS[event]);
  return parts.join("; ");
}

/** The page and those before it in its text, the first one first. */
export function chain(frame: PageFrame, page: number): number[] {
  const found: number[] = [];
  for (let at = page; at >= 0 && frame.pages[at] && !found.includes(at); at = (frame.pages[at] as PageCell)[4]) found.push(at);
  return found.reverse();
}

export interface Counts {
  used: number;
  shared: number;
  cached: number;
  free: number;
}

export function counts(frame: PageFrame): Counts {
  const found: Counts = { used: 0, shared: 0, cached: 0, free: 0 };
  for (const [state, _tokens, owners] of frame.pages) {
    if (state === "used" && owners.length > 1) found.shared += 1;
    else found[state] += 1;
  }
  return found;
}

export function summary(frame: PageFrame): string {
  const { used, shared, cached, free } = counts(frame);
  const parts = [`${count(frame.pages.length, "page")} of ${frame.page_size} tokens: ${used + shared} used`];
  if (shared) parts.push(`${shared} of them shared`);
  parts.push(`${cached} cached`, `${free} free`, `${frame.evictions} evicted so far`);
  if (frame.preemptions) parts.push(`${frame.preemptions} preempted`);
  return parts.join(", ");
}

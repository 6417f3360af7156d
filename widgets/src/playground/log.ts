// The streamed text: one span per token, a cursor that the arrow keys move, and auto-scroll while the reader is at the end.
import type { TokenItem } from "../protocol.gen";
import { h } from "../shared/dom";
import { surprise } from "../shared/format";
import { rankStep } from "./rank";

const AT_END_PX = 24;

export class TokenLog {
  readonly element: HTMLElement;
  readonly body: HTMLElement;
  private readonly prompt = h("span", { class: "exl2nb-prompt-echo" });
  private lines: HTMLElement[] = [];
  private spans: HTMLElement[] = [];
  private items: TokenItem[] = [];
  private following = true;
  private cursor = -1;

  /** `inspect(index, element, by)` is called with the token under the pointer or cursor, and with index -1 when there is none. */
  constructor(private readonly inspect: (index: number, element: HTMLElement | null, by: "pointer" | "keyboard") => void) {
    this.body = h("div", { class: "exl2nb-text" });
    this.element = h(
      "div",
      { class: "exl2nb-log", role: "log", "aria-live": "polite", "aria-label": "Generated text", tabindex: 0 },
      this.body,
    );
    this.newLine(this.body).append(this.prompt);
    this.element.addEventListener("copy", copyExactly);
    this.element.addEventListener("scroll", () => {
      this.following = this.atEnd();
    });
    this.element.addEventListener("pointerover", (event) => this.point(event.target));
    this.element.addEventListener("click", (event) => this.point(event.target, true));
    this.element.addEventListener("pointerleave", () => this.inspect(-1, null, "pointer"));
    this.element.addEventListener("blur", () => this.moveTo(-1));
    this.element.addEventListener("keydown", (event) => this.key(event));
  }

  reset(items: TokenItem[]): void {
    this.moveTo(-1);
    this.body.replaceChildren();
    [this.spans, this.lines] = [[], []];
    this.newLine(this.body).append(this.prompt);
    this.items = items;
    this.following = true;
  }

  /** Draw the items that are not on the page yet, after the prompt they continue. */
  draw(prompt: string): void {
    if (this.prompt.textContent !== prompt) this.prompt.textContent = prompt;
    this.drawFrom(this.spans.length);
  }

  toEnd(): void {
    this.element.scrollTop = this.element.scrollHeight;
    this.following = true;
  }

  get isFollowing(): boolean {
    return this.following;
  }

  private drawFrom(start: number): void {
    const fragment = document.createDocumentFragment();
    let line: Node = this.lines[this.lines.length - 1] as HTMLElement;
    const fresh = document.createDocumentFragment();
    let target: Node = fresh;
    for (let i = start; i < this.items.length; i++) {
      const item = this.items[i];
      if (!item) break;
      const span = tokenSpan(item, i);
      this.spans.push(span);
      target.appendChild(span);
      if (item[0].endsWith("\n")) {
        if (target === fresh) line.appendChild(fresh);
        line = target = this.newLine(fragment);
      }
    }
    if (target === fresh) line.appendChild(fresh);
    this.body.append(fragment);
    if (this.following) this.element.scrollTop = this.element.scrollHeight;
  }

  /** Each line that has ended is a block: the browser lays out a block of text as a whole, so one block of all would cost more with every token. */
  private newLine(into: ParentNode): HTMLElement {
    const line = h("div", { class: "exl2nb-line" });
    this.lines.push(line);
    into.append(line);
    return line;
  }

  private atEnd(): boolean {
    const { scrollHeight, scrollTop, clientHeight } = this.element;
    return scrollHeight - scrollTop - clientHeight < AT_END_PX;
  }

  /** `keep`: the arrow keys go on from there. */
  private point(target: EventTarget | null, keep = false): void {
    const span = target instanceof HTMLElement ? target.closest<HTMLElement>("[data-i]") : null;
    if (span && keep) this.mark(Number(span.dataset.i));
    if (span) this.inspect(Number(span.dataset.i), span, "pointer");
    else this.inspect(-1, null, "pointer");
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return; // selecting and copying stay the browser's
    const next = event.key === "Escape" ? -1 : this.target(event.key);
    if (next === null) return;
    event.preventDefault();
    this.moveTo(next);
  }

  private target(key: string): number | null {
    const last = this.spans.length - 1;
    if (last < 0) return null;
    if (key === "ArrowRight") return Math.min(last, this.cursor + 1);
    if (key === "ArrowLeft") return this.cursor < 0 ? last : Math.max(0, this.cursor - 1);
    if (key === "Home") return 0;
    if (key === "End") return last;
    if (key === "ArrowDown") return this.line(1);
    if (key === "ArrowUp") return this.line(-1);
    return null;
  }

  /** The token nearest below (or above) the cursor on the next line of text. */
  private line(step: 1 | -1): number {
    const from = this.spans[this.cursor];
    if (!from) return step > 0 ? 0 : this.spans.length - 1;
    let best = this.cursor;
    let top: number | undefined;
    for (let i = this.cursor + step; i >= 0 && i < this.spans.length; i += step) {
      const span = this.spans[i];
      if (!span || span.offsetTop === from.offsetTop || span.offsetWidth === 0) continue;
      top ??= span.offsetTop;
      if (span.offsetTop !== top) break;
      const better = Math.abs(span.offsetLeft - from.offsetLeft) < Math.abs((this.spans[best]?.offsetLeft ?? 0) - from.offsetLeft);
      if (best === this.cursor || better) best = i;
    }
    return best;
  }

  private mark(index: number): HTMLElement | null {
    this.spans[this.cursor]?.classList.remove("exl2nb-current");
    this.cursor = index;
    const span = this.spans[index] ?? null;
    span?.classList.add("exl2nb-current");
    return span;
  }

  private moveTo(index: number): void {
    const span = this.mark(index);
    span?.scrollIntoView({ block: "nearest" });
    this.inspect(span ? index : -1, span, "keyboard");
  }
}

/** What was selected, to the letter: the browser would add a line break of its own between blocks that end with one. */
function copyExactly(event: ClipboardEvent): void {
  const chosen = window.getSelection();
  if (!chosen || chosen.rangeCount === 0 || !event.clipboardData) return;
  event.clipboardData.setData("text/plain", chosen.getRangeAt(0).toString());
  event.preventDefault();
}

function tokenSpan([text, , prob, rank]: TokenItem, index: number): HTMLElement {
  const span = h("span", { class: "exl2nb-token", "data-i": index, "data-step": surprise(prob) }, text);
  if (rank !== null && rank > 1) span.dataset.rank = String(rankStep(rank));
  if (/^\n+$/.test(text)) span.dataset.newline = "";
  return span;
}

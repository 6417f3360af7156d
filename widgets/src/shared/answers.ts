// Answers to one prompt side by side: tinted tokens, a bar per token below, one cursor through all of them.
import type { KlToken } from "../protocol.gen";
import { h, setAttributes } from "./dom";
import { visible } from "./format";
import { KL_LABELS, klHeight, klStep, tokenWords } from "./kl";

const AT_END_PX = 24;
const HINT = "Hover a token, or click a text and use the arrow keys. The same position is marked in every answer.";

/** One answer. Tokens that are on the page are not drawn again unless their numbers have come. */
export class AnswerView {
  readonly element = h("div", { class: "exl2nb-answer-column" });
  readonly head = h("div", { class: "exl2nb-answer-head" });
  readonly foot = h("div", { class: "exl2nb-answer-foot exl2nb-muted" });
  readonly text: HTMLElement;
  private readonly bars = h("div", { class: "exl2nb-bars", "aria-hidden": "true" });
  private spans: HTMLElement[] = [];
  private ticks: HTMLElement[] = [];
  private drawn: (KlToken | undefined)[] = [];
  private marked = -1;
  private current = -1;
  private anchor = -1; // where the keyboard is, or the last click was

  constructor(
    readonly name: string,
    private readonly point: (index: number, by: "pointer" | "keyboard") => void,
  ) {
    this.text = h("div", { class: "exl2nb-answer-text", role: "group", "aria-label": `${name}: text`, tabindex: 0 });
    this.element.append(this.head, this.text, this.bars, this.foot);
    for (const box of [this.text, this.bars]) {
      box.addEventListener("pointerover", (event) => this.over(event.target));
      box.addEventListener("click", (event) => {
        this.anchor = this.over(event.target);
        this.text.focus();
      });
      box.addEventListener("pointerleave", () => this.point(this.anchor, "pointer"));
    }
    this.text.addEventListener("keydown", (event) => this.key(event));
    this.text.addEventListener("blur", () => {
      this.anchor = -1;
      this.point(-1, "keyboard");
    });
  }

  /** `differs`: the token at which the text leaves the reference's; -1: it does not. */
  draw(tokens: readonly KlToken[], differs: number): void {
    if (tokens.length < this.spans.length || tokens[0]?.[2] !== (this.drawn[0]?.[2] ?? tokens[0]?.[2])) this.clear();
    const follow = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < AT_END_PX;
    tokens.forEach((token, i) => {
      if (this.drawn[i] !== token) this.drawToken(token, i);
    });
    if (differs !== this.marked) this.markDifference(differs);
    if (follow) this.text.scrollTop = this.text.scrollHeight;
  }

  private markDifference(differs: number): void {
    this.spans[this.marked]?.classList.remove("exl2nb-differs");
    this.spans[this.marked]?.removeAttribute("title");
    this.marked = differs;
    const span = this.spans[differs];
    if (span) setAttributes(span, { title: "first difference" });
    span?.classList.add("exl2nb-differs");
    this.spans.forEach((one, i) => {
      one.toggleAttribute("data-agrees", differs < 0 || i < differs);
    });
  }

  /** Show the cursor; -1: nowhere. */
  mark(index: number): void {
    if (index === this.current) return;
    for (const list of [this.spans, this.ticks]) {
      list[this.current]?.classList.remove("exl2nb-current");
      list[index]?.classList.add("exl2nb-current");
    }
    this.current = index;
    const span = this.spans[index];
    if (!span) return;
    const [top, bottom] = [span.offsetTop - this.text.offsetTop, span.offsetTop - this.text.offsetTop + span.offsetHeight];
    if (top < this.text.scrollTop) this.text.scrollTop = top;
    else if (bottom > this.text.scrollTop + this.text.clientHeight) this.text.scrollTop = bottom - this.text.clientHeight;
  }

  private clear(): void {
    this.text.replaceChildren();
    this.bars.replaceChildren();
    [this.spans, this.ticks, this.drawn, this.marked, this.current, this.anchor] = [[], [], [], -1, -1, -1];
  }

  private drawToken(token: KlToken, i: number): void {
    const [, text, , , , kl] = token;
    const step = klStep(kl);
    let [span, tick] = [this.spans[i], this.ticks[i]];
    if (!span || !tick) {
      span = h("span", { class: "exl2nb-kl-token", "data-i": i, "data-agrees": this.marked < 0 || i < this.marked }, text);
      if (/^\n+$/.test(text)) span.dataset.newline = "";
      tick = h("i", { "data-i": i }, h("b"));
      this.spans.push(span);
      this.ticks.push(tick);
      this.text.append(span);
      this.bars.append(tick);
    }
    setAttributes(span, { "data-step": step });
    setAttributes(tick, { "data-step": step });
    (tick.firstElementChild as HTMLElement).style.blockSize = `${Math.round(100 * klHeight(kl))}%`;
    this.drawn[i] = token;
  }

  private over(target: EventTarget | null): number {
    const element = target instanceof HTMLElement ? target.closest<HTMLElement>("[data-i]") : null;
    const index = element ? Number(element.dataset.i) : -1;
    this.point(index, "pointer");
    return index;
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return; // selecting and copying stay the browser's
    const last = this.spans.length - 1;
    const steps: Record<string, number> = {
      ArrowRight: Math.min(last, this.anchor + 1),
      ArrowLeft: this.anchor < 0 ? last : Math.max(0, this.anchor - 1),
      Home: Math.min(last, 0),
      End: last,
      Escape: -1,
    };
    const next = steps[event.key];
    if (next === undefined) return;
    event.preventDefault();
    this.anchor = next;
    this.point(next, "keyboard");
  }
}

/** Answers to one prompt: linked cursor, and a table of what stands under it. */
export class AnswerGroup {
  readonly element = h("div", { class: "exl2nb-answers" });
  readonly views: AnswerView[];
  private readonly readout = h("div", { class: "exl2nb-readout-rows" });
  private tokens: readonly (readonly KlToken[])[] = [];
  private cursor = -1;

  constructor(
    names: readonly string[],
    private readonly reference: string,
    private readonly speak: (words: string) => void,
    private readonly hint = true,
  ) {
    this.views = names.map((name, column) => new AnswerView(name, (index, by) => this.move(index, by, column)));
    const grid = h("div", { class: "exl2nb-answer-grid" }, ...this.views.map((view) => view.element));
    this.element.append(grid, this.readout);
    this.drawReadout();
  }

  draw(tokens: readonly (readonly KlToken[])[], differs: readonly number[]): void {
    this.tokens = tokens;
    this.views.forEach((view, i) => {
      view.draw(tokens[i] ?? [], differs[i] ?? -1);
    });
    if (this.cursor >= 0) this.drawReadout();
  }

  private move(index: number, by: "pointer" | "keyboard", column: number): void {
    this.cursor = index;
    for (const view of this.views) view.mark(index);
    this.drawReadout();
    const token = this.tokens[column]?.[index];
    if (by === "keyboard" && token)
      this.speak(`${this.views[column]?.name}, token ${index + 1}, ${token[1].trim() || "space"}: ${tokenWords(token, this.reference)}`);
  }

  private drawReadout(): void {
    if (this.cursor < 0) {
      this.readout.replaceChildren(...(this.hint ? [h("div", { class: "exl2nb-muted" }, HINT)] : []));
      return;
    }
    const rows = this.views.flatMap((view, i) => {
      const token = this.tokens[i]?.[this.cursor];
      const words = token ? tokenWords(token, this.reference) : "no token here";
      return [
        h("b", {}, view.name),
        h("span", { class: "exl2nb-piece" }, token ? visible(token[1]) : "–"),
        h("span", { class: "exl2nb-muted" }, words),
      ];
    });
    this.readout.replaceChildren(
      h("div", {}, `Token ${this.cursor + 1}`),
      h("div", { class: "exl2nb-readout-table" }, ...(rows as Node[])),
    );
  }
}

/** What the colours mean. */
export function klLegend(): HTMLElement {
  const steps = KL_LABELS.map((text, step) => h("span", { class: "exl2nb-key" }, h("i", { "data-step": step }), text));
  return h(
    "div",
    { class: "exl2nb-kl-legend exl2nb-muted" },
    h("span", {}, "KL per token, nats"),
    ...steps,
    h("span", { class: "exl2nb-key" }, h("span", { class: "exl2nb-differs exl2nb-differs-key" }, "text"), "first difference"),
  );
}

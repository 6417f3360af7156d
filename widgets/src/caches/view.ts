// One view of a CacheExplorer.
import type { CacheKind, CachesState, KlToken } from "../protocol.gen";
import type { State } from "../shared/afm";
import { AnswerGroup, klLegend } from "../shared/answers";
import { guardKeys, h, icon, root, setAttributes, uniqueId } from "../shared/dom";
import { percent } from "../shared/format";
import { perFrame } from "../shared/frame";
import { firstDifference, klText, summary } from "../shared/kl";
import type { Feed } from "../shared/stream";
import { tools, tsv } from "../shared/tools";
import { NeedleTable } from "./needle";

const PLAY = "M4 2.5v11l9-5.5z";
const SQUARE = "M3.5 3.5h9v9h-9z";
const HONEST = "Decoding is greedy. The FP16 reference reads every token alongside, so speed is not measured here.";
const WATCHED: (keyof CachesState)[] = [
  ...(["status", "error", "modes", "stage", "height", "_kinds", "_run_modes", "_tokens", "_needle", "_needle_modes"] as const),
  ...(["_needle_depths", "_needle_text", "_verdict", "_has_model"] as const),
];

export class CachesView {
  readonly root = root("caches", "Cache explorer");
  private readonly prompt = h("textarea", { id: uniqueId("prompt"), rows: 2, spellcheck: "false" });
  private readonly count = h("input", { type: "number", id: uniqueId("tokens"), min: 1, max: 512, step: 1 });
  private readonly run = h("button", { type: "button", class: "exl2nb-button exl2nb-primary" }, icon(PLAY), "Generate");
  private readonly stop = h("button", { type: "button", class: "exl2nb-button" }, icon(SQUARE), "Stop");
  private readonly hide = h("button", { type: "button", class: "exl2nb-button" }, "Run needle test");
  private readonly chips = h("fieldset", { class: "exl2nb-chips" });
  private readonly status = h("span", { class: "exl2nb-headline" });
  private readonly spoken = h("div", { class: "exl2nb-sr", role: "status" });
  private readonly inspected = h("div", { class: "exl2nb-sr", "aria-live": "polite" });
  private readonly error = h("div", { class: "exl2nb-error", role: "alert", hidden: true });
  private readonly stageBox = h("div");
  private readonly needleText = h("div", { class: "exl2nb-needle-text" });
  private readonly verdict = h("p", { class: "exl2nb-verdict" });
  private readonly needle: NeedleTable;
  private readonly frame = perFrame(() => this.draw());
  private readonly undo: (() => void)[];
  private group: AnswerGroup | null = null;
  private built = "";

  constructor(
    private readonly caches: State<CachesState>,
    private readonly feed: Feed<KlToken>,
  ) {
    this.needle = new NeedleTable(caches);
    this.root.append(this.card(), this.spoken, this.inspected);
    this.listen();
    this.undo = [
      guardKeys(this.root),
      feed.subscribe(() => this.frame.request()),
      caches.observe(WATCHED, () => this.frame.request()),
      caches.observe(["prompt", "max_tokens"], () => this.refreshFields()),
    ];
    this.refreshFields();
    this.draw();
  }

  close(): void {
    for (const undo of this.undo) undo();
    this.frame.cancel();
    this.root.remove();
  }

  private card(): HTMLElement {
    const get = this.caches.get;
    const fixed = get("_static");
    this.prompt.readOnly = fixed;
    const top = h(
      "div",
      { class: "exl2nb-ask-top" },
      h("label", { for: this.prompt.id }, "Prompt"),
      h("span", { class: "exl2nb-muted" }, get("_model_label")),
    );
    const tokens = h("span", { class: "exl2nb-count" }, h("label", { for: this.count.id }, "Tokens"), this.count);
    const actions = h("div", { class: "exl2nb-actions", hidden: fixed }, this.run, this.stop, tokens, this.status);
    const ask = h("div", { class: "exl2nb-ask" }, top, this.prompt, this.chips, actions);
    const needle = h(
      "div",
      { class: "exl2nb-needle" },
      h("div", { class: "exl2nb-needle-top" }, h("b", {}, "Needle in a haystack"), this.hide),
      this.needleText,
      this.needle.element,
      this.verdict,
    );
    const note = h(
      "div",
      { class: "exl2nb-count" },
      h("span", { class: "exl2nb-muted" }, HONEST),
      tools("caches", { text: () => this.text() }),
    );
    const legend = h("div", { class: "exl2nb-legend-row" }, klLegend(), note);
    return h("div", { class: "exl2nb-card" }, ask, this.error, this.stageBox, legend, needle);
  }

  private listen(): void {
    this.run.addEventListener("click", () => this.start());
    this.stop.addEventListener("click", () => this.running && this.caches.send({ type: "stop" }));
    this.hide.addEventListener("click", () => {
      if (this.able) this.caches.send({ type: "needle", modes: this.caches.get("modes") });
    });
    this.prompt.addEventListener("input", () => this.caches.set("prompt", this.prompt.value));
    this.prompt.addEventListener("change", () => this.caches.save());
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.start();
      }
    });
  }

  private get running(): boolean {
    return this.caches.get("status") === "running";
  }

  private get able(): boolean {
    return !this.running && this.caches.get("_has_model") && !this.caches.get("_static");
  }

  private start(): void {
    if (!this.able) return;
    const tokens = Math.min(512, Math.max(1, Math.round(Number(this.count.value)) || 48));
    this.caches.send({ type: "run", prompt: this.prompt.value, modes: this.caches.get("modes"), max_tokens: tokens });
  }

  private refreshFields(): void {
    const [prompt, count] = [this.caches.get("prompt"), String(this.caches.get("max_tokens"))];
    if (this.prompt.value !== prompt) this.prompt.value = prompt;
    if (this.count.value !== count) this.count.value = count;
  }

  private draw(): void {
    const get = this.caches.get;
    const shown = get("_run_modes").length ? get("_run_modes") : get("modes");
    this.drawChips();
    if (this.built !== shown.join()) this.build(shown);
    this.drawAnswers(shown);
    this.needle.draw();
    const { fact, question, answer, tokens } = get("_needle_text");
    const around = tokens ? ` of ${tokens} tokens` : "";
    this.needleText.textContent = `“${fact}” is hidden in filler text${around} that ends with “${question}”. Shown: the probability of “${answer.trim()}”.`;
    this.verdict.textContent = get("_verdict");
    this.verdict.hidden = get("_verdict") === "";
    this.error.textContent = get("error");
    this.error.hidden = get("error") === "";
    this.drawStatus();
  }

  private text(): string {
    const modes = this.caches.get("_run_modes");
    const rows = modes.map((mode, cell) => {
      const tokens = this.feed.items.filter((token) => token[0] === cell);
      return [mode, tokens.map((token) => token[1]).join(""), summary(tokens).mean];
    });
    return tsv([["cache", "text", "mean KL"], ...rows]);
  }

  private drawStatus(): void {
    const get = this.caches.get;
    const over = { done: "Done", stopped: "Stopped; the text so far is kept", error: "Failed", idle: "" }[get("status") as string] ?? "";
    const words = this.running ? `${get("stage").toUpperCase()}…` : get("_has_model") || get("_static") ? over : "No model attached";
    this.status.textContent = words;
    if (this.spoken.textContent !== words) this.spoken.textContent = words;
    const fixed = get("_static");
    this.hide.hidden = fixed;
    setAttributes(this.run, { "aria-disabled": String(!this.able) });
    setAttributes(this.hide, { "aria-disabled": String(!this.able) });
    setAttributes(this.stop, { "aria-disabled": String(!this.running) });
    if (get("height")) this.root.style.setProperty("--exl-answer-height", String(get("height")));
  }

  /** Check boxes of all caches; FP16 is the reference, so it cannot be unchecked. */
  private drawChips(): void {
    const kinds = this.caches.get("_kinds");
    this.chips.hidden = kinds.length === 0 || this.caches.get("_static");
    if (this.chips.childElementCount !== kinds.length + 1) {
      const boxes = kinds.map(([mode, title, note]) => {
        const box = h("input", { type: "checkbox", value: mode, disabled: mode === "fp16" });
        box.addEventListener("change", () => this.choose(mode, box.checked));
        return h("label", { title: note }, box, title);
      });
      this.chips.replaceChildren(h("legend", { class: "exl2nb-sr" }, "Caches"), ...boxes);
    }
    const chosen = this.caches.get("modes");
    for (const box of this.chips.querySelectorAll("input")) box.checked = chosen.includes(box.value);
  }

  private choose(mode: string, wanted: boolean): void {
    const order = this.caches.get("_kinds").map(([name]) => name);
    const others = this.caches.get("modes").filter((name) => name !== mode);
    const chosen = wanted ? [...others, mode] : others;
    this.caches.set(
      "modes",
      order.filter((name) => chosen.includes(name)),
    );
    this.caches.save();
    if (!this.running && this.feed.items.length === 0) this.frame.request();
  }

  private build(modes: string[]): void {
    this.built = modes.join();
    this.group = new AnswerGroup(
      modes.map((mode) => mode.toUpperCase()),
      "FP16",
      (words) => {
        this.inspected.textContent = words;
      },
    );
    this.stageBox.replaceChildren(this.group.element);
  }

  private drawAnswers(modes: string[]): void {
    const tokens: KlToken[][] = modes.map(() => []);
    for (const token of this.feed.items) tokens[token[0]]?.push(token);
    const first = tokens[0] ?? [];
    const differs = tokens.map((some, i) => (i ? firstDifference(first, some, !this.running) : -1));
    this.group?.draw(tokens, differs);
    const kinds = this.caches.get("_kinds");
    const most = Math.max(...kinds.map((kind) => kind[4]), 1);
    this.group?.views.forEach((view, i) => {
      const kind = kinds.find(([mode]) => mode === modes[i]);
      if (view.head.childElementCount === 0) view.head.append(...sizes(view.name, kind, most, this.caches.get("_context")));
      view.foot.textContent = foot(tokens[i] ?? [], differs[i] ?? -1, i === 0);
    });
  }
}

function sizes(name: string, kind: CacheKind | undefined, most: number, context: number): Node[] {
  const title = h("b", {}, name);
  if (!kind) return [title];
  const [, , note, , bytes, fits] = kind;
  const bar = h("i", { "aria-hidden": "true" });
  bar.style.inlineSize = `${((100 * bytes) / most).toFixed(1)}%`;
  const facts = h("div", { class: "exl2nb-facts" }, `${bytes.toLocaleString("en-US")} bytes a token`);
  const room = fits === null ? "" : `fits ${compact(fits)} tokens`;
  const limit = context ? `Tokens that fit in free memory now; the context limit is ${context.toLocaleString("en-US")}.` : "";
  const reach = h("div", { class: "exl2nb-facts exl2nb-muted", title: limit }, room);
  return [title, h("span", { class: "exl2nb-muted" }, note), h("div", { class: "exl2nb-size" }, bar), facts, reach];
}

function foot(tokens: readonly KlToken[], differs: number, isReference: boolean): string {
  const { n, mean, same } = summary(tokens);
  if (!n) return "";
  if (isReference) return `${n} tokens · the reference`;
  const parts = [mean === null ? "" : `mean KL ${klText(mean)}`, same === null ? "" : `top-1 agreement ${percent(same)}`];
  parts.push(differs < 0 ? "identical text" : `first difference at token ${differs + 1}`);
  return parts.filter(Boolean).join(" · ").replace(/ %/g, "\u00a0%");
}

/** 12 345 678 as "12.3 million". */
export function compact(n: number): string {
  if (n >= 1e9) return `${(n / 1e9).toFixed(1)} billion`;
  if (n >= 1e6) return `${(n / 1e6).toFixed(1)} million`;
  return n.toLocaleString("en-US");
}

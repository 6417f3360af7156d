// One view of a CacheExplorer.
import type { CacheKind, CachesState, KlToken } from "../protocol.gen";
import type { State } from "../shared/afm";
import { AnswerGroup, klLegend } from "../shared/answers";
import { AnswersView } from "../shared/answerview";
import { h, setAttributes, uniqueId } from "../shared/dom";
import { percent } from "../shared/format";
import { firstDifference, klText, summary } from "../shared/kl";
import { snapshot } from "../shared/snapshot";
import type { Feed } from "../shared/stream";
import { tools, tsv } from "../shared/tools";
import { NeedleTable } from "./needle";

const HONEST = "Decoding is greedy. The FP16 reference reads every token alongside, so speed is not measured here.";
const WATCHED: (keyof CachesState)[] = [
  ...(["status", "error", "modes", "stage", "height", "_kinds", "_run_modes", "_tokens", "_needle", "_needle_modes"] as const),
  ...(["_needle_depths", "_needle_text", "_verdict", "_has_model"] as const),
];

export class CachesView extends AnswersView<CachesState> {
  private readonly prompt = h("textarea", { id: uniqueId("prompt"), rows: 2, spellcheck: "false" });
  private readonly count = h("input", { type: "number", id: uniqueId("tokens"), min: 1, max: 512, step: 1 });
  private readonly hide = h("button", { type: "button", class: "exl2nb-button" }, "Run needle test");
  private readonly chips = h("fieldset", { class: "exl2nb-chips" });
  private readonly stageBox = h("div");
  private readonly needleText = h("div", { class: "exl2nb-needle-text" });
  private readonly verdict = h("p", { class: "exl2nb-verdict" });
  private readonly needle: NeedleTable;
  private group: AnswerGroup | null = null;
  private built = "";

  constructor(caches: State<CachesState>, feed: Feed<KlToken>) {
    super(caches, feed, "caches", "Cache explorer");
    this.needle = new NeedleTable(caches);
    this.root.append(this.card(), this.spoken, this.inspected);
    this.listen();
    this.refreshFields();
    const fields = caches.observe(["prompt", "max_tokens"], () => this.refreshFields());
    this.begin(WATCHED, fields);
  }

  private card(): HTMLElement {
    const get = this.widget.get;
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
      tools("caches", { text: () => this.text(), picture: () => snapshot(this.root) }),
    );
    const legend = h("div", { class: "exl2nb-legend-row" }, klLegend(), note);
    return h("div", { class: "exl2nb-card" }, ask, this.error, this.stageBox, legend, needle);
  }

  private listen(): void {
    this.hide.addEventListener("click", () => {
      if (this.able) this.widget.send({ type: "needle", modes: this.widget.get("modes") });
    });
    this.prompt.addEventListener("input", () => this.widget.set("prompt", this.prompt.value));
    this.prompt.addEventListener("change", () => this.widget.save());
  }

  protected generate(): void {
    const tokens = Math.min(512, Math.max(1, Math.round(Number(this.count.value)) || 48));
    this.widget.send({ type: "run", prompt: this.prompt.value, modes: this.widget.get("modes"), max_tokens: tokens });
  }

  private refreshFields(): void {
    const [prompt, count] = [this.widget.get("prompt"), String(this.widget.get("max_tokens"))];
    if (this.prompt.value !== prompt) this.prompt.value = prompt;
    if (this.count.value !== count) this.count.value = count;
  }

  protected draw(): void {
    const get = this.widget.get;
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
    this.drawError();
    this.drawStatus(get("stage").toUpperCase());
    this.hide.hidden = get("_static");
    setAttributes(this.hide, { "aria-disabled": String(!this.able) });
  }

  private text(): string {
    const modes = this.widget.get("_run_modes");
    const rows = modes.map((mode, cell) => {
      const tokens = this.feed.items.filter((token) => token[0] === cell);
      return [mode, tokens.map((token) => token[1]).join(""), summary(tokens).mean];
    });
    return tsv([["cache", "text", "mean KL"], ...rows]);
  }

  /** Check boxes of all caches; FP16 is the reference, so it cannot be unchecked. */
  private drawChips(): void {
    const kinds = this.widget.get("_kinds");
    this.chips.hidden = kinds.length === 0 || this.widget.get("_static");
    if (this.chips.childElementCount !== kinds.length + 1) {
      const boxes = kinds.map(({ mode, title, note }) => {
        const box = h("input", { type: "checkbox", value: mode, disabled: mode === "fp16" });
        box.addEventListener("change", () => this.choose(mode, box.checked));
        return h("label", { title: note }, box, title);
      });
      this.chips.replaceChildren(h("legend", { class: "exl2nb-sr" }, "Caches"), ...boxes);
    }
    const chosen = this.widget.get("modes");
    for (const box of this.chips.querySelectorAll("input")) box.checked = chosen.includes(box.value);
  }

  private choose(mode: string, wanted: boolean): void {
    const order = this.widget.get("_kinds").map((kind) => kind.mode);
    const others = this.widget.get("modes").filter((name) => name !== mode);
    const chosen = wanted ? [...others, mode] : others;
    this.widget.set(
      "modes",
      order.filter((name) => chosen.includes(name)),
    );
    this.widget.save();
    if (!this.running && this.feed.items.length === 0) this.frame.request();
  }

  private build(modes: string[]): void {
    this.built = modes.join();
    this.group = new AnswerGroup(
      modes.map((mode) => mode.toUpperCase()),
      "FP16",
      (words) => this.say(words),
    );
    this.stageBox.replaceChildren(this.group.element);
  }

  private drawAnswers(modes: string[]): void {
    const tokens: KlToken[][] = modes.map(() => []);
    for (const token of this.feed.items) tokens[token[0]]?.push(token);
    const first = tokens[0] ?? [];
    const differs = tokens.map((some, i) => (i ? firstDifference(first, some, !this.running) : -1));
    this.group?.draw(tokens, differs);
    const kinds = this.widget.get("_kinds");
    const most = Math.max(...kinds.map((kind) => kind.token_bytes), 1);
    this.group?.views.forEach((view, i) => {
      const kind = kinds.find((one) => one.mode === modes[i]);
      if (view.head.childElementCount === 0) view.head.append(...sizes(view.name, kind, most, this.widget.get("_context")));
      view.foot.textContent = foot(tokens[i] ?? [], differs[i] ?? -1, i === 0);
    });
  }
}

function sizes(name: string, kind: CacheKind | undefined, most: number, context: number): Node[] {
  const title = h("b", {}, name);
  if (!kind) return [title];
  const { note, token_bytes: bytes, fits } = kind;
  const bar = h("i", { "aria-hidden": "true" });
  bar.style.inlineSize = `${((100 * bytes) / most).toFixed(1)}%`;
  const facts = h("div", { class: "exl2nb-facts" }, `${bytes.toLocaleString("en-US")} bytes per token`);
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

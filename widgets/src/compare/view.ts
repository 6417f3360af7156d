// One view of a Compare: prompts, a table over all, and a block of answers per prompt.
import type { CompareState, KlToken } from "../protocol.gen";
import type { State } from "../shared/afm";
import { AnswerGroup, klLegend } from "../shared/answers";
import { AnswersView } from "../shared/answerview";
import { h, setAttributes, uniqueId } from "../shared/dom";
import { firstDifference, klText, summary } from "../shared/kl";
import { snapshot } from "../shared/snapshot";
import type { Feed } from "../shared/stream";
import { tools, tsv } from "../shared/tools";
import { Cells } from "./cells";
import { summaryTable } from "./table";

const VIEWS = { kl: "KL", difference: "Differences" } as const;
const WATCHED: (keyof CompareState)[] = [
  ...(["status", "error", "view", "stage", "height", "_columns", "_run_prompts", "_tokens"] as const),
  ...(["_measured", "_speeds", "_note", "_has_model"] as const),
];

export class CompareView extends AnswersView<CompareState> {
  private readonly prompts = h("textarea", { id: uniqueId("prompts"), rows: 3, spellcheck: "false" });
  private readonly choice = h("div", { class: "exl2nb-choice", role: "group", "aria-label": "Colour by" });
  private readonly note = h("p", { class: "exl2nb-note exl2nb-muted" });
  private readonly table = h("div", { class: "exl2nb-summary-box" });
  private readonly blocks = h("div");
  private readonly cells = new Cells();
  private groups: AnswerGroup[] = [];
  private built = "";

  constructor(compare: State<CompareState>, feed: Feed<KlToken>) {
    super(compare, feed, "compare", "Compare");
    const fixed = compare.get("_static");
    const actions = h("div", { class: "exl2nb-actions", hidden: fixed }, this.run, this.stop, this.status);
    const label = h("label", { for: this.prompts.id }, "Prompts, one per line");
    const ask = h("div", { class: "exl2nb-ask", hidden: fixed }, label, this.prompts, actions);
    const right = h(
      "div",
      { class: "exl2nb-actions" },
      this.choice,
      tools("compare", { text: () => this.text(), picture: () => snapshot(this.root) }),
    );
    const under = h("div", { class: "exl2nb-under" }, klLegend(), right);
    this.root.append(h("div", { class: "exl2nb-card" }, ask, this.error, this.table, this.note, this.blocks, under));
    this.root.append(this.spoken, this.inspected);
    this.listen();
    this.refreshPrompts();
    const prompts = compare.observe(["prompts"], () => this.refreshPrompts());
    this.begin(WATCHED, prompts);
  }

  private listen(): void {
    for (const [view, name] of Object.entries(VIEWS)) {
      const button = h("button", { type: "button", class: "exl2nb-button", "data-view-choice": view }, name);
      button.addEventListener("click", () => {
        this.set({ view: view as CompareState["view"] });
      });
      this.choice.append(button);
    }
  }

  protected generate(): void {
    const typed = this.prompts.readOnly ? this.widget.get("prompts") : this.prompts.value.split("\n").filter((line) => line.trim());
    this.widget.send({ type: "run", prompts: typed });
  }

  /** Prompts of several lines cannot be edited here: a line is a prompt. */
  private refreshPrompts(): void {
    const prompts = this.widget.get("prompts");
    this.prompts.readOnly = this.widget.get("_static") || prompts.some((prompt) => /[\r\n]/.test(prompt));
    const text = prompts.join("\n");
    if (this.prompts.value !== text) this.prompts.value = text;
    setAttributes(this.prompts, { rows: Math.min(6, Math.max(2, prompts.length)) });
  }

  protected draw(): void {
    const get = this.widget.get;
    const [columns, prompts] = [get("_columns"), get("_run_prompts")];
    const shape = JSON.stringify([columns.map(([label]) => label), prompts]);
    if (this.built !== shape) this.build(shape);
    const cells = this.cells.of(this.feed.items, get("_measured"), columns.length * prompts.length);
    this.table.replaceChildren(...(columns.length ? [summaryTable(columns, cells, get("_speeds"))] : []));
    this.groups.forEach((group, place) => {
      this.drawGroup(group, cells.slice(place * columns.length, (place + 1) * columns.length));
    });
    this.root.firstElementChild?.setAttribute("data-view", get("view"));
    for (const button of this.choice.children)
      setAttributes(button, { "aria-pressed": String((button as HTMLElement).dataset.viewChoice === get("view")) });
    this.note.textContent = get("_note");
    this.note.hidden = get("_note") === "";
    this.drawError();
    this.drawStatus(get("stage"));
  }

  private text(): string {
    const get = this.widget.get;
    const [columns, prompts] = [get("_columns"), get("_run_prompts")];
    const cells = this.cells.of(this.feed.items, get("_measured"), columns.length * prompts.length);
    const rows = cells.map((tokens, cell) => {
      const text = tokens.map((token) => token[1]).join("");
      const prompt = prompts[Math.floor(cell / columns.length)] ?? "";
      return [prompt, columns[cell % columns.length]?.[0] ?? "", text, summary(tokens).mean];
    });
    return tsv([["prompt", "column", "text", "mean KL"], ...rows]);
  }

  private build(shape: string): void {
    this.built = shape;
    const columns = this.widget.get("_columns");
    const reference = columns[0]?.[0] ?? "reference";
    this.groups = [];
    const blocks = this.widget.get("_run_prompts").map((prompt, place) => {
      const group = new AnswerGroup(
        columns.map(([label]) => label),
        reference,
        (words) => this.say(words),
        place === 0,
      );
      for (const view of group.views) view.head.append(h("b", {}, view.name));
      this.groups.push(group);
      return h("div", { class: "exl2nb-block" }, h("div", { class: "exl2nb-prompt" }, prompt), group.element);
    });
    this.blocks.replaceChildren(...blocks);
  }

  private drawGroup(group: AnswerGroup, tokens: KlToken[][]): void {
    const first = tokens[0] ?? [];
    const differs = tokens.map((some, i) => (i ? firstDifference(first, some, !this.running) : -1));
    group.draw(tokens, differs);
    group.views.forEach((view, i) => {
      view.foot.textContent = foot(tokens[i] ?? [], differs[i] ?? -1, i === 0);
    });
  }
}

function foot(tokens: readonly KlToken[], differs: number, isReference: boolean): string {
  const { n, mean } = summary(tokens);
  if (!n) return "";
  if (isReference) return `${n} tokens · the reference`;
  const where = differs < 0 ? "identical text" : `first difference at token ${differs + 1}`;
  return [mean === null ? "" : `mean KL ${klText(mean)}`, where].filter(Boolean).join(" · ");
}

// One view of a Playground: builds the page, turns clicks into messages, and redraws per animation frame.

import { PROTOCOL_VERSION } from "../constants.gen";
import type { PlaygroundState, TokenItem } from "../protocol.gen";
import type { State } from "../shared/afm";
import { h, icon, setAttributes, uniqueId } from "../shared/dom";
import { SURPRISE_LABELS } from "../shared/format";
import { snapshot } from "../shared/snapshot";
import type { Feed } from "../shared/stream";
import { tools } from "../shared/tools";
import { View } from "../shared/view";
import { Chat } from "./chat";
import { TokenLog } from "./log";
import { RANK_LABELS } from "./rank";
import { readSettings } from "./samplers";
import { SettingsPanel } from "./settings";
import { figures, headline } from "./status";
import { describe, Tip } from "./tip";
import { fatesOf } from "./tops";

const REST_MS = 120; // of the pointer on a token, before its place is computed again
const PLAY = "M4 2.5v11l9-5.5z";
const SQUARE = "M3.5 3.5h9v9h-9z";
const STALE = "The Python side uses another protocol version: reload the page, and restart the kernel if that does not help.";

export class PlaygroundView extends View<PlaygroundState> {
  private readonly prompt = h("textarea", { id: uniqueId("prompt"), rows: 2, spellcheck: "false" });
  private readonly generate = h("button", { type: "button", class: "exl2nb-button exl2nb-primary" }, icon(PLAY), "Generate");
  private readonly stop = h("button", { type: "button", class: "exl2nb-button" }, icon(SQUARE), "Stop");
  private readonly headline = h("span", { class: "exl2nb-headline" });
  private readonly figures = h("span", { class: "exl2nb-figures" });
  private readonly inspected = h("div", { class: "exl2nb-sr", "aria-live": "polite" });
  private readonly empty = h("p", { class: "exl2nb-empty" }, "Generated text appears here.");
  private readonly jump = h("button", { type: "button", class: "exl2nb-button exl2nb-jump", hidden: true }, "Scroll to end ↓");
  private readonly legend = h("div", { class: "exl2nb-legend" });
  private readonly chat: Chat | undefined;
  private readonly modes: Record<PlaygroundState["view"], HTMLInputElement>;
  private readonly tip = new Tip();
  private readonly log = new TokenLog((index, element, by) => this.inspect(index, element, by));
  private readonly panel: SettingsPanel;
  private needsReset = true;
  private looked = -1;
  private byKeyboard = false;
  private rest = 0;
  private stopping = false;

  constructor(
    playground: State<PlaygroundState>,
    private readonly feed: Feed<TokenItem>,
  ) {
    super(playground, "playground", "Playground");
    const readOnly = playground.get("_static");
    this.panel = new SettingsPanel(playground, readOnly);
    this.chat = playground.get("chat") ? new Chat(playground, this.prompt) : undefined;
    const [toggle, modes] = this.toggle();
    this.modes = modes;
    this.root.append(this.card(toggle, readOnly), this.spoken, this.inspected, this.tip.element);
    this.listen();
    this.refreshPrompt();
    this.refreshMode();
    this.begin(["status", "error", "finish_reason", "_has_model"], ...this.follow());
  }

  override close(): void {
    super.close();
    this.panel.close();
    this.chat?.close();
    window.clearTimeout(this.rest);
    this.tip.hide();
  }

  private card(toggle: HTMLElement, readOnly: boolean): HTMLElement {
    const label = this.widget.get("_model_label");
    this.prompt.readOnly = readOnly;
    const height = this.widget.get("height");
    if (height) this.log.element.style.maxHeight = height;
    const ask = h(
      "div",
      { class: "exl2nb-ask" },
      h(
        "div",
        { class: "exl2nb-ask-top" },
        h("label", { for: this.prompt.id }, this.chat ? "Message" : "Prompt"),
        h("span", { class: "exl2nb-model" }, label),
      ),
      this.prompt,
      ...(this.chat ? [this.chat.pictures] : []),
      h(
        "div",
        { class: "exl2nb-actions", hidden: readOnly },
        this.generate,
        this.stop,
        ...(this.chat ? [this.chat.cancel, this.chat.add] : []),
        h("span", { class: "exl2nb-hint" }, "or Ctrl + Enter"),
      ),
    );
    const output = h("div", { class: "exl2nb-output" }, this.log.element, this.empty, this.jump);
    const bar = h("div", { class: "exl2nb-bar" }, h("div", { class: "exl2nb-status" }, this.headline, this.figures));
    const foot = h(
      "div",
      { class: "exl2nb-foot" },
      toggle,
      this.legend,
      tools("playground", { text: () => this.text(), picture: () => snapshot(this.root) }),
    );
    if (this.chat) {
      this.generate.replaceChildren(icon(PLAY), "Send");
      this.empty.textContent = "The answer appears here.";
      this.log.element.setAttribute("aria-label", "Answer");
      return h(
        "div",
        { class: "exl2nb-card" },
        this.chat.element,
        this.chat.answer,
        output,
        bar,
        this.error,
        ask,
        this.panel.element,
        foot,
      );
    }
    return h("div", { class: "exl2nb-card" }, ask, this.panel.element, this.error, bar, output, foot);
  }

  /** The prompt and the answer, or the conversation with names. */
  private text(): string {
    const answer = this.feed.items.map((item) => item[0]).join("");
    return this.chat ? this.chat.text() : this.feed.prompt + answer;
  }

  private toggle(): [HTMLElement, Record<PlaygroundState["view"], HTMLInputElement>] {
    const name = uniqueId("view");
    const choice = (value: PlaygroundState["view"], text: string): [HTMLElement, HTMLInputElement] => {
      const input = h("input", { type: "radio", name, value });
      input.addEventListener("change", () => {
        this.set({ view: value });
      });
      return [h("label", {}, input, h("span", {}, text)), input];
    };
    const [plainLabel, plain] = choice("plain", "Plain");
    const [tintedLabel, probability] = choice("probability", "Probability");
    const [rankedLabel, rank] = choice("rank", "Rank");
    const words = h("legend", { class: "exl2nb-sr" }, "Show the text");
    return [h("fieldset", { class: "exl2nb-toggle" }, words, plainLabel, tintedLabel, rankedLabel), { plain, probability, rank }];
  }

  private listen(): void {
    this.generate.addEventListener("click", () => this.onGenerate());
    this.stop.addEventListener("click", () => this.onStop());
    this.prompt.addEventListener("input", () => this.widget.set("prompt", this.prompt.value));
    this.prompt.addEventListener("change", () => this.widget.save());
    this.jump.addEventListener("click", () => {
      this.log.toEnd();
      this.log.element.focus();
    });
    this.log.element.addEventListener("scroll", () => this.frame.request());
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.onGenerate();
      }
    });
  }

  private follow(): (() => void)[] {
    return [
      this.feed.subscribe((change) => {
        if (change.kind === "reset") this.needsReset = true;
        this.frame.request();
      }),
      this.widget.onMessage((message) => {
        if (["tops", "fates"].includes((message as { type?: string }).type ?? "")) this.inform();
      }),
      this.widget.observe(["_tokens"], () => this.inform()),
      this.widget.observe(["prompt"], () => this.refreshPrompt()),
      this.widget.observe(["view"], () => this.refreshMode()),
    ];
  }

  private get running(): boolean {
    return this.widget.get("status") === "running";
  }

  private onGenerate(): void {
    if (this.running || !this.widget.get("_has_model") || this.widget.get("_static")) return;
    if (this.chat) this.chat.send();
    else this.widget.send({ type: "generate", prompt: this.prompt.value, settings: readSettings(this.widget) });
  }

  private onStop(): void {
    if (!this.running) return;
    this.stopping = true;
    this.widget.send({ type: "stop" });
    this.frame.request();
  }

  private refreshPrompt(): void {
    const value = this.widget.get("prompt");
    if (this.prompt.value !== value) this.prompt.value = value;
  }

  private refreshMode(): void {
    const view = this.widget.get("view");
    this.modes[view].checked = true;
    this.root.dataset.view = view;
    this.legend.hidden = view === "plain";
    if (view !== "plain") this.legend.replaceChildren(...LEGENDS[view]());
  }

  protected draw(): void {
    const status = this.widget.get("status");
    const running = status === "running";
    if (!running) this.stopping = false;
    if (this.needsReset) this.log.reset(this.feed.items);
    this.needsReset = false;
    this.log.draw(this.feed.items.length || running ? this.feed.prompt : "");
    this.empty.hidden = running || this.feed.items.length > 0;
    this.jump.hidden = !running || this.log.isFollowing;
    this.drawStatus(running);
    this.drawError(this.widget.get("_protocol") === PROTOCOL_VERSION ? this.widget.get("error") : STALE);
  }

  private drawStatus(running: boolean): void {
    const words = headline({
      status: this.widget.get("status"),
      stopping: this.stopping,
      hasModel: this.widget.get("_has_model") || this.widget.get("_static"),
      reason: this.widget.get("finish_reason"),
      stats: this.feed.stats,
    });
    this.headline.textContent = words;
    this.figures.textContent = figures(this.feed.stats, !/\d/.test(words));
    if (this.spoken.textContent !== words) this.spoken.textContent = words;
    this.root.dataset.status = this.widget.get("status");
    setAttributes(this.log.element, { "aria-busy": String(running) });
    setAttributes(this.generate, { "aria-disabled": String(running || !this.widget.get("_has_model")) });
    setAttributes(this.stop, { "aria-disabled": String(!running || this.stopping) });
  }

  private inspect(index: number, element: HTMLElement | null, by: "pointer" | "keyboard"): void {
    const item = this.feed.items[index];
    this.looked = item && element ? index : -1;
    this.byKeyboard = by === "keyboard";
    window.clearTimeout(this.rest);
    if (!item || !element) {
      this.tip.hide();
      return;
    }
    if (item[4] === null) this.widget.send({ type: "look_at", run: this.feed.run, at: index });
    if (!fatesOf(item)) this.rest = window.setTimeout(() => this.lookInto(index), REST_MS);
    this.tip.show(item, element);
    if (by === "keyboard") this.inspected.textContent = describe(item);
  }

  /** Alternatives came: the card that is open shows them. */
  private inform(): void {
    const item = this.feed.items[this.looked];
    if (!item) return;
    this.tip.update(item);
    if (this.byKeyboard) this.inspected.textContent = describe(item);
  }

  /** What the samplers removed there is worked out for a place that is looked at, and never beside a run. */
  private lookInto(at: number): void {
    if (this.running || !this.widget.get("_has_model") || this.widget.get("_static")) return;
    this.widget.send({ type: "look_into", run: this.feed.run, at });
  }
}

const LEGENDS = {
  probability: () => legend("Probability of a token:", "data-step", SURPRISE_LABELS),
  rank: () => legend("Rank of a token:", "data-rank", RANK_LABELS),
};

function legend(title: string, attribute: string, labels: readonly string[]): HTMLElement[] {
  const steps = labels.map((text, step) => h("span", { class: "exl2nb-key" }, h("i", { [attribute]: step }), text));
  const second = h("span", { class: "exl2nb-key exl2nb-key-second" }, h("u", {}, "abc"), "not the top choice");
  return [h("span", { class: "exl2nb-sr" }, title), ...steps, second];
}

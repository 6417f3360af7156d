// The base of the widgets that look inside a model: the prompt and its button, one model among several, what is under the pointer.
import type { InsideState } from "../protocol.gen";
import type { State } from "./afm";
import { h, setAttributes, uniqueId } from "./dom";
import { type Tools, tools } from "./tools";
import { View } from "./view";

/** Title, choice and tools, the prompt, then the parts of the widget; one line says what is under the pointer. */
export abstract class InsideView<S extends InsideState> extends View<S> {
  protected readonly title = h("b");
  protected readonly bar: PromptBar;
  protected readonly line = h("div", { class: "exl2nb-inside-line exl2nb-muted", "aria-live": "polite" });
  protected drawn: unknown[] = [];

  constructor(
    widget: State<S>,
    private readonly kind: string,
    label: string,
    verb = "Trace",
  ) {
    super(widget, kind, label);
    this.bar = new PromptBar(widget as unknown as State<InsideState>, verb);
  }

  protected build(choice: Choice, taken: Tools, ...parts: HTMLElement[]): void {
    const right = h("div", { class: "exl2nb-inside-right" }, choice.element, tools(this.kind, taken));
    const head = h("div", { class: "exl2nb-inside-head" }, this.title, right);
    this.root.append(h("div", { class: "exl2nb-card" }, head, this.bar.element, this.error, ...parts));
  }

  /** A part of the card under a line. */
  protected part(...children: (Node | string)[]): HTMLElement {
    return h("div", { class: "exl2nb-inside-part" }, ...children);
  }

  protected say(words: string): void {
    if (this.line.textContent !== words) this.line.textContent = words;
  }

  protected get able(): boolean {
    return this.widget.get("_has_model") && !this.widget.get("_static");
  }

  /** Whether one of these has changed since the last call. */
  protected changed(...now: unknown[]): boolean[] {
    const was = this.drawn;
    this.drawn = now;
    return now.map((one, i) => one !== was[i]);
  }
}

/** The prompt and its button; in a page without a kernel only the prompt. */
class PromptBar {
  readonly element: HTMLElement;
  private readonly text = h("textarea", { id: uniqueId("prompt"), rows: 2, spellcheck: "false" });
  private readonly read: HTMLButtonElement;
  private readonly stop = h("button", { type: "button", class: "exl2nb-button" }, "Stop");
  private readonly status = h("span", { class: "exl2nb-muted", role: "status" });

  constructor(
    private readonly widget: State<InsideState>,
    verb: string,
  ) {
    this.read = h("button", { type: "button", class: "exl2nb-button exl2nb-primary" }, verb);
    const fixed = widget.get("_static") || !widget.get("_has_model");
    this.text.readOnly = fixed;
    const actions = h("div", { class: "exl2nb-inside-actions", hidden: fixed }, this.read, this.stop, this.status);
    this.element = h("div", { class: "exl2nb-inside-ask" }, h("label", { for: this.text.id }, "Prompt"), this.text, actions);
    this.read.addEventListener("click", () => this.start());
    this.stop.addEventListener("click", () => this.running && widget.send({ type: "stop" }));
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.start();
    });
  }

  draw(): void {
    const { widget, running } = this;
    const prompt = widget.get("prompt");
    if (this.text.value !== prompt && document.activeElement !== this.text) this.text.value = prompt;
    setAttributes(this.read, { "aria-disabled": String(running) });
    setAttributes(this.stop, { "aria-disabled": String(!running) });
    const share = widget.get("_share");
    const said = running ? `running… ${share > 0 ? `${Math.floor(100 * share)} %` : ""}` : "";
    if (this.status.textContent !== said) this.status.textContent = said;
  }

  get running(): boolean {
    return this.widget.get("status") === "running";
  }

  private start(): void {
    if (this.running || this.text.readOnly || !this.text.value.trim()) return;
    this.widget.send({ type: "read", prompt: this.text.value });
  }
}

/** Buttons of which one is pressed. */
export class Choice {
  readonly element: HTMLElement;
  private names = "";

  constructor(
    label: string,
    private readonly choose: (index: number) => void,
  ) {
    this.element = h("div", { class: "exl2nb-choice", role: "group", "aria-label": label });
  }

  draw(names: readonly string[], chosen: number, least = 2): void {
    this.element.hidden = names.length < least;
    const key = JSON.stringify(names);
    if (this.names !== key) {
      this.names = key;
      const buttons = names.map((name, i) => {
        const button = h("button", { type: "button", class: "exl2nb-button" }, name);
        button.addEventListener("click", () => this.choose(i));
        return button;
      });
      this.element.replaceChildren(...buttons);
    }
    [...this.element.children].forEach((button, i) => {
      setAttributes(button, { "aria-pressed": String(i === chosen) });
    });
  }
}

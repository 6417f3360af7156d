// What the widgets that look inside a model share: the prompt and its button, one model among several, status and errors.
import type { Status } from "../protocol.gen";
import type { State } from "./afm";
import { h, setAttributes, uniqueId } from "./dom";

export interface InsideState {
  status: Status;
  error: string;
  prompt: string;
  _has_model: boolean;
  _static: boolean;
}

/** The prompt and "Read"; in a page without a kernel only the prompt. */
export class PromptBar {
  readonly element: HTMLElement;
  readonly error = h("div", { class: "exl2nb-error", role: "alert", hidden: true });
  private readonly text = h("textarea", { id: uniqueId("prompt"), rows: 2, spellcheck: "false" });
  private readonly read = h("button", { type: "button", class: "exl2nb-button exl2nb-primary" }, "Read");
  private readonly stop = h("button", { type: "button", class: "exl2nb-button" }, "Stop");
  private readonly status = h("span", { class: "exl2nb-muted", role: "status" });

  constructor(private readonly widget: State<InsideState>) {
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
    const said = running ? "reading…" : "";
    if (this.status.textContent !== said) this.status.textContent = said;
    this.error.textContent = widget.get("error");
    this.error.hidden = widget.get("error") === "";
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

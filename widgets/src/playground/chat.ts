// Chat mode: the turns above the answer that streams, and what a reader does with them. Texts are set as text, never as HTML.
import type { ChatTurn, PlaygroundState } from "../protocol.gen";
import type { State } from "../shared/afm";
import { h, setAttributes } from "../shared/dom";
import { readSettings } from "./samplers";

const SAID: Record<string, string> = { user: "You", assistant: "Model", system: "System", tool: "Tool" };

export class Chat {
  /** The turns that are over; the answer in the log is not among them. */
  readonly element = h("ol", { class: "exl2nb-turns", "aria-label": "Conversation" });
  /** Name and buttons of the answer in the log. */
  readonly answer = h("div", { class: "exl2nb-turn-answer" });
  readonly cancel = h("button", { type: "button", class: "exl2nb-button", hidden: true }, "Cancel edit");
  /** Pictures that go with the next message, and the button that adds one; for models that see. */
  readonly pictures = h("div", { class: "exl2nb-pictures", role: "group", "aria-label": "Pictures for the next message" });
  readonly add = h("button", { type: "button", class: "exl2nb-button" }, "Picture…");
  private readonly chooser = h("input", { type: "file", accept: "image/*", multiple: true, hidden: true }) as HTMLInputElement;
  private urls: string[] = [];
  private editing: number | null = null;
  private sent = false;
  private readonly undo: (() => void)[];

  constructor(
    private readonly playground: State<PlaygroundState>,
    private readonly box: HTMLTextAreaElement,
  ) {
    this.cancel.addEventListener("click", () => this.edit(null, ""));
    this.add.append(this.chooser);
    this.add.addEventListener("click", (event) => {
      if (event.target !== this.chooser && !this.blocked) this.chooser.click();
    });
    this.chooser.addEventListener("change", () => {
      this.take(this.chooser.files);
      this.chooser.value = "";
    });
    box.addEventListener("paste", (event) => {
      if (this.take(event.clipboardData?.files)) event.preventDefault();
    });
    box.addEventListener("dragover", (event) => {
      if (this.playground.get("_sees")) event.preventDefault();
    });
    box.addEventListener("drop", (event) => {
      if (this.take(event.dataTransfer?.files)) event.preventDefault();
    });
    this.undo = [
      playground.observe(["_turns"], () => {
        if (this.sent) {
          this.show([]);
          this.edit(null, ""); // what was sent is a turn now; what was refused stays in the box
        }
        this.draw();
      }),
      playground.observe(["status", "error"], () => {
        if (playground.get("status") === "error") this.sent = false;
        this.draw();
      }),
    ];
    this.draw();
  }

  close(): void {
    for (const undo of this.undo) undo();
  }

  /** The turns in view, each under its name. */
  text(): string {
    return this.playground
      .get("_turns")
      .map(({ role, text, calls }) => `${SAID[role] ?? "Other"}: ${[text, ...calls].filter(Boolean).join("\n")}`)
      .join("\n\n");
  }

  /** Send the text of the box: a new message, or another version of the edited one. */
  send(): void {
    const text = this.box.value;
    if (!text.trim()) {
      this.box.focus();
      return;
    }
    const settings = readSettings(this.playground);
    this.sent = true;
    if (this.editing === null) this.playground.send({ type: "chat_send", text, images: this.urls, settings });
    else this.playground.send({ type: "chat_edit", turn: this.editing, text, settings });
  }

  /** Add the pictures among some files to the next message; false: there are none, or the model sees none. */
  private take(files: FileList | null | undefined): boolean {
    const found = [...(files ?? [])].filter((file) => file.type.startsWith("image/"));
    if (!found.length || !this.playground.get("_sees")) return false;
    for (const file of found) {
      const reader = new FileReader();
      reader.addEventListener("load", () => this.show([...this.urls, String(reader.result)]));
      reader.readAsDataURL(file);
    }
    return true;
  }

  private show(urls: string[]): void {
    this.urls = urls;
    this.pictures.replaceChildren(
      ...urls.map((url, at) => {
        const label = `Remove picture ${at + 1}`;
        const button = h(
          "button",
          { type: "button", class: "exl2nb-picture", "aria-label": label, title: label },
          h("img", { src: url, alt: "" }),
        );
        button.addEventListener("click", () => {
          this.show(this.urls.filter((_, other) => other !== at));
          this.box.focus();
        });
        return button;
      }),
    );
    this.pictures.hidden = urls.length === 0;
  }

  private get blocked(): boolean {
    return this.playground.get("status") === "running" || !this.playground.get("_has_model");
  }

  private edit(turn: number | null, text: string): void {
    this.editing = turn;
    this.sent = false;
    this.cancel.hidden = turn === null;
    this.box.value = text;
    this.playground.set("prompt", text);
    this.playground.save();
    if (turn !== null) this.box.focus();
  }

  private draw(): void {
    this.add.hidden = !this.playground.get("_sees");
    this.pictures.hidden = this.urls.length === 0;
    const turns = this.playground.get("_turns");
    const running = this.playground.get("status") === "running";
    const last = turns[turns.length - 1];
    const inLog = last?.role === "assistant" ? last : undefined;
    const held = this.held();
    const shown = inLog ? turns.slice(0, -1) : turns;
    this.element.replaceChildren(...shown.map((turn, at) => this.turn(turn, at + 1, at === turns.length - 1 && !running)));
    this.element.hidden = shown.length === 0;
    const answer = inLog ? [...this.head(inLog, turns.length, true), ...called(inLog)] : turns.length ? [h("b", {}, "Model")] : [];
    this.answer.replaceChildren(...answer);
    this.answer.hidden = turns.length === 0;
    this.element.scrollTop = this.element.scrollHeight;
    if (held) this.find(held)?.focus();
  }

  /** The focused button; focus returns to it after the turns are redrawn. */
  private held(): string | undefined {
    for (const part of [this.element, this.answer]) {
      const button = part.querySelector<HTMLElement>("button:focus");
      if (button) return button.dataset.key;
    }
    return undefined;
  }

  private find(key: string): HTMLElement | null {
    const where = `button[data-key="${key}"]`;
    return this.element.querySelector<HTMLElement>(where) ?? this.answer.querySelector<HTMLElement>(where);
  }

  private turn(turn: ChatTurn, place: number, unanswered: boolean): HTMLElement {
    const head = h("div", { class: "exl2nb-turn-head" }, ...this.head(turn, place, unanswered));
    const text = h("div", { class: "exl2nb-turn-text", dir: "auto" }, turn.text);
    return h("li", { "data-role": turn.role }, head, ...seen(turn), ...thought(turn), text, ...called(turn));
  }

  private head({ id, role, text, version, versions }: ChatTurn, place: number, last: boolean): HTMLElement[] {
    const what = `turn ${place}`;
    const parts: HTMLElement[] = [h("b", {}, SAID[role] ?? "Other")];
    if (versions > 1) parts.push(this.versions(id, version, versions, what));
    if (this.playground.get("_static")) return parts;
    if (role === "user") parts.push(this.button("Edit", `Edit ${what}`, `${place}-edit`, () => this.edit(id, text)));
    if (role === "assistant" || (role === "user" && last)) {
      const again = () => this.playground.send({ type: "chat_again", turn: id, settings: readSettings(this.playground) });
      parts.push(
        this.button("Regenerate", `Regenerate: another answer ${role === "user" ? "to" : "beside"} ${what}`, `${place}-again`, again),
      );
    }
    return parts;
  }

  private versions(turn: number, index: number, count: number, what: string): HTMLElement {
    const number = h("span", { class: "exl2nb-turn-number" }, `${index + 1}/${count}`);
    if (this.playground.get("_static")) return number;
    const step = (sign: string, words: string, to: number) =>
      this.button(
        sign,
        `${words} version of ${what}`,
        `${what}-${words}`,
        () => this.playground.send({ type: "chat_go", turn, index: to }),
        {
          off: to < 0 || to >= count,
        },
      );
    return h(
      "span",
      { class: "exl2nb-versions", role: "group", "aria-label": `Versions of ${what}` },
      step("‹", "Previous", index - 1),
      number,
      step("›", "Next", index + 1),
    );
  }

  private button(words: string, label: string, key: string, act: () => void, { off = false } = {}): HTMLElement {
    const button = h("button", { type: "button", class: "exl2nb-button exl2nb-small", "aria-label": label, "data-key": key }, words);
    setAttributes(button, { "aria-disabled": off || this.blocked ? "true" : undefined });
    button.addEventListener("click", () => {
      if (off || this.blocked) return;
      this.sent = false;
      act();
    });
    return button;
  }
}

/** The pictures that were shown with a message. */
function seen({ images }: ChatTurn): HTMLElement[] {
  const parts = images.map(([url, note]) => h("figure", {}, h("img", { src: url, alt: `Picture, ${note}` }), h("figcaption", {}, note)));
  return parts.length ? [h("div", { class: "exl2nb-turn-pictures" }, ...parts)] : [];
}

/** What the model thought, folded. The answer in the log shows it among its tokens. */
function thought({ reasoning }: ChatTurn): HTMLElement[] {
  if (!reasoning) return [];
  const text = h("div", { class: "exl2nb-turn-text", dir: "auto" }, reasoning);
  return [h("details", { class: "exl2nb-turn-reasoning" }, h("summary", {}, "Reasoning"), text)];
}

/** The functions it wants to be called. */
function called({ calls }: ChatTurn): HTMLElement[] {
  return calls.map((call) => h("div", { class: "exl2nb-turn-call" }, "Tool calls ", h("code", {}, call)));
}

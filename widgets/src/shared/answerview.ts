// The base of widgets that generate several answers side by side and stream them as one feed: run, stop, what is said of it.
import type { AnyModel } from "@anywidget/types";
import type { KlToken, Status } from "../protocol.gen";
import { type State, state } from "./afm";
import { h, icon, setAttributes } from "./dom";
import { Feed, type FeedMessage } from "./stream";
import { type Failing, show, View } from "./view";

const PLAY = "M4 2.5v11l9-5.5z";
const SQUARE = "M3.5 3.5h9v9h-9z";

export interface AnswersState extends Failing {
  status: Status;
  stage: string;
  height: string;
  _has_model: boolean;
  _static: boolean;
  _tokens: KlToken[];
}

export abstract class AnswersView<S extends AnswersState> extends View<S> {
  protected readonly run = h("button", { type: "button", class: "exl2nb-button exl2nb-primary" }, icon(PLAY), "Generate");
  protected readonly stop = h("button", { type: "button", class: "exl2nb-button" }, icon(SQUARE), "Stop");
  protected readonly status = h("span", { class: "exl2nb-headline" });
  protected readonly inspected = h("div", { class: "exl2nb-sr", "aria-live": "polite" });

  constructor(
    widget: State<S>,
    protected readonly feed: Feed<KlToken>,
    kind: string,
    label: string,
  ) {
    super(widget, kind, label);
    this.run.addEventListener("click", () => this.start());
    this.stop.addEventListener("click", () => this.running && this.widget.send({ type: "stop" }));
    this.root.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.start();
    });
  }

  protected override begin(watched: (keyof S & string)[], ...undo: (() => void)[]): void {
    super.begin(
      watched,
      this.feed.subscribe(() => this.frame.request()),
      ...undo,
    );
  }

  protected get running(): boolean {
    return this.widget.get("status") === "running";
  }

  protected get able(): boolean {
    return !this.running && this.widget.get("_has_model") && !this.widget.get("_static");
  }

  private start(): void {
    if (this.able) this.generate();
  }

  /** Ask the kernel for the answers. */
  protected abstract generate(): void;

  protected drawStatus(stage: string): void {
    const get = this.widget.get;
    const over = { done: "Done", stopped: "Stopped; the text so far is kept", error: "Failed", idle: "" }[get("status") as string] ?? "";
    const words = this.running ? `${stage}…` : get("_has_model") || get("_static") ? over : "No model attached";
    this.status.textContent = words;
    if (this.spoken.textContent !== words) this.spoken.textContent = words;
    setAttributes(this.run, { "aria-disabled": String(!this.able) });
    setAttributes(this.stop, { "aria-disabled": String(!this.running) });
    if (get("height")) this.root.style.setProperty("--exl-answer-height", String(get("height")));
  }

  protected say(words: string): void {
    this.inspected.textContent = words;
  }
}

type Made<S extends AnswersState> = new (widget: State<S>, feed: Feed<KlToken>) => AnswersView<S>;

/** The definition of such a widget: one feed for all its views. `prompt`: what the saved answers continue. */
export function answersWidget<S extends AnswersState>(View: Made<S>, prompt: (widget: State<S>) => string) {
  let feed: Feed<KlToken> | undefined;
  const feedOf = (model: AnyModel) => {
    if (feed) return feed;
    const widget = state<S>(model);
    feed = new Feed<KlToken>((message) => widget.send(message));
    feed.seed(prompt(widget), widget.get("_tokens"), { n: widget.get("_tokens").length, tps: 0, ttft_s: null });
    return feed;
  };
  return {
    initialize({ model }: { model: AnyModel }) {
      const made = feedOf(model);
      const undo = state<S>(model).onMessage((message) => made.receive(message as FeedMessage<KlToken>));
      model.send({ type: "ready" });
      return undo;
    },
    render: (place: { model: AnyModel; el: HTMLElement }) => show(new View(state<S>(place.model), feedOf(place.model)), place),
  };
}

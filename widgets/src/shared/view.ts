// What the views of all widgets have in common: the frame, a redraw at most once per animation frame, the error line, an end.
import type { AnyModel } from "@anywidget/types";
import { type State, state } from "./afm";
import { guardKeys, h, root } from "./dom";
import { perFrame } from "./frame";
import { watchKernel } from "./kernel";

export interface Failing {
  error: string;
}

export abstract class View<S extends Failing> {
  readonly root: HTMLElement;
  protected readonly error = h("div", { class: "exl2nb-error", role: "alert", hidden: true });
  /** What a screen reader says of an action. */
  protected readonly spoken = h("div", { class: "exl2nb-sr", role: "status" });
  protected readonly frame = perFrame(() => this.draw());
  private undo: (() => void)[] = [];

  constructor(
    protected readonly widget: State<S>,
    kind: string,
    label: string,
  ) {
    this.root = root(kind, label);
  }

  /** The last step of a constructor: follow these traits, and draw. `undo`: what else must end with the view. */
  protected begin(watched: (keyof S & string)[], ...undo: (() => void)[]): void {
    const redraw = () => this.frame.request();
    this.undo = [guardKeys(this.root), this.widget.observe(watched, redraw), ...undo];
    this.draw();
  }

  close(): void {
    for (const undo of this.undo) undo();
    this.frame.cancel();
    this.root.remove();
  }

  protected drawError(error = this.widget.get("error")): void {
    if (this.error.textContent !== error) this.error.textContent = error;
    this.error.hidden = error === "";
  }

  /** Change traits, for the kernel and for this page. */
  protected set(values: Partial<S>): void {
    for (const [name, value] of Object.entries(values)) this.widget.set(name as keyof S & string, value as never);
    this.widget.save();
    this.frame.request();
  }

  protected abstract draw(): void;
}

type Place = { model: AnyModel; el: HTMLElement };

/** Put a view on the page; returns its end. `asks`: it sends to the kernel, and says so when no answer comes. */
export function show<S extends Failing>(view: View<S>, { model, el }: Place, asks = true): () => void {
  el.append(view.root);
  const undo = asks ? watchKernel(view.root, model) : () => {};
  return () => {
    undo();
    view.close();
  };
}

/** The definition of a widget without state of its own: a view for every place it is shown at. */
export function widget<S extends Failing>(Made: new (widget: State<S>) => View<S>, asks = true) {
  return { render: (place: Place) => show(new Made(state<S>(place.model)), place, asks) };
}

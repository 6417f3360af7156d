// The part of the anywidget front-end contract we use. Old front ends pass neither `signal` nor `host`, so nothing here needs them.
import type { AnyModel } from "@anywidget/types";

/** A model seen through its generated state type. */
export interface State<S extends object> {
  get<K extends keyof S & string>(name: K): S[K];
  set<K extends keyof S & string>(name: K, value: S[K]): void;
  save(): void;
  send(message: object): void;
  /** Calls back on a change of any of `names`; returns the undo. */
  observe(names: (keyof S & string)[], callback: () => void): () => void;
  /** Custom messages of the kernel; returns the undo. */
  onMessage(callback: (message: unknown) => void): () => void;
}

const sent = new WeakMap<AnyModel, number>();

/** When the page last asked the kernel for something, in the time of `performance.now`; -Infinity = never. */
export function lastSent(model: AnyModel): number {
  return sent.get(model) ?? Number.NEGATIVE_INFINITY;
}

function ask(model: AnyModel, message: object): void {
  sent.set(model, performance.now());
  try {
    model.send(message);
  } catch {
    // JupyterLab refuses to send to a kernel that it knows to be dead: `watchKernel` says so
  }
}

export function state<S extends object>(model: AnyModel): State<S> {
  return {
    get: (name) => model.get(name),
    set: (name, value) => model.set(name, value),
    save: () => model.save_changes(),
    send: (message) => ask(model, message),
    observe(names, callback) {
      for (const name of names) model.on(`change:${name}`, callback);
      return () => {
        for (const name of names) model.off(`change:${name}`, callback);
      };
    },
    onMessage(callback) {
      model.on("msg:custom", callback);
      return () => model.off("msg:custom", callback);
    },
  };
}

// The smallest host for one of our bundles: used by the offline HTML export, where there is neither kernel nor notebook.
type Definition = { initialize?: (props: object) => unknown; render?: (props: object) => unknown };

export async function mount(el: HTMLElement, source: string, saved: Record<string, unknown>): Promise<void> {
  const values = { ...saved };
  const listeners = new Map<string, Set<() => void>>();
  const model = {
    get: (name: string) => values[name],
    set(name: string, value: unknown) {
      values[name] = value;
      for (const listener of listeners.get(`change:${name}`) ?? []) listener();
    },
    save_changes() {},
    send() {},
    on(name: string, listener: () => void) {
      if (!listeners.has(name)) listeners.set(name, new Set());
      listeners.get(name)?.add(listener);
    },
    off: (name: string, listener: () => void) => listeners.get(name)?.delete(listener),
  };
  const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  const exported = (await import(/* @vite-ignore */ url)).default as Definition | (() => Definition | Promise<Definition>);
  URL.revokeObjectURL(url);
  const definition = typeof exported === "function" ? await exported() : exported;
  await definition.initialize?.({ model });
  await definition.render?.({ model, el });
}

const data = document.getElementById("exl2nb-export");
const target = document.getElementById("exl2nb-root");
if (data?.textContent && target) {
  const { esm, state } = JSON.parse(data.textContent) as { esm: string; state: Record<string, unknown> };
  void mount(target, esm, state);
}

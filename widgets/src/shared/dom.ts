// Small helpers for making elements; every id is unique per view, so two views of one model do not clash.

type Attributes = Record<string, string | number | boolean | undefined>;

/** Create an element. `true` sets an empty attribute; `false` and undefined leave it out. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  setAttributes(element, attributes);
  element.append(...children);
  return element;
}

export function setAttributes(element: Element, attributes: Attributes): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) element.removeAttribute(name);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

/** A 16 px icon from one SVG path, hidden from screen readers: the button's text names it. */
export function icon(path: string): SVGSVGElement {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  setAttributes(svg, { viewBox: "0 0 16 16", width: 14, height: 14, "aria-hidden": "true", focusable: "false" });
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "path");
  setAttributes(shape, { d: path, fill: "currentColor" });
  svg.append(shape);
  return svg;
}

let count = 0;

export function uniqueId(stem: string): string {
  count += 1;
  return `exl2nb-${stem}-${count}-${Math.random().toString(36).slice(2, 7)}`;
}

/** The widget's frame: our class for every style rule. */
export function root(kind: string, label: string): HTMLElement {
  return h("section", { class: `exl2nb exl2nb-${kind}`, "aria-label": label });
}

/**
 * Keep the notebook's one-letter shortcuts, arrows and Enter away while the keyboard is inside `element`, but let Ctrl+S and its like through.
 * JupyterLab listens on the document before any of our handlers and obeys this attribute, so it is set one step earlier, on the window.
 */
export function guardKeys(element: HTMLElement): () => void {
  const decide = (event: KeyboardEvent) => {
    const theirs = (event.ctrlKey || event.metaKey) && event.key !== "Enter";
    setAttributes(element, { "data-lm-suppress-shortcuts": theirs ? undefined : "true" });
  };
  const keep = (event: KeyboardEvent) => {
    if (element.hasAttribute("data-lm-suppress-shortcuts")) event.stopPropagation();
  };
  window.addEventListener("keydown", decide, true);
  element.addEventListener("keydown", keep);
  return () => window.removeEventListener("keydown", decide, true);
}

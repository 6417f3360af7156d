// Copy, SVG and PNG: what a widget shows, taken elsewhere. Pictures carry their own styles and need neither the page nor a network.
import { h } from "./dom";

const SVG = "http://www.w3.org/2000/svg";
const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-size", "font-family", "font-weight", "text-anchor"] as const;
const DENSITY = 2; // pixels of a PNG per pixel of the page
const SAID_MS = 1500;

export interface Tools {
  /** What Copy puts on the clipboard, as plain text. */
  text?: () => string;
  /** A picture, as the text of an SVG file. */
  picture?: () => string;
}

/** Buttons for what there is. `name`: of the files. */
export function tools(name: string, { text, picture }: Tools): HTMLElement {
  const box = h("span", { class: "exl2nb-tools", role: "group", "aria-label": "Copy or save" });
  const add = (label: string, title: string, act: () => Promise<string>) => {
    const button = h("button", { type: "button", class: "exl2nb-button exl2nb-tool", title }, label);
    button.addEventListener("click", () => {
      act()
        .catch((problem: unknown) => (problem instanceof Error ? problem.message : "failed"))
        .then((said) => {
          button.textContent = said || label;
          setTimeout(() => {
            button.textContent = label;
          }, SAID_MS);
        });
    });
    box.append(button);
  };
  if (text) add("Copy", "Copy as plain text", async () => copy(text()));
  if (picture) {
    add("SVG", "Save the picture as SVG", async () => save(`${name}.svg`, new Blob([picture()], { type: "image/svg+xml" })));
    add("PNG", "Save the picture as PNG", async () => save(`${name}.png`, await raster(picture())));
  }
  return box;
}

/** Rows of cells as text that spreadsheets take. */
export function tsv(rows: readonly (readonly (string | number | null)[])[]): string {
  return rows.map((row) => row.map((cell) => String(cell ?? "").replace(/[\t\r\n]+/g, " ")).join("\t")).join("\n");
}

async function copy(text: string): Promise<string> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const box = h("textarea", { style: "position:fixed;opacity:0", "aria-hidden": "true" }); // frames without the permission
    box.value = text;
    document.body.append(box);
    box.select();
    const done = document.execCommand("copy");
    box.remove();
    if (!done) return "not allowed";
  }
  return "Copied";
}

async function save(name: string, data: Blob): Promise<string> {
  const link = h("a", { href: URL.createObjectURL(data), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  return "Saved";
}

/** The colour that a widget is drawn on. */
export function paperOf(element: Element): string {
  const card = element.closest(".exl2nb-card");
  return card ? getComputedStyle(card).backgroundColor : "#fff";
}

/** A drawn element as the text of a file: the styles of the page become its own, on the paper of the page. */
export function standalone(element: SVGElement): string {
  const copied = element.cloneNode(true) as SVGElement;
  const [from, to] = [
    [element, ...element.querySelectorAll("*")],
    [copied, ...copied.querySelectorAll("*")],
  ];
  from.forEach((one, i) => {
    const style = getComputedStyle(one);
    for (const name of STYLES) (to[i] as SVGElement).style.setProperty(name, style.getPropertyValue(name));
    (to[i] as SVGElement).removeAttribute("class");
  });
  const [, , width, height] = (element.getAttribute("viewBox") ?? "0 0 340 150").split(" ");
  copied.setAttribute("xmlns", SVG);
  copied.setAttribute("width", String(width));
  copied.setAttribute("height", String(height));
  copied.style.background = paperOf(element);
  return new XMLSerializer().serializeToString(copied);
}

async function raster(svg: string): Promise<Blob> {
  const image = h("img", { src: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}` });
  await image.decode();
  const canvas = h("canvas", { width: image.width * DENSITY, height: image.height * DENSITY });
  canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done, failed) => canvas.toBlob((blob) => (blob ? done(blob) : failed(new Error("no picture"))), "image/png"));
}

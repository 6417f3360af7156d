// What a widget shows, as one SVG file: boxes, text, drawings and controls where the page has them. Draws from computed styles, so it needs
// neither the style sheets nor `foreignObject`, which picture programs do not read.
import { paperOf, standalone } from "./tools";

const LEFT_OUT = ".exl2nb-sr, .exl2nb-tools, option, legend.exl2nb-sr, [hidden]";

class Painter {
  private readonly parts: string[] = [];
  private clips = 0;

  constructor(
    private readonly left: number,
    private readonly top: number,
  ) {}

  get svg(): string {
    return this.parts.join("");
  }

  element(element: Element): void {
    if (element.matches(LEFT_OUT) || !element.checkVisibility()) return;
    const style = getComputedStyle(element);
    if (element instanceof SVGElement) this.drawing(element);
    else if (element instanceof HTMLCanvasElement) this.image(element.getBoundingClientRect(), element.toDataURL());
    else this.html(element, style);
  }

  private html(element: Element, style: CSSStyleDeclaration): void {
    const scrolls = element.scrollHeight > element.clientHeight + 1 || element.scrollWidth > element.clientWidth + 1;
    const clipped = scrolls && style.overflow !== "visible";
    this.box(element, style);
    if (clipped) this.open(element.getBoundingClientRect());
    if (element instanceof HTMLInputElement) this.input(element, style);
    else if (element instanceof HTMLTextAreaElement) this.lines(element, style);
    else if (element instanceof HTMLSelectElement) this.control(element, element.selectedOptions[0]?.text ?? "", style);
    else
      for (const child of element.childNodes) {
        if (child instanceof Element) this.element(child);
        else if (child instanceof Text) this.text(child, style);
      }
    if (clipped) this.parts.push("</g>");
  }

  private at(box: DOMRect): string {
    return `x="${round(box.left - this.left)}" y="${round(box.top - this.top)}" width="${round(box.width)}" height="${round(box.height)}"`;
  }

  private open(box: DOMRect): void {
    const id = `c${this.clips++}`;
    this.parts.push(`<clipPath id="${id}"><rect ${this.at(box)}/></clipPath><g clip-path="url(#${id})">`);
  }

  private box(element: Element, style: CSSStyleDeclaration): void {
    const boxes = style.display === "inline" ? element.getClientRects() : [element.getBoundingClientRect()]; // one for each line
    for (const box of boxes) if (box.width && box.height) this.frame(box, style);
  }

  private frame(box: DOMRect, style: CSSStyleDeclaration): void {
    const radius = Math.min(Number.parseFloat(style.borderTopLeftRadius) || 0, box.height / 2);
    const fill = style.backgroundImage.startsWith("linear-gradient") ? this.gradient(style.backgroundImage) : style.backgroundColor;
    const size = Number.parseFloat(style.backgroundSize.split(" ")[1] ?? "");
    if (fill && !clear(fill)) {
      const shown =
        Number.isFinite(size) && size < box.height ? new DOMRect(box.left, box.top + (box.height - size) / 2, box.width, size) : box;
      this.parts.push(`<rect ${this.at(shown)} rx="${round(radius)}" fill="${fill}"/>`);
    }
    const sides = (["Top", "Right", "Bottom", "Left"] as const).map((side) => ({
      width: style[`border${side}Style`] === "none" ? 0 : Number.parseFloat(style[`border${side}Width`]) || 0,
      colour: style[`border${side}Color`],
    }));
    if (sides.every((side) => side.width > 0)) {
      const inner = new DOMRect(box.left + 0.5, box.top + 0.5, box.width - 1, box.height - 1);
      this.parts.push(`<rect ${this.at(inner)} rx="${round(radius)}" fill="none" stroke="${sides[0]?.colour}"/>`);
      return;
    }
    const widths = sides.map((side) => side.width);
    const [x, y, right, bottom] = [box.left - this.left, box.top - this.top, box.right - this.left, box.bottom - this.top];
    if ((widths[1] ?? 0) + (widths[3] ?? 0) >= box.width && widths[2]) {
      this.parts.push(
        `<path d="M${round((x + right) / 2)} ${round(y)}L${round(right)} ${round(bottom)}H${round(x)}z" fill="${sides[2]?.colour}"/>`,
      );
      return;
    }
    const ends = [
      [x, y, right, y],
      [right, y, right, bottom],
      [x, bottom, right, bottom],
      [x, y, x, bottom],
    ];
    sides.forEach((side, i) => {
      if (!side.width) return;
      const [x1 = 0, y1 = 0, x2 = 0, y2 = 0] = (ends[i] ?? []).map(round);
      this.parts.push(`<path d="M${x1} ${y1}L${x2} ${y2}" stroke="${side.colour}" stroke-width="${side.width}"/>`);
    });
  }

  /** A gradient to the right; its stops are colours with or without places. */
  private gradient(css: string): string {
    const stops = [...css.matchAll(/(rgba?\([^)]*\)|color\([^)]*\)) ?([\d.]+%)?/g)];
    const id = `g${this.clips++}`;
    const made = stops.map((stop, i) => {
      const at = stop[2] ?? `${(100 * i) / Math.max(1, stops.length - 1)}%`;
      return `<stop offset="${at}" stop-color="${stop[1]}"/>`;
    });
    this.parts.push(`<linearGradient id="${id}">${made.join("")}</linearGradient>`);
    return stops.length ? `url(#${id})` : "";
  }

  /** Words where the page has them: a word is one run of a line, unless it is broken. */
  private text(node: Text, style: CSSStyleDeclaration): void {
    const range = document.createRange();
    for (const word of node.data.matchAll(/\S+/g)) {
      const end = word.index + word[0].length;
      range.setStart(node, word.index);
      range.setEnd(node, end);
      if (range.getClientRects().length < 2) {
        this.write(word[0], range.getBoundingClientRect(), style);
        continue;
      }
      for (let i = word.index; i < end; i++) {
        range.setStart(node, i);
        range.setEnd(node, i + 1);
        this.write(node.data[i] ?? "", range.getBoundingClientRect(), style);
      }
    }
  }

  private write(text: string, box: DOMRect, style: CSSStyleDeclaration): void {
    if (!box.width) return;
    const size = Number.parseFloat(style.fontSize);
    const y = box.top - this.top + box.height / 2 + 0.35 * size;
    const line = style.textDecorationLine === "none" ? "" : ` text-decoration="${style.textDecorationLine}"`;
    const font = `font-size="${size}" font-weight="${style.fontWeight}" font-family="${escaped(style.fontFamily)}"`;
    this.parts.push(
      `<text x="${round(box.left - this.left)}" y="${round(y)}" fill="${style.color}" ${font}${line}>${escaped(text)}</text>`,
    );
  }

  private control(element: Element, value: string, style: CSSStyleDeclaration, line = 0): void {
    const box = element.getBoundingClientRect();
    const left = box.left + Number.parseFloat(style.paddingLeft) + Number.parseFloat(style.borderLeftWidth);
    const high = Number.parseFloat(style.lineHeight) || 1.3 * Number.parseFloat(style.fontSize);
    const inner = box.height - high * (element instanceof HTMLTextAreaElement ? 0 : 1);
    const top = element instanceof HTMLTextAreaElement ? box.top + Number.parseFloat(style.paddingTop) + line * high : box.top + inner / 2;
    this.write(value, new DOMRect(left, top, 1, high), style);
  }

  private lines(element: HTMLTextAreaElement, style: CSSStyleDeclaration): void {
    const most = Math.max(1, Math.floor(element.clientWidth / (0.52 * Number.parseFloat(style.fontSize))));
    const broken = element.value.split("\n").flatMap((line) => line.match(new RegExp(`.{1,${most}}(?:\\s|$)|.{${most}}`, "g")) ?? [""]);
    broken.slice(0, 4).forEach((line, i) => {
      this.control(element, line, style, i);
    });
  }

  private input(element: HTMLInputElement, style: CSSStyleDeclaration): void {
    const box = element.getBoundingClientRect();
    if (element.type === "range") {
      const share = (element.valueAsNumber - Number(element.min)) / (Number(element.max) - Number(element.min) || 1);
      const [x, y] = [box.left - this.left + 8 + share * (box.width - 16), box.top - this.top + box.height / 2];
      if (style.backgroundImage === "none")
        this.parts.push(`<rect ${this.at(new DOMRect(box.left, box.top + box.height / 2 - 2, box.width, 4))} rx="2" fill="#8888"/>`);
      this.parts.push(`<circle cx="${round(x)}" cy="${round(y)}" r="7" fill="${style.getPropertyValue("--exl-accent")}"/>`);
    } else if (element.type === "checkbox" || element.type === "radio") {
      if (element.checkVisibility({ opacityProperty: true }))
        this.parts.push(
          `<rect ${this.at(box)} rx="3" fill="${element.checked ? style.getPropertyValue("--exl-accent") : "none"}" stroke="gray"/>`,
        );
    } else this.control(element, element.value, style);
  }

  private drawing(element: SVGElement): void {
    const box = element.getBoundingClientRect();
    const file = standalone(element).replace(/ (?:width|height)="[^"]*"/g, (found, at: number) => (at < 400 ? "" : found));
    this.parts.push(file.replace("<svg", `<svg ${this.at(box)}`));
  }

  private image(box: DOMRect, url: string): void {
    this.parts.push(`<image ${this.at(box)} preserveAspectRatio="none" style="image-rendering:pixelated" href="${url}"/>`);
  }
}

export function snapshot(root: HTMLElement): string {
  const box = root.getBoundingClientRect();
  const painter = new Painter(box.left, box.top);
  painter.element(root);
  const size = `width="${Math.ceil(box.width)}" height="${Math.ceil(box.height)}" viewBox="0 0 ${Math.ceil(box.width)} ${Math.ceil(box.height)}"`;
  const paper = `<rect width="100%" height="100%" fill="${paperOf(root.querySelector(".exl2nb-card") ?? root)}"/>`;
  return `<svg xmlns="http://www.w3.org/2000/svg" ${size}>${paper}${painter.svg}</svg>`;
}

function round(value: number): number {
  return Math.round(10 * value) / 10;
}

function clear(colour: string): boolean {
  return colour === "transparent" || /^rgba\(.*, ?0\)$/.test(colour) || / \/ 0\)$/.test(colour);
}

function escaped(text: string): string {
  return text.replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);
}

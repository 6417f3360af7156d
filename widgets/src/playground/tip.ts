// The card beside a token: its id, its probability, and the alternatives that the model preferred.
import type { TokenItem } from "../protocol.gen";
import { h, setAttributes } from "../shared/dom";
import { percent, spoken, visible } from "../shared/format";
import { fatesOf } from "./tops";

/** One sentence for a screen reader. */
export function describe(item: TokenItem): string {
  const [text, id, prob, rank, top] = item;
  const fates = fatesOf(item);
  const parts = [`Token ${spoken(text)}`];
  parts.push(prob === null ? `id ${id}` : `${percent(prob)} likely`);
  if (rank !== null) parts.push(rank === 1 ? "the top choice" : `rank ${rank}`);
  const others = (top ?? []).filter(([other]) => other !== text).slice(0, 3);
  if (others.length) parts.push(`alternatives: ${others.map(([other, p]) => `${spoken(other)} ${percent(p)}`).join(", ")}`);
  if (fates) parts.push(`${fates.left} of ${fates.of} candidates left after the samplers`);
  return parts.join("; ");
}

export class Tip {
  readonly element = h("div", { class: "exl2nb-tip", role: "tooltip", popover: "manual" });
  private anchor: HTMLElement | null = null;

  show(item: TokenItem, anchor: HTMLElement): void {
    this.anchor = anchor;
    this.element.replaceChildren(...card(item));
    if (!this.element.matches(":popover-open")) this.element.showPopover?.();
    this.place();
  }

  /** The same token, of which more is known. */
  update(item: TokenItem): void {
    if (this.anchor) this.show(item, this.anchor);
  }

  hide(): void {
    if (!this.anchor) return;
    this.anchor = null;
    if (this.element.isConnected) this.element.hidePopover?.();
  }

  /** Below the token's last line box, above it where there is no room; always inside the window. */
  private place(): void {
    const boxes = this.anchor?.getClientRects();
    const at = boxes?.[0] ?? this.anchor?.getBoundingClientRect();
    if (!at) return;
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const left = Math.max(6, Math.min(at.left - 10, window.innerWidth - width - 6));
    const below = at.bottom + 6;
    const top = below + height < window.innerHeight - 6 ? below : Math.max(6, at.top - height - 6);
    setAttributes(this.element, { style: `left:${left}px;top:${top}px` });
  }
}

function card(item: TokenItem): Node[] {
  const [text, id, prob, rank, top] = item;
  const fates = fatesOf(item);
  const head = h(
    "div",
    { class: "exl2nb-tip-head" },
    h("span", { class: "exl2nb-piece" }, visible(text)),
    h("span", { class: "exl2nb-tip-prob" }, prob === null ? "probability not recorded" : percent(prob)),
  );
  const place = rank === null ? "" : rank === 1 ? "rank 1" : `rank ${rank.toLocaleString("en-US")}`;
  const facts = h("div", { class: "exl2nb-tip-facts" }, [place, `token id ${id}`].filter(Boolean).join(" · "));
  if (!top) return [head, facts, h("div", { class: "exl2nb-tip-facts" }, "loading alternatives…")];
  if (!top.length) return [head, facts];
  const rows = top.map(([other, p], i) => bar(other, p, rank === null ? other === text : rank === i + 1, fates?.names[i]));
  if (rank !== null && rank > top.length && prob !== null)
    rows.push(h("div", { class: "exl2nb-tip-gap" }, "⋯"), bar(text, prob, true, fates && ""));
  const left = fates
    ? `${fates.left.toLocaleString("en-US")} of ${fates.of.toLocaleString("en-US")} candidates left after the samplers`
    : "";
  return [head, facts, h("div", { class: "exl2nb-tip-rows" }, ...rows), ...(left ? [h("div", { class: "exl2nb-tip-facts" }, left)] : [])];
}

/** fate: "" = it could be drawn, else the sampler that removed it; undefined = not known. */
function bar(text: string, p: number, chosen: boolean, fate?: string): HTMLElement {
  const row = h(
    "div",
    { class: "exl2nb-tip-row" },
    h("span", { class: "exl2nb-tip-mark" }, chosen ? "▸" : ""),
    h("span", { class: "exl2nb-piece" }, visible(text)),
    h("span", { class: "exl2nb-tip-bar" }, h("i", { style: `inline-size:${Math.max(1, p * 100).toFixed(1)}%` })),
    h("span", { class: "exl2nb-tip-value" }, percent(p)),
    h("span", { class: "exl2nb-tip-fate" }, fate === undefined ? "" : fate ? `removed by ${fate.replaceAll("_", "-")}` : "kept"),
  );
  if (chosen) row.dataset.chosen = "";
  return row;
}

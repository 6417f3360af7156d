// Speculation: an answer with its accepted draft tokens marked, the rejected ones, and the speedup.
import type { SpeculationState } from "../protocol.gen";
import type { State } from "../shared/afm";
import { h, setAttributes, uniqueId } from "../shared/dom";
import { spoken } from "../shared/format";
import { type Roving, roving } from "../shared/roving";
import { snapshot } from "../shared/snapshot";
import { tools, tsv } from "../shared/tools";
import { View, widget } from "../shared/view";
import { describe, figures, type Pass, passes } from "./words";
import "./speculation.css";

class SpeculationView extends View<SpeculationState> {
  private readonly title = h("b");
  private readonly figures = h("dl");
  private readonly strip = h("div", { class: "exl2nb-passes", role: "img" });
  private readonly hist = h("div", { class: "exl2nb-hist", role: "img" });
  private readonly prompt = h("span", { class: "exl2nb-muted" });
  private readonly text = h("span", { class: "exl2nb-tokens", role: "listbox", "aria-label": "Tokens of the answer" });
  private readonly walk: Roving;
  private readonly readout = h("div", { class: "exl2nb-readout" });
  private readonly wrong = h("input", { type: "checkbox", id: uniqueId("wrong"), checked: true });
  private built = "";
  private pieces: HTMLElement[] = [];
  private bars: HTMLElement[] = [];
  private found: Pass[] = [];

  constructor(spec: State<SpeculationState>) {
    super(spec, "speculation", "Speculation");
    this.walk = roving(
      this.text,
      (index) => this.point(index),
      (index) => {
        this.point(index);
        const token = spec.get("_tokens")[index];
        this.spoken.textContent = token ? describe(token) : "";
      },
    );
    this.wrong.addEventListener("change", () => this.root.toggleAttribute("data-hide-wrong", !this.wrong.checked));
    const over = (event: Event) => {
      const bar = event.target instanceof HTMLElement ? event.target.closest<HTMLElement>("[data-pass]") : null;
      this.point(bar ? (this.found[Number(bar.dataset.pass)]?.last ?? -1) : -1);
    };
    this.strip.addEventListener("pointerover", over);
    this.strip.addEventListener("pointerleave", () => this.point(-1));
    const key = h("div", { class: "exl2nb-legend exl2nb-muted" }, ...this.legend());
    const chart = (name: string, note: string, picture: HTMLElement) =>
      h("div", {}, h("div", {}, h("b", {}, name), h("span", { class: "exl2nb-muted" }, ` ${note}`)), picture);
    const charts = h("div", { class: "exl2nb-charts" });
    charts.append(
      chart("Forward passes, in order", "filled: accepted, hollow: rejected", this.strip),
      chart("Accepted per pass", "number of passes", this.hist),
    );
    const body = h("div", { class: "exl2nb-text" }, this.prompt, this.text);
    const taken = tools("speculation", { text: () => this.copied(), picture: () => snapshot(this.root) });
    const names = h("div", { class: "exl2nb-names" }, this.title, taken);
    const head = h("div", { class: "exl2nb-head" }, names, this.figures);
    this.root.append(h("div", { class: "exl2nb-card" }, head, this.error, charts, body, this.readout, key), this.spoken);
    this.begin(["_tokens", "_stats", "_prompt", "title", "error", "height"]);
  }

  private legend(): HTMLElement[] {
    const mark = (source: string, words: string) =>
      h("span", {}, h("span", { class: "exl2nb-token", "data-source": source }, "abc"), ` ${words}`);
    const lost = h("span", {}, h("del", {}, "abc"), " rejected");
    const box = h("label", { for: this.wrong.id }, this.wrong, " show rejected draft tokens");
    return [mark("ngram", "accepted draft token"), mark("target", "the model's own token, ends a pass"), lost, box];
  }

  protected draw(): void {
    const get = this.widget.get;
    this.drawError();
    this.title.textContent = get("title");
    this.prompt.textContent = get("_prompt");
    (this.text.parentElement as HTMLElement).style.maxHeight = String(get("height"));
    const key = JSON.stringify([get("_tokens"), get("_stats")]);
    if (this.built === key) return;
    this.built = key;
    this.found = passes(get("_tokens"));
    this.figures.replaceChildren(
      ...figures(get("_stats")).map(({ name, value, note }) =>
        h("div", { title: note }, h("dt", {}, name), h("dd", {}, value), h("dd", {}, note)),
      ),
    );
    this.drawText();
    this.drawStrip();
    this.drawHist();
    this.point(-1);
  }

  private copied(): string {
    const rows = this.widget
      .get("_tokens")
      .map(([text, , source, , , wrong]) => [text, source === "target" ? "model" : "draft", wrong.join("")]);
    return tsv([["token", "from", "rejected draft tokens"], ...rows]);
  }

  private drawText(): void {
    const tokens = this.widget.get("_tokens");
    const lasts = new Set(this.found.map((pass) => pass.last));
    this.pieces = [];
    const parts: HTMLElement[] = [];
    tokens.forEach((token, i) => {
      const [text, , source, , , wrong] = token;
      const piece = h("span", { role: "option", class: "exl2nb-token", "data-source": source, "aria-selected": "false" });
      if (wrong.length) piece.append(h("del", { "aria-hidden": "true" }, wrong[0] as string));
      piece.append(text);
      if (text.trim() === "") piece.setAttribute("aria-label", spoken(text));
      if (lasts.has(i)) piece.dataset.last = "";
      this.pieces.push(piece);
      parts.push(piece);
    });
    this.text.replaceChildren(...parts);
    this.text.hidden = parts.length === 0;
    this.walk.set(this.pieces, 1);
  }

  private drawStrip(): void {
    const most = Math.max(1, ...this.found.map((pass) => pass.right + pass.wrong));
    this.bars = this.found.map((pass, i) => {
      const bar = h("span", { "data-pass": i, title: `pass ${i + 1}: ${pass.right} accepted, ${pass.wrong} rejected` });
      const part = (name: string, n: number) => {
        const piece = h("i", { class: name });
        piece.style.blockSize = `${(100 * n) / most}%`;
        return piece;
      };
      bar.append(part("exl2nb-wrong", pass.wrong), part("exl2nb-right", pass.right));
      return bar;
    });
    this.strip.replaceChildren(...this.bars);
    const right = this.found.reduce((sum, pass) => sum + pass.right, 0);
    setAttributes(this.strip, { "aria-label": `${this.found.length} passes of the model, ${right} draft tokens accepted` });
  }

  private drawHist(): void {
    const lengths = this.widget.get("_stats").lengths;
    const most = Math.max(1, ...lengths);
    const rows = lengths.map((n, right) => {
      const bar = h("i");
      bar.style.inlineSize = `${(100 * n) / most}%`;
      return h("div", {}, h("span", {}, String(right)), h("span", { class: "exl2nb-track" }, bar), h("span", {}, String(n)));
    });
    this.hist.replaceChildren(...rows);
    setAttributes(this.hist, { "aria-label": lengths.map((n, right) => `${right} accepted: ${n} passes`).join(", ") });
  }

  private point(index: number): void {
    const token = this.widget.get("_tokens")[index];
    const at = this.found.findIndex((pass) => index >= pass.first && index <= pass.last);
    const pass = this.found[at];
    this.pieces.forEach((piece, i) => {
      piece.classList.toggle("exl2nb-on", pass !== undefined && i >= pass.first && i <= pass.last);
      setAttributes(piece, { "aria-selected": String(i === index) });
    });
    this.bars.forEach((bar, i) => {
      bar.classList.toggle("exl2nb-on", i === at);
    });
    this.readout.textContent = token ? describe(token) : "Hover a token to see its forward pass; the arrow keys move along the text.";
  }
}

export default widget(SpeculationView, false);

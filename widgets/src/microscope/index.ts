// SamplerMicroscope: choose a place of the answer, move the samplers' settings, see what survives each of them and what is drawn.
import type { MicroscopeState } from "../protocol.gen";
import type { State } from "../shared/afm";
import { Asker } from "../shared/asker";
import { h, setAttributes } from "../shared/dom";
import { percent, spoken, visible } from "../shared/format";
import { type Roving, roving } from "../shared/roving";
import { snapshot } from "../shared/snapshot";
import { tools, tsv } from "../shared/tools";
import { View, widget } from "../shared/view";
import { Controls } from "./controls";
import { chainTable, LineView } from "./table";
import "./microscope.css";

const WATCHED: (keyof MicroscopeState)[] = [
  ...(["status", "error", "at", "settings", "token", "token_text", "prob", "uniform", "seed"] as const),
  ...(["_answer", "_steps", "_tokens", "_line", "_others", "_prompt"] as const),
];
interface Wish {
  at: number;
  settings: Record<string, number>;
}

class MicroscopeView extends View<MicroscopeState> {
  private readonly prompt = h("span", { class: "exl2nb-muted" });
  private readonly answer = h("div", {
    class: "exl2nb-answer",
    role: "listbox",
    "aria-label": "Tokens of the answer: choose one to inspect",
  });
  private readonly walk: Roving;
  private readonly controls: Controls;
  private readonly others = h("div", { class: "exl2nb-muted exl2nb-others" });
  private readonly scroll = h("div", { class: "exl2nb-scroll", role: "region", tabindex: 0, "aria-label": "What each step leaves" });
  private readonly line = new LineView();
  private readonly drawn = h("div", { class: "exl2nb-drawn" });
  private readonly notes = h("dl");
  private readonly asker: Asker<Wish>;
  private built = "";
  private pieces: HTMLElement[] = [];
  private pending: Record<string, number> = {};
  private wished: Record<string, number> = {}; // what the sliders show until the kernel has answered

  constructor(scope: State<MicroscopeState>) {
    super(scope, "microscope", "Sampler microscope");
    this.asker = new Asker<Wish>((wish) => {
      this.pending = {};
      scope.send({ type: "sample", ...wish });
    });
    this.controls = new Controls(scope.get("_samplers"), (name, value) => this.wish(name, value), scope.get("_static"));
    this.walk = roving(
      this.answer,
      () => {},
      (at) => this.go(at),
    );
    const taken = tools("microscope", { text: () => this.text(), picture: () => snapshot(this.root) });
    const text = h("div", { class: "exl2nb-text" }, taken, this.prompt, this.answer);
    const notes = h("details", {}, h("summary", {}, "What the steps do"), this.notes);
    this.root.append(
      h(
        "div",
        { class: "exl2nb-card" },
        text,
        this.controls.element,
        this.others,
        this.error,
        this.scroll,
        this.line.element,
        this.drawn,
        notes,
      ),
      this.spoken,
    );
    this.begin(
      WATCHED,
      scope.observe(["_steps", "error"], () => this.asker.answered()),
      () => this.asker.close(),
    );
  }

  private wish(name: string, value: number): void {
    this.pending[name] = this.wished[name] = value;
    this.frame.request();
    this.asker.want({ at: this.widget.get("at"), settings: { ...this.pending } });
  }

  private go(at: number): void {
    if (this.widget.get("_static") || at === this.widget.get("at")) return;
    this.asker.want({ at, settings: {} });
  }

  protected draw(): void {
    const get = this.widget.get;
    this.drawError();
    this.drawText();
    const settings = get("settings") as Record<string, number>;
    for (const [name, value] of Object.entries(this.wished))
      if (get("error") !== "" || String(name === "seed" ? get("seed") : settings[name]) === String(value)) delete this.wished[name];
    this.controls.draw({ ...settings, ...this.wished }, get("seed"));
    this.others.textContent = get("_others") ? `also: ${get("_others")}` : "";
    this.others.hidden = !get("_others");
    const left = this.scroll.scrollLeft;
    this.scroll.replaceChildren(chainTable(get("_steps"), get("_tokens"), get("token"), get("_vocab")));
    this.scroll.scrollLeft = left;
    this.line.draw(get("_line"), get("token"), get("uniform"));
    this.drawDrawn();
    this.notes.replaceChildren(
      ...get("_steps").flatMap(({ name }) => [h("dt", {}, name.replace(/_/g, " ")), h("dd", {}, get("_about")[name] ?? "")]),
    );
  }

  private text(): string {
    const steps = this.widget.get("_steps");
    const rows = this.widget.get("_tokens").map(([_id, text], row) => [text, ...steps.map((step) => step.probs[row] ?? null)]);
    return tsv([["token", ...steps.map((step) => step.name)], ...rows]);
  }

  private drawText(): void {
    const get = this.widget.get;
    const [answer, at] = [get("_answer"), get("at")];
    this.prompt.textContent = get("_prompt");
    const key = JSON.stringify(answer);
    if (this.built !== key) {
      this.built = key;
      const last = at === answer.length ? [h("span", { role: "option", class: "exl2nb-piece", "aria-label": "the next token" }, "▏")] : [];
      this.pieces = [
        ...answer.map(([id, text]) => {
          const name = text.trim() === "" ? spoken(text) : undefined; // white space alone would have none
          return h("span", { role: "option", class: "exl2nb-piece", title: `id ${id}`, "aria-label": name }, text || "∅");
        }),
        ...last,
      ];
      this.answer.replaceChildren(...this.pieces);
      this.walk.set(this.pieces, 1);
    }
    this.answer.hidden = answer.length === 0;
    this.pieces.forEach((piece, i) => {
      setAttributes(piece, { "aria-selected": String(i === at) });
      piece.classList.toggle("exl2nb-later", i > at);
    });
    this.walk.move(at);
  }

  private drawDrawn(): void {
    const get = this.widget.get;
    const [uniform, has] = [get("uniform"), get("_answer")[get("at")]];
    const how =
      uniform === null
        ? "greedy: the most likely token"
        : `random number ${uniform.toFixed(4)} (draw ${get("_index")} of seed ${get("seed")})`;
    const words = [how, " selects ", h("code", {}, visible(get("token_text"))), ` (${percent(get("prob"))})`];
    const beside = has ? (has[0] === get("token") ? ", as in the text" : `; the text has ${visible(has[1])}`) : "";
    this.drawn.replaceChildren(...words, beside);
    if (this.spoken.textContent !== this.drawn.textContent) this.spoken.textContent = this.drawn.textContent;
  }
}

export default widget(MicroscopeView);

// BitMap: heat map of bits, metric buttons, and the strip of the chosen cell. Recolouring asks the kernel for nothing.
import type { AnyModel } from "@anywidget/types";
import type { BitMapState } from "../protocol.gen";
import { type State, state } from "../shared/afm";
import { BitGridView, type Place } from "../shared/bitgrid";
import { guardKeys, h, root, setAttributes } from "../shared/dom";
import { perFrame } from "../shared/frame";
import { ColourBar } from "../shared/legend";
import { mapSvg } from "../shared/mapsvg";
import { type Metric, NAMES, painter } from "../shared/metrics";
import { strip } from "../shared/strip";
import { tools, tsv } from "../shared/tools";
import "./bitmap.css";

class BitMapView {
  readonly root = root("bitmap", "Bit map");
  private readonly title = h("b");
  private readonly choice = h("div", { class: "exl2nb-choice", role: "group", "aria-label": "Colour by" });
  private readonly grid: BitGridView;
  private readonly scroll: HTMLElement;
  private readonly line = h("div", { class: "exl2nb-readout exl2nb-muted" });
  private readonly bar = new ColourBar();
  private readonly spoken = h("div", { class: "exl2nb-sr", role: "status" });
  private readonly detail = h("div");
  private readonly error = h("div", { class: "exl2nb-error", role: "alert", hidden: true });
  private readonly frame = perFrame(() => this.draw());
  private readonly undo: (() => void)[];
  private built: unknown = null;
  private pointed = -1;

  constructor(private readonly map: State<BitMapState>) {
    this.grid = new BitGridView(
      (place) => this.select(place),
      (index) => this.readout(index),
    );
    this.scroll = h("div", { class: "exl2nb-grid-scroll" }, this.grid.element);
    const taken = tools("bitmap", { text: () => this.text(), picture: () => this.picture() });
    const head = h("div", { class: "exl2nb-head" }, this.title, h("div", { class: "exl2nb-right" }, this.choice, taken));
    const under = h("div", { class: "exl2nb-under" }, this.bar.element, this.line);
    this.root.append(h("div", { class: "exl2nb-card" }, head, this.error, this.scroll, under, this.detail), this.spoken);
    this.undo = [
      guardKeys(this.root),
      map.observe(["_cells", "_other", "title", "metric", "selected", "error", "height"], () => this.frame.request()),
    ];
    this.draw();
  }

  close(): void {
    for (const undo of this.undo) undo();
    this.frame.cancel();
    this.root.remove();
  }

  private draw(): void {
    const get = this.map.get;
    const cells = get("_cells");
    if (this.built !== cells) {
      this.built = cells;
      this.grid.build(
        get("_matrices"),
        get("_layers"),
        cells.map(([layer, matrix]) => ({ layer, matrix })),
      );
    }
    const against = get("_other_title");
    this.title.textContent = [get("title"), against && get("metric") === "difference" ? `minus ${against}` : ""].filter(Boolean).join(" ");
    this.scroll.style.maxHeight = String(get("height"));
    this.drawChoice();
    this.grid.paint(painter(cells, get("metric"), get("_other")));
    this.bar.draw(cells, get("metric"));
    const [layer, matrix] = get("selected") as [number?, string?];
    const chosen = cells.find((cell) => cell[0] === layer && cell[1] === matrix);
    this.grid.mark(chosen ? { layer: chosen[0], matrix: chosen[1] } : null);
    this.detail.replaceChildren(...(chosen ? [strip(chosen)] : []));
    this.error.textContent = get("error");
    this.error.hidden = get("error") === "";
    this.readout(this.pointed);
  }

  private drawChoice(): void {
    const metrics = this.map.get("_metrics") as Metric[];
    this.choice.hidden = metrics.length < 2;
    if (this.choice.childElementCount !== metrics.length) {
      const buttons = metrics.map((metric) => {
        const button = h("button", { type: "button", class: "exl2nb-button" }, NAMES[metric]);
        button.addEventListener("click", () => {
          this.map.set("metric", metric);
          this.map.save();
          this.frame.request();
        });
        return button;
      });
      this.choice.replaceChildren(...buttons);
    }
    metrics.forEach((metric, i) => {
      setAttributes(this.choice.children[i] as Element, { "aria-pressed": String(metric === this.map.get("metric")) });
    });
  }

  private select(place: Place | null): void {
    this.map.set("selected", place ? [place.layer, place.matrix] : []);
    this.map.save();
    this.frame.request();
    this.spoken.textContent = place ? `Groups of layer ${place.layer} ${place.matrix} below the map` : "";
  }

  private readout(index: number): void {
    this.pointed = index;
    const get = this.map.get;
    this.line.textContent = get("_cells")[index] ? painter(get("_cells"), get("metric"), get("_other"))(index).label : "";
  }

  private text(): string {
    const rows = this.map
      .get("_cells")
      .map(([layer, matrix, bpw, nbytes, , , , , error, share]) => [layer, matrix, bpw, nbytes, error, share]);
    return tsv([["layer", "matrix", "bits per weight", "bytes", "error", "share of KL"], ...rows]);
  }

  private picture(): string {
    const get = this.map.get;
    const cells = get("_cells");
    const places = cells.map(([layer, matrix]) => ({ layer, matrix }));
    const title = [this.title.textContent, NAMES[get("metric")]].filter(Boolean).join(": ");
    return mapSvg(title, get("_matrices"), get("_layers"), places, painter(cells, get("metric"), get("_other")));
  }
}

export default {
  render({ model, el }: { model: AnyModel; el: HTMLElement }) {
    const view = new BitMapView(state<BitMapState>(model));
    el.append(view.root);
    return () => view.close();
  },
};

// BitMap: heat map of bits, metric buttons, and the strip of the chosen cell. Recolouring asks the kernel for nothing.
import type { BitMapState } from "../protocol.gen";
import type { State } from "../shared/afm";
import { BitGridView, type Place } from "../shared/bitgrid";
import { h, setAttributes } from "../shared/dom";
import { ColourBar } from "../shared/legend";
import { mapSvg } from "../shared/mapsvg";
import { type Metric, NAMES, painter } from "../shared/metrics";
import { strip } from "../shared/strip";
import { tools, tsv } from "../shared/tools";
import { View, widget } from "../shared/view";
import "./bitmap.css";

class BitMapView extends View<BitMapState> {
  private readonly title = h("b");
  private readonly choice = h("div", { class: "exl2nb-choice", role: "group", "aria-label": "Colour by" });
  private readonly grid: BitGridView;
  private readonly scroll: HTMLElement;
  private readonly line = h("div", { class: "exl2nb-readout exl2nb-muted" });
  private readonly bar = new ColourBar();
  private readonly detail = h("div");
  private built: unknown = null;
  private pointed = -1;

  constructor(map: State<BitMapState>) {
    super(map, "bitmap", "Bit map");
    this.grid = new BitGridView(
      (place) => this.select(place),
      (index) => this.readout(index),
    );
    this.scroll = h("div", { class: "exl2nb-grid-scroll" }, this.grid.element);
    const taken = tools("bitmap", { text: () => this.text(), picture: () => this.picture() });
    const head = h("div", { class: "exl2nb-head" }, this.title, h("div", { class: "exl2nb-right" }, this.choice, taken));
    const under = h("div", { class: "exl2nb-under" }, this.bar.element, this.line);
    this.root.append(h("div", { class: "exl2nb-card" }, head, this.error, this.scroll, under, this.detail), this.spoken);
    this.begin(["_cells", "_other", "title", "metric", "selected", "error", "height"]);
  }

  protected draw(): void {
    const get = this.widget.get;
    const cells = get("_cells");
    if (this.built !== cells) {
      this.built = cells;
      this.grid.build(get("_matrices"), get("_layers"), cells);
    }
    const against = get("_other_title");
    this.title.textContent = [get("title"), against && get("metric") === "difference" ? `minus ${against}` : ""].filter(Boolean).join(" ");
    this.scroll.style.maxHeight = String(get("height"));
    this.drawChoice();
    this.grid.paint(painter(cells, get("metric"), get("_other")));
    this.bar.draw(cells, get("metric"));
    const [layer, matrix] = get("selected") as [number?, string?];
    const chosen = cells.find((cell) => cell.layer === layer && cell.matrix === matrix);
    this.grid.mark(chosen ?? null);
    this.detail.replaceChildren(...(chosen ? [strip(chosen)] : []));
    this.drawError();
    this.readout(this.pointed);
  }

  private drawChoice(): void {
    const metrics = this.widget.get("_metrics") as Metric[];
    this.choice.hidden = metrics.length < 2;
    if (this.choice.childElementCount !== metrics.length) {
      const buttons = metrics.map((metric) => {
        const button = h("button", { type: "button", class: "exl2nb-button" }, NAMES[metric]);
        button.addEventListener("click", () => {
          this.widget.set("metric", metric);
          this.widget.save();
          this.frame.request();
        });
        return button;
      });
      this.choice.replaceChildren(...buttons);
    }
    metrics.forEach((metric, i) => {
      setAttributes(this.choice.children[i] as Element, { "aria-pressed": String(metric === this.widget.get("metric")) });
    });
  }

  private select(place: Place | null): void {
    this.widget.set("selected", place ? [place.layer, place.matrix] : []);
    this.widget.save();
    this.frame.request();
    this.spoken.textContent = place ? `Groups of layer ${place.layer} ${place.matrix} below the map` : "";
  }

  private readout(index: number): void {
    this.pointed = index;
    const get = this.widget.get;
    this.line.textContent = get("_cells")[index] ? painter(get("_cells"), get("metric"), get("_other"))(index).label : "";
  }

  private text(): string {
    const rows = this.widget
      .get("_cells")
      .map(({ layer, matrix, bpw, nbytes, error, share }) => [layer, matrix, bpw, nbytes, error, share]);
    return tsv([["layer", "matrix", "bits per weight", "bytes", "error", "share of KL"], ...rows]);
  }

  private picture(): string {
    const get = this.widget.get;
    const cells = get("_cells");
    const title = [this.title.textContent, NAMES[get("metric")]].filter(Boolean).join(": ");
    return mapSvg(title, get("_matrices"), get("_layers"), cells, painter(cells, get("metric"), get("_other")));
  }
}

export default widget(BitMapView, false);

// How the numbers of a cell become a colour and words, per metric. Pure, so the tests read it without a browser.
import type { BitCell } from "../protocol.gen";
import type { Paint } from "./bitgrid";
import { colour, diverging, shade } from "./palette";

export type Metric = "bpw" | "error" | "share" | "difference";

export const NAMES: Record<Metric, string> = { bpw: "bits", error: "error", share: "share of KL", difference: "difference" };

export const EXPLAINED: Record<Metric, string> = {
  bpw: "bits per weight",
  error: "rounding error, log scale",
  share: "share of the predicted KL",
  difference: "bits per weight, difference",
};

/** A painter for all cells at once: scales depend on the extremes. `bits` replaces what the cells say, where given. */
export function painter(cells: BitCell[], metric: Metric, other: (number | null)[] = [], bits?: number[]): (index: number) => Paint {
  const errors = cells.map((cell) => cell.error).filter((value): value is number => value !== null && value > 0);
  const [low, high] = [Math.log(Math.min(...errors)), Math.log(Math.max(...errors))];
  const most = Math.max(1e-12, ...cells.map((cell) => cell.share ?? 0));
  return (index) => {
    const { layer, matrix, error, share, ...cell } = cells[index] as BitCell;
    const bpw = bits?.[index] ?? cell.bpw;
    const where = layer < 0 ? matrix : `layer ${layer} ${matrix}`;
    const said = (text: string) => `${where}: ${text}`;
    if (metric === "error") {
      if (error === null) return { text: "", colour: null, label: said("error not known") };
      const height = error > 0 && high > low ? (Math.log(error) - low) / (high - low) : 0;
      return {
        text: error >= 1000 ? error.toExponential(0) : error.toPrecision(2),
        colour: shade(height),
        label: said(`error ${error.toPrecision(3)}`),
      };
    }
    if (metric === "share") {
      if (share === null) return { text: "", colour: null, label: said("share not known") };
      return {
        text: (100 * share).toFixed(1),
        colour: shade(share / most),
        label: said(`${(100 * share).toFixed(2)} % of the predicted KL`),
      };
    }
    if (metric === "difference") {
      const than = other[index] ?? null;
      if (than === null) return { text: "", colour: null, label: said("not in the other") };
      const more = bpw - than;
      const text = more === 0 ? "0" : `${more > 0 ? "+" : "−"}${Math.abs(more).toFixed(1)}`;
      return { text, colour: diverging(more), label: said(`${text} bits, ${bpw.toFixed(2)} against ${than.toFixed(2)}`) };
    }
    return { text: bpw.toFixed(1), colour: colour(bpw), label: said(`${bpw.toFixed(2)} bits per weight`) };
  };
}

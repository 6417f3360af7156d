// The maps of OutlierMap as they travel: bytes on a logarithmic scale. Pure.
import type { OutlierResult } from "../protocol.gen";

export class Ranges {
  private readonly codes: Uint8Array;

  constructor(
    private readonly result: OutlierResult,
    private readonly point: number,
    side: number,
    private readonly weights = false,
  ) {
    const text = (weights ? result.weights : result.activations)[point]?.[side] ?? "";
    this.codes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  }

  /** Place on the scale, 0 to 1; -1 where nothing is. */
  share(layer: number, bin: number): number {
    const code = this.codes[layer * (this.result.bins[this.point] ?? 0) + bin] ?? 0;
    return code ? code / 255 : -1;
  }

  value(layer: number, bin: number): number | null {
    const share = this.share(layer, bin);
    return share < 0 ? null : this.at(share);
  }

  /** What a place on the scale means. */
  at(share: number): number {
    const { lows, spans, weight_lows, weight_spans } = this.result;
    const [low, span] = this.weights ? [weight_lows, weight_spans] : [lows, spans];
    return (low[this.point] ?? 1) * 10 ** (share * (span[this.point] ?? 0));
  }
}

/** First channel of a column of the map. */
export function channelOf(bin: number, bins: number, channels: number): number {
  return Math.ceil((bin * channels) / Math.max(1, bins));
}

export function binOf(channel: number, bins: number, channels: number): number {
  return Math.floor((channel * bins) / Math.max(1, channels));
}

export function number(value: number | null): string {
  if (value === null) return "none";
  return Math.abs(value) >= 1000 ? value.toFixed(0) : value.toPrecision(3);
}

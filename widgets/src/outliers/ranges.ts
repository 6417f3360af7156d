// The maps of OutlierMap as they travel: bytes on a logarithmic scale. Pure.
import type { OutlierResult } from "../protocol.gen";
import { bytesOf } from "../shared/heatmap";

export class Ranges {
  private readonly codes: Uint8Array;
  private readonly bins: number;

  constructor(
    private readonly result: OutlierResult,
    private readonly point: number,
    side: number,
    private readonly weights = false,
  ) {
    this.codes = bytesOf((weights ? result.weights : result.activations)[point]?.[side] ?? "");
    this.bins = result.bins[point] ?? 0;
  }

  /** Place on the scale, 1 to 255; 0 where nothing is. */
  code(layer: number, bin: number): number {
    return this.codes[layer * this.bins + bin] ?? 0;
  }

  value(layer: number, bin: number): number | null {
    const code = this.code(layer, bin);
    return code ? this.at(code / 255) : null;
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

// Attention patterns as they travel: base64 of heads x size x size bytes, the byte of a share p is 255 sqrt(p). Pure.
import type { Patterns } from "../protocol.gen";
import { bytesOf } from "../shared/heatmap";

export class Pattern {
  constructor(
    readonly size: number,
    private readonly bytes: Uint8Array,
    private readonly offset = 0,
    /** Rows that have been read so far. */
    readonly rows = size,
  ) {}

  /** Attention of a query (row) to a key (column), 0 to 1. */
  share(query: number, key: number): number {
    return (this.byte(query, key) / 255) ** 2;
  }

  /** The same as it travelled, 0 to 255: its square root. */
  byte(query: number, key: number): number {
    return this.bytes[this.offset + query * this.size + key] ?? 0;
  }
}

/** The heads of each model. */
export function unpacked({ size, rows, data }: Patterns): Pattern[][] {
  return data.map((text, model) => {
    const bytes = bytesOf(text);
    const heads = size ? Math.floor(bytes.length / (size * size)) : 0;
    return Array.from({ length: heads }, (_, head) => new Pattern(size, bytes, head * size * size, rows?.[model] ?? size));
  });
}

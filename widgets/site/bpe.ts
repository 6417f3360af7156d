// Byte-level BPE of a tokenizer.json, for the page that runs a model by itself: the kinds that the demo model uses, anything else is refused.
// The kernel's tokenizer is the measure: tests/site/test_browser.py compares ids and texts.

interface TokenizerFile {
  normalizer: unknown;
  pre_tokenizer: { type: string; add_prefix_space?: boolean; use_regex?: boolean } | null;
  post_processor: { type: string; single?: { SpecialToken?: { id: string }; Sequence?: object }[] } | null;
  model: {
    type: string;
    vocab: Record<string, number>;
    merges: ([string, string] | string)[];
    byte_fallback?: boolean;
    dropout?: number | null;
  };
  added_tokens: { id: number; content: string; special: boolean }[];
}

const WORDS = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu;

/** The character that stands for each byte: printable ones for themselves, the others from U+0100 on. */
function characters(): string[] {
  const plain = (byte: number) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || (byte >= 174 && byte <= 255);
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(plain(byte) ? byte : next++));
}

export class Tokenizer {
  private readonly vocab: Map<string, number>;
  private readonly ranks = new Map<string, number>();
  private readonly pieces: string[] = [];
  private readonly special = new Set<number>();
  private readonly start: number[] = [];
  private readonly ofByte = characters();
  private readonly toByte = new Map(this.ofByte.map((character, byte) => [character, byte]));
  private readonly known = new Map<string, number[]>();

  constructor(file: TokenizerFile) {
    const { model, pre_tokenizer: before } = file;
    if (model.type !== "BPE" || model.byte_fallback || file.normalizer || before?.type !== "ByteLevel" || before.add_prefix_space)
      throw new Error(`tokenizer of type ${model.type} with ${before?.type ?? "no"} pre-tokenizer; expected byte-level BPE`);
    this.vocab = new Map(Object.entries(model.vocab));
    for (const [piece, id] of this.vocab) this.pieces[id] = piece;
    model.merges.forEach((merge, rank) => {
      this.ranks.set(typeof merge === "string" ? merge : merge.join(" "), rank);
    });
    for (const { id, special } of file.added_tokens) if (special) this.special.add(id);
    for (const part of file.post_processor?.single ?? []) {
      if (!part.SpecialToken) break; // what comes before the text
      const id = this.vocab.get(part.SpecialToken.id) ?? file.added_tokens.find((token) => token.content === part.SpecialToken?.id)?.id;
      if (id !== undefined) this.start.push(id);
    }
  }

  /** Ids of a text, after the tokens that every text begins with. */
  encode(text: string): number[] {
    const ids = [...this.start];
    for (const word of text.match(WORDS) ?? []) ids.push(...this.word(word));
    return ids;
  }

  /** The bytes of a token; none of a special one. */
  bytes(id: number): Uint8Array {
    if (this.special.has(id)) return new Uint8Array();
    return Uint8Array.from(this.pieces[id] ?? "", (character) => this.toByte.get(character) ?? 63);
  }

  /** A token as text by itself, for lists of alternatives. */
  text(id: number): string {
    return this.special.has(id) ? (this.pieces[id] ?? "") : new TextDecoder().decode(this.bytes(id));
  }

  private word(word: string): number[] {
    const found = this.known.get(word);
    if (found) return found;
    let parts = Array.from(new TextEncoder().encode(word), (byte) => this.ofByte[byte] ?? "");
    for (;;) {
      let best = Number.POSITIVE_INFINITY;
      let left = "";
      let right = "";
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.ranks.get(`${parts[i]} ${parts[i + 1]}`) ?? Number.POSITIVE_INFINITY;
        if (rank < best) [best, left, right] = [rank, parts[i] ?? "", parts[i + 1] ?? ""];
      }
      if (best === Number.POSITIVE_INFINITY) break;
      const merged: string[] = [];
      for (let i = 0; i < parts.length; i++) {
        if (parts[i] === left && parts[i + 1] === right) {
          merged.push(left + right);
          i++;
        } else merged.push(parts[i] ?? "");
      }
      parts = merged;
    }
    const ids = parts.map((part) => {
      const id = this.vocab.get(part);
      if (id === undefined) throw new Error(`no token for ${JSON.stringify(part)}`);
      return id;
    });
    this.known.set(word, ids);
    return ids;
  }
}

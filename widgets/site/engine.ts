// The CPU engine as WebAssembly (csrc/wasm/engine.cpp): one model, one sequence.

interface Exports {
  memory: WebAssembly.Memory;
  _initialize(): void;
  reserve(bytes: number): number;
  open_model(): number;
  vocab(): number;
  context(): number;
  ids(): number;
  logits(): number;
  step(count: number, position: number): number;
  probabilities(temperature: number, topK: number, topP: number, minP: number): number;
  draw_token(temperature: number, topK: number, topP: number, minP: number, uniform: number, top: number): number;
}

export interface Settings {
  temperature: number;
  top_k: number;
  top_p: number;
  min_p: number;
}

/** rank: 1 = the most probable; logprob and top are of the raw row. */
export interface Drawn {
  id: number;
  logprob: number;
  rank: number;
  top: [id: number, logprob: number][];
}

const UNDRAWABLE = "nothing can be drawn with these settings";
const CHUNK = 64; // tokens of a prompt that are read at once

export class Engine {
  readonly context: number;
  private readonly vocab: number;

  private constructor(private readonly code: Exports) {
    this.context = code.context();
    this.vocab = code.vocab();
  }

  /** Throws where the file is no model for this engine. */
  static async open(wasm: BufferSource, file: Uint8Array): Promise<Engine> {
    const refuse = () => 8; // WASI's "bad file": the engine writes nothing
    const imports = { wasi_snapshot_preview1: { fd_close: refuse, fd_seek: refuse, fd_write: refuse } };
    const { instance } = await WebAssembly.instantiate(wasm, imports);
    const code = instance.exports as unknown as Exports;
    code._initialize();
    const at = code.reserve(file.length);
    new Uint8Array(code.memory.buffer, at, file.length).set(file);
    check(code, code.open_model());
    return new Engine(code);
  }

  /** Read tokens that follow `position` earlier ones. */
  read(ids: number[], position: number): void {
    for (let done = 0; done < ids.length; done += CHUNK) {
      const part = ids.slice(done, done + CHUNK);
      if (position + done + part.length > this.context) throw new Error("the context is full");
      new Int32Array(this.code.memory.buffer, this.code.ids(), part.length).set(part);
      check(this.code, this.code.step(part.length, position + done));
    }
  }

  /** The raw logits after the last token; valid until the next `read`. What is written here is drawn from. */
  logits(): Float32Array {
    return new Float32Array(this.code.memory.buffer, this.code.logits(), this.vocab);
  }

  /** For each token the probability that the settings leave it, -1 if they remove it. */
  probabilities({ temperature, top_k, top_p, min_p }: Settings): Float64Array {
    const at = this.code.probabilities(temperature, top_k, top_p, min_p);
    if (!at) throw new Error(UNDRAWABLE);
    return new Float64Array(this.code.memory.buffer, at, this.vocab).slice();
  }

  /** Draw with the same bits as the native engine; uniform in [0, 1). */
  draw({ temperature, top_k, top_p, min_p }: Settings, uniform: number, top: number): Drawn {
    const at = this.code.draw_token(temperature, top_k, top_p, min_p, uniform, top);
    if (!at) throw new Error(UNDRAWABLE);
    const [id = 0, logprob = 0, rank = 0, , ...rest] = new Float64Array(this.code.memory.buffer, at, 4 + 2 * top);
    return { id, logprob, rank, top: Array.from({ length: top }, (_, i) => [rest[2 * i] ?? 0, rest[2 * i + 1] ?? 0]) };
  }
}

function check(code: Exports, message: number): void {
  if (!message) return;
  const bytes = new Uint8Array(code.memory.buffer, message);
  throw new Error(new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0))));
}

const MASK = (1n << 64n) - 1n;

function mix(value: bigint): bigint {
  let z = value;
  z = ((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  z = ((z ^ (z >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return z ^ (z >> 31n);
}

/** Number `index` of the stream `seed`, in [0, 1): exl2nb/sampling/draw.py. */
export function uniform(seed: number, index: number): number {
  const mixed = mix(BigInt(seed) & MASK) + BigInt(index + 1) * 0x9e3779b97f4a7c15n;
  return Number(mix(mixed & MASK) >> 11n) * 2 ** -53;
}

// The kernel's part of a Playground or a SamplerMicroscope, in the page: fetches engine, model and tokenizer when they are first needed.
import type { MicroscopeState, PlaygroundState, TokenItem } from "../src/protocol.gen";
import { Tokenizer } from "./bpe";
import { Engine, uniform } from "./engine";
import { explain } from "./explain";

interface Page<State = PlaygroundState> {
  widget: "playground" | "microscope";
  esm: string;
  state: State;
  files: { engine: string; model: string; tokenizer: string };
  eos: number[];
}
type Message = { type: string; prompt?: string; settings?: Record<string, number | boolean | null>; run?: number; at?: number };
interface Loaded {
  engine: Engine;
  tokenizer: Tokenizer;
}

const SUPPORTED = new Set(["max_tokens", "temperature", "top_k", "top_p", "min_p", "seed"]);
const TOP = 5;

/** The model of anywidget's contract over plain values, and what arrives from the widget. */
class Host {
  private readonly listeners = new Map<string, Set<(message?: unknown) => void>>();
  constructor(
    private readonly values: Record<string, unknown>,
    private readonly receive: (message: Message) => void,
  ) {}
  get = (name: string) => this.values[name];
  set = (name: string, value: unknown) => {
    this.values[name] = value;
    for (const listener of this.listeners.get(`change:${name}`) ?? []) listener();
  };
  put(changes: Record<string, unknown>): void {
    for (const [name, value] of Object.entries(changes)) this.set(name, value);
  }
  save_changes = () => {};
  send = (message: Message) => queueMicrotask(() => this.receive(message));
  on = (name: string, listener: () => void) => {
    if (!this.listeners.has(name)) this.listeners.set(name, new Set());
    this.listeners.get(name)?.add(listener);
  };
  off = (name: string, listener: () => void) => this.listeners.get(name)?.delete(listener);
  deliver(message: object): void {
    for (const listener of this.listeners.get("msg:custom") ?? []) listener(message);
  }
}

/** Lets the page draw and take clicks before the next token. */
function breath(): Promise<void> {
  return new Promise((done) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      done();
    };
    port2.postMessage(0);
  });
}

async function fetched(url: string, progress: (share: number) => void): Promise<Uint8Array> {
  const response = await fetch(url);
  if (!response.ok || !response.body) throw new Error(`${url}: ${response.status} ${response.statusText}`);
  const total = Number(response.headers.get("Content-Length")) || 0;
  const parts: Uint8Array[] = [];
  let size = 0;
  const reader = response.body.getReader();
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
    parts.push(piece.value);
    size += piece.value.length;
    if (total) progress(Math.min(1, size / total));
  }
  const whole = new Uint8Array(size);
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

async function load({ files }: Pick<Page, "files">, progress: (share: number) => void): Promise<Loaded> {
  const [wasm, file, words] = await Promise.all([
    fetched(files.engine, () => {}),
    fetched(files.model, progress),
    fetched(files.tokenizer, () => {}),
  ]);
  return {
    engine: await Engine.open(wasm as BufferSource, file),
    tokenizer: new Tokenizer(JSON.parse(new TextDecoder().decode(words))),
  };
}

export { Engine, explain, Tokenizer, uniform }; // for the tests

/** Draws again with other settings, at any place of the answer: the rows of logits are computed here, once. */
class MicroscopeKernel {
  private rows: Promise<Loaded & { logits: Float32Array[] }> | undefined;
  readonly host: Host;

  constructor(private readonly page: Page<MicroscopeState>) {
    this.host = new Host({ ...page.state }, (message) => void this.receive(message));
  }

  private async receive(message: Message): Promise<void> {
    if (message.type === "ping") this.host.deliver({ type: "pong" });
    if (message.type !== "sample") return;
    const { host } = this;
    try {
      const changed = { ...(host.get("settings") as Record<string, number>), ...message.settings } as Record<string, number>;
      const { seed: typed, ...settings } = changed;
      const other = Object.entries(settings).find(([name, value]) => !SUPPORTED.has(name) && value !== this.page.state.settings[name]);
      if (other) throw new Error(`${other[0]} works in the notebook; in this page: temperature, top_k, top_p, min_p and the seed`);
      const seed = Number(typed ?? host.get("seed"));
      this.rows ??= this.compute().catch((problem) => {
        this.rows = undefined; // the next click tries again
        throw problem;
      });
      const { engine, tokenizer, logits } = await this.rows;
      const at = Math.min(Math.max(message.at ?? 0, 0), logits.length - 1);
      const { temperature = 1, top_k = 0, top_p = 1, min_p = 0 } = settings;
      engine.logits().set(logits[at] as Float32Array);
      const found = explain(engine, { temperature, top_k, top_p, min_p }, seed, at, (id) => tokenizer.text(id));
      host.put({
        ...{ at, error: "", status: "idle", settings, seed: String(seed), _index: at, uniform: found.uniform },
        ...{ token: found.token, token_text: tokenizer.text(found.token), prob: found.prob },
        ...{ _steps: found.steps, _tokens: found.tokens, _line: found.line },
      });
    } catch (problem) {
      host.put({ status: "error", error: problem instanceof Error ? problem.message : String(problem) });
    }
  }

  private async compute(): Promise<Loaded & { logits: Float32Array[] }> {
    const { engine, tokenizer } = await load(this.page, () => {});
    const before = tokenizer.encode(this.page.state._prompt);
    const answer = this.page.state._answer.map(([id]) => id);
    engine.read(before, 0);
    const logits = [engine.logits().slice()];
    for (let i = 0; i + 1 < answer.length; i++) {
      engine.read([answer[i] as number], before.length + i);
      logits.push(engine.logits().slice());
    }
    return { engine, tokenizer, logits };
  }
}

class Kernel {
  private loaded: Promise<Loaded> | undefined;
  private run = 0;
  private stopped = false;
  private items: TokenItem[] = [];
  private tops: [string, number][][] = [];
  private prompt = "";
  private stats = { n: 0, tps: 0, ttft_s: null as number | null };
  readonly host: Host;

  constructor(private readonly page: Page) {
    this.host = new Host({ ...page.state }, (message) => void this.receive(message));
  }

  private async receive(message: Message): Promise<void> {
    if (message.type === "generate") await this.generate(message.prompt ?? "", message.settings ?? {});
    else if (message.type === "stop") this.stopped = true;
    else if (message.type === "ping") this.host.deliver({ type: "pong" });
    else if (message.type === "look_at" && message.run === this.run)
      this.host.deliver({ type: "tops", run: this.run, at: message.at, top: this.tops[message.at ?? 0] ?? [] });
    else if (message.type === "resync" && this.run > 0) this.snapshot();
  }

  private snapshot(): void {
    const { run, prompt, items, stats } = this;
    this.host.deliver({ type: "snapshot", run, seq: items.length - 1, prompt, items: [...items], stats });
  }

  private load(): Promise<Loaded> {
    const label = this.page.state._model_label;
    const show = (share: number) => this.host.set("_model_label", `loading the model: ${Math.round(100 * share)} %`);
    this.loaded ??= load(this.page, show)
      .catch((problem) => {
        this.loaded = undefined; // the next click tries again
        throw problem;
      })
      .finally(() => this.host.set("_model_label", label));
    return this.loaded;
  }

  private async generate(prompt: string, settings: Record<string, number | boolean | null>): Promise<void> {
    const { host } = this;
    if (host.get("status") === "running" || host.get("status") === "loading") return;
    const began = performance.now();
    try {
      const other = Object.entries(settings).find(
        ([name, value]) => !SUPPORTED.has(name) && value !== this.page.state[name as keyof PlaygroundState],
      );
      if (other) throw new Error(`${other[0]} works in the notebook; in this page: ${[...SUPPORTED].join(", ")}`);
      const { engine, tokenizer } = await this.load();
      const ids = tokenizer.encode(prompt);
      const most = Math.min(Number(settings.max_tokens ?? 100), engine.context - ids.length);
      if (most < 1) throw new Error(`the prompt has ${ids.length} tokens; the context holds ${engine.context}`);
      const seed = Number(settings.seed ?? Math.floor(Math.random() * 2 ** 31));
      this.run++;
      this.stopped = false;
      [this.prompt, this.items, this.tops, this.stats] = [prompt, [], [], { n: 0, tps: 0, ttft_s: null }];
      host.put({ prompt, status: "running", error: "", finish_reason: "" });
      this.snapshot();
      await breath();
      const reason = await this.draw(engine, tokenizer, ids, most, seed, settings, began);
      host.deliver({ type: "done", run: this.run, seq: this.items.length - 1, reason, stats: this.stats });
      host.put({ status: this.stopped ? "stopped" : "done", finish_reason: reason, text: this.items.map((item) => item[0]).join("") });
    } catch (problem) {
      host.put({ status: "error", error: problem instanceof Error ? problem.message : String(problem) });
    }
  }

  /** Draws until something ends it; the reason. */
  private async draw(
    engine: Engine,
    tokenizer: Tokenizer,
    ids: number[],
    most: number,
    seed: number,
    settings: Record<string, number | boolean | null>,
    began: number,
  ): Promise<string> {
    const number = (name: string, neutral: number) => Number(settings[name] ?? neutral);
    const chosen = {
      temperature: number("temperature", 1),
      top_k: number("top_k", 0),
      top_p: number("top_p", 1),
      min_p: number("min_p", 0),
    };
    const decoder = new TextDecoder();
    engine.read(ids, 0);
    let first = 0;
    for (let n = 0; ; n++) {
      const drawn = engine.draw(chosen, uniform(seed, n), TOP);
      if (this.page.eos.includes(drawn.id)) return "eos";
      const text = decoder.decode(tokenizer.bytes(drawn.id), { stream: n + 1 < most });
      this.tops.push(drawn.top.map(([id, logprob]) => [tokenizer.text(id), Math.exp(logprob)]));
      this.items.push([text, drawn.id, Math.exp(drawn.logprob), drawn.rank, null]);
      const now = performance.now();
      if (n === 0) first = now;
      this.stats = { n: n + 1, tps: n ? n / ((now - first) / 1000) : 0, ttft_s: (first - began) / 1000 };
      this.host.deliver({
        type: "delta",
        run: this.run,
        seq: n,
        items: [[text, drawn.id, Math.exp(drawn.logprob), drawn.rank, null]],
        stats: this.stats,
      });
      if (n + 1 === most) return ids.length + most === engine.context ? "context" : "length";
      await breath();
      if (this.stopped) return "cancelled";
      engine.read([drawn.id], ids.length + n);
    }
  }
}

type Widget = { initialize?: (props: object) => unknown; render?: (props: object) => unknown };

async function start(): Promise<void> {
  const text = document.getElementById("exl2nb-browser")?.textContent;
  const el = document.getElementById("exl2nb-root");
  if (!text || !el) return;
  if (location.protocol === "file:") {
    el.textContent = "Pages from a folder may not fetch the model. `make site` serves this one.";
    return;
  }
  const page = JSON.parse(text) as Page & Page<MicroscopeState>;
  const kernel = page.widget === "microscope" ? new MicroscopeKernel(page) : new Kernel(page);
  const url = URL.createObjectURL(new Blob([page.esm], { type: "text/javascript" }));
  const exported = (await import(/* @vite-ignore */ url)).default as Widget | (() => Widget);
  URL.revokeObjectURL(url);
  const widget = typeof exported === "function" ? exported() : exported;
  await widget.initialize?.({ model: kernel.host });
  await widget.render?.({ model: kernel.host, el });
}
if (typeof document !== "undefined") void start();

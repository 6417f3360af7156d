// Generated from exl2nb/widgets/protocol.py by `npm run protocol`; edit that file, not this one.

export type Status = "idle" | "loading" | "running" | "stopped" | "done" | "error";

/** A token the model could have chosen at one place. prob: 0..1 under its own distribution, before temperature and filters. */
export type Alternative = [text: string, prob: number];

/** One generated token. prob is null when the source did not tell; rank 1 = the most likely token; top null = not sent yet. */
export type TokenItem = [text: string, id: number, prob: number | null, rank: number | null, top: Alternative[] | null];

/** Speed so far. n: tokens; tps: tokens per second of decoding (0: not known yet); ttft_s: seconds to the first token (null: none). */
export interface Stats {
  n: number;
  tps: number;
  ttft_s: number | null;
}

/**
 * New items of run `run`, without alternatives: the page requests them when the reader points at a token.
 *
 * seq counts deltas of the run from 0; a hole means lost messages, and the browser asks for a snapshot.
 */
export interface Delta {
  type: "delta";
  run: number;
  seq: number;
  items: TokenItem[];
  stats: Stats;
}

/** All items of the run up to delta `seq` (-1: none yet). Answers `ready` and `resync`, and opens every run. */
export interface Snapshot {
  type: "snapshot";
  run: number;
  seq: number;
  prompt: string;
  items: TokenItem[];
  stats: Stats;
}

/** The run is over and `seq` was its last delta, so a lost tail is noticed too. */
export interface Done {
  type: "done";
  run: number;
  seq: number;
  reason: string;
  stats: Stats;
}

/** Answers `look_at`: the alternatives at place `at` of run `run`. */
export interface Tops {
  type: "tops";
  run: number;
  at: number;
  top: Alternative[];
}

/** The reader points at a token whose alternatives were not sent. */
export interface LookAt {
  type: "look_at";
  run: number;
  at: number;
}

/** Answers `look_into`. names: of each alternative "" where it could be drawn, else the sampler that removed it. left: of `of`. */
export interface Fates {
  type: "fates";
  run: number;
  at: number;
  names: string[];
  left: number;
  of: number;
}

/** The reader points at a token of a finished run: what did the samplers remove there? */
export interface LookInto {
  type: "look_into";
  run: number;
  at: number;
}

/** A browser half exists and wants a snapshot. */
export interface Ready {
  type: "ready";
}

/** Deltas were lost. Sent at most once a second. */
export interface Resync {
  type: "resync";
}

/** The page has heard nothing for a while and asks whether the kernel is there. */
export interface Ping {
  type: "ping";
}

/** It is. */
export interface Pong {
  type: "pong";
}

/** The reader pressed Stop. */
export interface Stop {
  type: "stop";
}

/**
 * The control of a sampling option. min, max, step: of its slider, step 0 = a switch. low, high: what may be typed.
 *
 * neutral: the value that does nothing. common: shown among the first. turns_on: another value turns a filter on.
 */
export interface SamplerControl {
  name: string;
  label: string;
  hint: string;
  min: number;
  max: number;
  step: number;
  low: number;
  high: number;
  neutral: number | boolean;
  common: boolean;
  turns_on: boolean;
}

/** The reader pressed Generate. Carries everything, so it does not depend on the order of trait updates. */
export interface Generate {
  type: "generate";
  prompt: string;
  settings: Record<string, number | boolean | null>;
}

/** A picture of a turn. url: a small copy as a data URL. note: its size, and the tokens that the model reads of it. */
export type ShownPicture = [url: string, note: string];

/**
 * What one side said. version: which of the `versions` of this turn, from 0. reasoning: what the model thought. calls: of functions.
 *
 * images: that were shown with it.
 */
export interface ChatTurn {
  id: number;
  role: string;
  text: string;
  version: number;
  versions: number;
  reasoning: string;
  calls: string[];
  images: ShownPicture[];
}

/** The reader sent a message. images: pictures with it, as data URLs. settings: as in Generate, here and below. */
export interface ChatSend {
  type: "chat_send";
  text: string;
  images: string[];
  settings: Record<string, number | boolean | null>;
}

/** The reader wants another answer as a sibling of `turn`, or one to a message without an answer. */
export interface ChatAgain {
  type: "chat_again";
  turn: number;
  settings: Record<string, number | boolean | null>;
}

/** The reader sent another version of message `turn`. */
export interface ChatEdit {
  type: "chat_edit";
  turn: number;
  text: string;
  settings: Record<string, number | boolean | null>;
}

/** The reader wants to see version `index` of a turn. */
export interface ChatGo {
  type: "chat_go";
  turn: number;
  index: number;
}

/**
 * Synced traits of Playground, beside one for each of `_samplers`. text and _tokens are set once, when a run ends.
 *
 * _defaults: the model's sampling defaults in words.
 */
export interface PlaygroundState {
  status: Status;
  error: string;
  height: string;
  prompt: string;
  chat: boolean;
  text: string;
  view: "plain" | "probability" | "rank";
  seed: number | null;
  n_tokens: number;
  tokens_per_second: number;
  ttft_s: number | null;
  finish_reason: string;
  _turns: ChatTurn[];
  _run_prompt: string;
  _tokens: TokenItem[];
  _model_label: string;
  _has_model: boolean;
  _sees: boolean;
  _samplers: SamplerControl[];
  _defaults: string;
  _protocol: number;
  _static: boolean;
}

/** A stage that is over. */
export type Finished = [stage: string, elapsed_s: number, state: string];

/** Synced traits of ProgressView. total 0 = unknown; rate in units per second (0 = not known); share 0..1, eta_s: null = not known. */
export interface ProgressState {
  status: Status;
  error: string;
  height: string;
  title: string;
  stage: string;
  done: number;
  total: number;
  unit: string;
  detail: string;
  rate: number;
  share: number | null;
  elapsed_s: number;
  eta_s: number | null;
  finished: Finished[];
  cancellable: boolean;
  _protocol: number;
  _static: boolean;
}

/** `groups` groups in a row, each of `rows` rows at `bits` bits. */
export type Run = [bits: number, rows: number, groups: number];

/** One matrix as its file has it, from the top row to the last. format: "exl2", "gptq", a dtype or "". runs: empty where not known. */
export type BitPart = [name: string, bpw: number, format: string, runs: Run[]];

/**
 * One kind of matrix in one layer (-1: outside). experts: matrices folded into it. rows, columns: of one; 0 = not known.
 *
 * error: of the rounding on the calibration text. share: of the predicted KL, 0..1. null: not known.
 */
export interface BitCell {
  layer: number;
  matrix: string;
  bpw: number;
  nbytes: number;
  weights: number;
  rows: number;
  columns: number;
  experts: number;
  error: number | null;
  share: number | null;
  parts: BitPart[];
}

/** Synced traits of BitMap. selected: layer and matrix, or empty. _other: bits of a second model, cell by cell. */
export interface BitMapState {
  status: Status;
  error: string;
  height: string;
  title: string;
  metric: "bpw" | "error" | "share" | "difference";
  selected: (number | string)[];
  _metrics: string[];
  _matrices: string[];
  _layers: number[];
  _cells: BitCell[];
  _other: (number | null)[];
  _other_title: string;
  _protocol: number;
  _static: boolean;
}

/** One allocation on the rate-distortion curve. kl: predicted, nats per token. bits: of each cell, in the order of `_cells`. */
export type CurvePoint = [bpw: number, nbytes: number, kl: number, bits: number[]];

/** A bitrate whose KL was measured, nats per token. */
export type Mark = [bpw: number, kl: number, label: string];

/**
 * Synced traits of BitrateExplorer. bpw: requested; solved: the bitrate that cells and figures belong to. _free: bytes on a GPU.
 *
 * _factor: KL of a copy over the predicted one, with `_tokens` tokens of calibration.
 */
export interface ExplorerState {
  status: Status;
  error: string;
  height: string;
  bpw: number;
  solved: number;
  nbytes: number;
  predicted_kl: number;
  solve_ms: number;
  prompt: string;
  metric: "bpw" | "share";
  selected: (number | string)[];
  original: string;
  made: string;
  made_bpw: number;
  stage: string;
  progress: number;
  _low: number;
  _high: number;
  _matrices: string[];
  _layers: number[];
  _cells: BitCell[];
  _curve: CurvePoint[];
  _marks: Mark[];
  _can_make: boolean;
  _free: number | null;
  _factor: number;
  _tokens: number;
  _protocol: number;
  _static: boolean;
}

/** The slider moved. */
export interface Solve {
  type: "solve";
  bpw: number;
}

/** The reader gave a size in bytes: of the files, or of a memory that holds a cache of `context` tokens in mode `cache` as well. */
export interface SolveSize {
  type: "solve_size";
  kind: "bytes" | "fits";
  size: number;
  context: number;
  cache: string;
}

/** The reader pressed "Convert". */
export interface Make {
  type: "make";
  bpw: number;
  prompt: string;
}

/**
 * 32 stored rows of one column, from the words to the weights; the last stage is empty where the original is not known.
 *
 * words and scale_word: unsigned. zero: the code that stands for 0. weights, original: in stored order, as `rows` names them.
 */
export interface WeightSlice {
  group: number;
  unit: number;
  column: number;
  bits: number;
  zero: number;
  first_row: number;
  first_word: number;
  words: number[];
  scale_word: number;
  scale_index: number;
  scale_max: number;
  unit_step: number;
  step: number;
  codes: number[];
  rows: number[];
  weights: number[];
  original: number[];
}

/** Synced traits of WeightBrowser. value: which of the 32 is followed. _runs: groups of the matrix, from the top row to the last. */
export interface WeightsState {
  status: Status;
  error: string;
  height: string;
  title: string;
  layer: number;
  matrix: string;
  group: number;
  unit: number;
  column: number;
  value: number;
  _layers: number[];
  _matrices: string[];
  _runs: Run[];
  _units: number;
  _rows: number;
  _columns: number;
  _bpw: number;
  _original: string;
  _slice: WeightSlice;
  _protocol: number;
  _static: boolean;
}

/** The reader went elsewhere in the weights. Numbers out of range are moved inside it. */
export interface Look {
  type: "look";
  layer: number;
  matrix: string;
  group: number;
  unit: number;
  column: number;
}

/** Bytes of one part of a step: always, per token of the step, per token of the longest text. */
export type PlanStage = [fixed: number, token: number, context: number];

/** The coefficients of a memory plan, exl2nb/llm/memory.py. */
export interface PlanFormula {
  weights: number;
  page_tokens: number;
  page_bytes: Record<string, number>;
  chunk: number;
  stages: PlanStage[];
  graph_fixed: number;
  graph_row: number;
  logits_row: number;
  longest: number;
  segments: number;
  adapters: number;
}

/** One of several devices. kind: "cpu" or "cuda". */
export interface PlanDevice {
  name: string;
  kind: string;
}

/** The values of a split on one kind of device, `KindFormula.known` in exl2nb/llm/split_plan.py. */
export interface PlanKind {
  layers: number;
  parts: number[];
  read: number[];
  stream: number;
  lent: number;
  lent_counts: number[];
  lent_read: number[];
  formula: PlanFormula;
}

/** Devices in running order; whether the first, a CPU, lends layers; how the model's place is written in Python, with its revision. */
export interface PlanSplit {
  devices: PlanDevice[];
  kinds: Record<string, PlanKind>;
  lends: boolean;
  source: string;
}

/**
 * Synced traits of MemoryPlan. free: bytes, null = not known. _modes: cache modes to choose from.
 *
 * _split: null where there is one device. Of several: borders: layers where each but the last ends; limits: bytes that each may hold,
 * speeds: bytes a second that each reads; null in them = not known.
 */
export interface PlanState {
  status: Status;
  error: string;
  height: string;
  name: string;
  device: "cpu" | "cuda";
  context: number;
  batch: number;
  cache_mode: string;
  free: number | null;
  borders: number[];
  limits: (number | null)[];
  speeds: (number | null)[];
  _split: PlanSplit | null;
  _formula: PlanFormula;
  _modes: string[];
  _protocol: number;
  _static: boolean;
}

/**
 * One token of answer `cell`. prob: under what wrote it. reference_prob: under the reference, reading the same text. kl: nats.
 *
 * same: both find the same token most likely. favourite: the reference's where it is another one. null: not known.
 */
export type KlToken = [cell: number, text: string, id: number, prob: number | null, reference_prob: number | null, kl: number | null, same: boolean | null, favourite: string | null];

/** A cache mode. note: what K and V are stored as. bits: a number on average. fits: tokens that free memory holds; null: not known. */
export interface CacheKind {
  mode: string;
  title: string;
  note: string;
  bits: number;
  token_bytes: number;
  fits: number | null;
}

/** The answer's probability under a mode; depth 0 to 1, null: the fact was not in the text. rank: of its first token. */
export type NeedleHit = [mode: string, depth: number | null, prob: number, rank: number];

/** The hidden fact and its question. tokens: of the filler text; 0: not read yet. */
export interface NeedleText {
  fact: string;
  question: string;
  answer: string;
  tokens: number;
}

/** Synced traits of CacheExplorer. modes: the columns, "fp16" first. _tokens: set when a run ends; cell = place in `_run_modes`. */
export interface CachesState {
  status: Status;
  error: string;
  height: string;
  prompt: string;
  modes: string[];
  max_tokens: number;
  stage: string;
  _kinds: CacheKind[];
  _run_modes: string[];
  _run_prompt: string;
  _tokens: KlToken[];
  _needle: NeedleHit[];
  _needle_modes: string[];
  _needle_depths: (number | null)[];
  _needle_text: NeedleText;
  _verdict: string;
  _free: number | null;
  _context: number;
  _model_label: string;
  _has_model: boolean;
  _protocol: number;
  _static: boolean;
}

/** The reader pressed Generate in CacheExplorer. */
export interface RunCaches {
  type: "run";
  prompt: string;
  modes: string[];
  max_tokens: number;
}

/** The reader pressed "Run needle test". */
export interface HideNeedle {
  type: "needle";
  modes: string[];
}

/** One column. note: its settings in words. nbytes, bpw: of the weights; null: not known. */
export type CompareColumn = [label: string, note: string, nbytes: number | null, bpw: number | null];

/** What was measured of answer `cell` = prompt * columns + column, token by token. tps: tokens per second of decoding; 0: not known. */
export type CellMeasure = [cell: number, kl: number[], reference_prob: number[], same: boolean[]];

/** How an answer went. ttft_s: seconds to its first token. reason: why it ended. */
export type CellSpeed = [cell: number, tps: number, ttft_s: number | null, reason: string];

/** Synced traits of Compare. _tokens: set once, when a run ends. _measured: KL of the answers that were measured so far. */
export interface CompareState {
  status: Status;
  error: string;
  height: string;
  prompts: string[];
  view: "kl" | "difference";
  stage: string;
  _columns: CompareColumn[];
  _run_prompts: string[];
  _tokens: KlToken[];
  _measured: CellMeasure[];
  _speeds: CellSpeed[];
  _note: string;
  _has_model: boolean;
  _protocol: number;
  _static: boolean;
}

/** The reader pressed Generate in Compare. */
export interface RunPrompts {
  type: "run";
  prompts: string[];
}

/** One step of the sampling chain. mass: probability that it removed. probs: of `_tokens` after it; null where removed. */
export interface SampleStep {
  name: string;
  settings: string;
  survivors: number;
  removed: number;
  mass: number;
  temperature: number;
  entropy_bits: number;
  probs: (number | null)[];
}

/** A token worth looking at. */
export type SampleToken = [id: number, text: string];

/** A piece of the line of probabilities, in order of ids. id -1: several tokens together. */
export type LinePart = [id: number, text: string, prob: number];

/**
 * Synced traits of SamplerMicroscope. settings: of the sliders. token: drawn; uniform null: greedy. _answer: what the text has.
 *
 * _about: each step of a chain in words.
 */
export interface MicroscopeState {
  status: Status;
  error: string;
  height: string;
  at: number;
  settings: Record<string, number>;
  token: number;
  token_text: string;
  prob: number;
  uniform: number | null;
  seed: string;
  _index: number;
  _others: string;
  _prompt: string;
  _answer: SampleToken[];
  _vocab: number;
  _steps: SampleStep[];
  _tokens: SampleToken[];
  _line: LinePart[];
  _samplers: SamplerControl[];
  _about: Record<string, string>;
  _protocol: number;
  _static: boolean;
}

/** The reader moved a slider or chose a place; settings are the changed ones. */
export interface Sample {
  type: "sample";
  at: number;
  settings: Record<string, number>;
}

/**
 * One page of the cache. parent: the page before it in its text, -1 none known. event: what happened since the frame before, or "".
 *
 * "new": taken from the free ones; "found": a cached page is used again; "joined": one more request holds it; "evicted": a cached page was
 * given away; "freed": its last request let go; "cleared": what was cached is forgotten.
 */
export type PageCell = [state: "free" | "cached" | "used", tokens: number, owners: number[], key: string, parent: number, event: "" | "new" | "found" | "joined" | "evicted" | "freed" | "cleared"];

/** One request. waiting: it has no pages now. reused: tokens of its prompt that were found in the cache. */
export type PageOwner = [number: number, waiting: boolean, tokens: number, computed: number, reused: number, pages: number[]];

/** The page table at one moment. */
export interface PageFrame {
  label: string;
  page_size: number;
  pages: PageCell[];
  requests: PageOwner[];
  evictions: number;
  preemptions: number;
}

/** Synced traits of PageTable. frame: of `_count`, -1: the last. _shown: the one that _frames holds first (an export holds all). */
export interface PageTableState {
  status: Status;
  error: string;
  height: string;
  title: string;
  frame: number;
  live: boolean;
  _count: number;
  _shown: number;
  _frames: PageFrame[];
  _can_live: boolean;
  _protocol: number;
  _static: boolean;
}

/** The scrubber moved, or Live was pressed. */
export interface ShowFrame {
  type: "frame";
  frame: number;
  live: boolean;
}

/** One token and where it comes from. step: pass of the model that decided it; -1: not known. wrong: draft tokens rejected here. */
export type SpecToken = [text: string, id: number, source: "target" | "draft" | "ngram" | "forced" | "rewound", prob: number | null, step: number, wrong: string[]];

/**
 * What speculation did. lengths: how often 0, 1, 2, ... draft tokens of a pass were accepted.
 *
 * plain_tps: tokens per second without speculation; same: whether the text is the same then; null where it was not run.
 */
export interface SpecStats {
  kind: string;
  steps: number;
  plain_steps: number;
  proposed: number;
  accepted: number;
  lengths: number[];
  tokens: number;
  tps: number;
  plain_tps: number | null;
  same: boolean | null;
}

/** Synced traits of Speculation. */
export interface SpeculationState {
  status: Status;
  error: string;
  height: string;
  title: string;
  _prompt: string;
  _tokens: SpecToken[];
  _stats: SpecStats;
  _protocol: number;
  _static: boolean;
}

/** One request of a server's client. state: "running", "done", "cancelled" or "error". ttft_s null = no token yet. */
export type ServedRequest = [number: number, route: string, client: string, state: string, seconds: number, ttft_s: number | null, prompt_tokens: number, new_tokens: number];

/** One client of a server, over its last requests. ttft_ms, token_ms: medians; null = none known. */
export type ServedClient = [client: string, running: number, ended: number, ttft_ms: number | null, token_ms: number | null];

/** Synced traits of ServerMonitor. tok_s: samples, the last one newest; times of the last ten seconds, null = none. */
export interface ServerMonitorState {
  status: Status;
  error: string;
  height: string;
  url: string;
  model: string;
  active: number;
  queued: number;
  max_queue: number;
  pages: number;
  pages_free: number;
  tok_s: number[];
  ttft_p50_s: number | null;
  ttft_p99_s: number | null;
  requests: ServedRequest[];
  clients: ServedClient[];
  _protocol: number;
  _static: boolean;
}

/** Read another prompt. */
export interface ReadPrompt {
  type: "read";
  prompt: string;
}

/** Mean KL of model `side` when a layer runs with the reference's weights; side 1 is the first after the reference. */
export type PatchedKl = [side: number, layer: number, kl: number];

/**
 * What ErrorFlow shows. labels: of all models, the reference first; the lists that follow are of the others.
 *
 * errors: relative, by model, row and layer. flow: of the residual stream, before the first layer, then after attention and MLP of each.
 * cosines: by model, of attention and MLP, by layer: 1 = adds to the stream's error, -1 = cancels it. kl: mean over the tokens.
 */
export interface FlowResult {
  labels: string[];
  rows: string[];
  layers: number;
  tokens: number;
  errors: (((number | null)[])[])[];
  flow: number[][];
  cosines: number[][][];
  kl: number[];
  patched: PatchedKl[];
}

/** Synced traits of every widget that looks inside. side: model that is compared; _share: of the running work that is done, 0 to 1. */
export interface InsideState {
  status: Status;
  error: string;
  height: string;
  prompt: string;
  side: number;
  _share: number;
  _has_model: boolean;
  _protocol: number;
  _static: boolean;
}

/** Synced traits of ErrorFlow. side: model of the map, from 1; layer: the chosen one, -1 = none. */
export interface ErrorFlowState {
  status: Status;
  error: string;
  height: string;
  prompt: string;
  side: number;
  _share: number;
  _has_model: boolean;
  _protocol: number;
  _static: boolean;
  layer: number;
  _result: FlowResult;
}

/** Run a layer with the reference's weights; -1: all layers, one after the other. */
export interface PatchLayer {
  type: "patch";
  layer: number;
}

/**
 * What LayerLens shows; probabilities travel as whole numbers of 0.01 %. Flat lists have a row for each depth.
 *
 * Depths: the embedding, then each layer. texts: of the tokens. words: texts of predicted tokens, by number. top, prob: by model, three
 * for each depth and token. target: what the reference finds most likely in the end, for each token; chance: of it, by model. kl: by model
 * after the reference.
 */
export interface LensResult {
  labels: string[];
  layers: number;
  texts: string[];
  words: string[];
  top: number[][];
  prob: number[][];
  target: number[];
  chance: number[][];
  kl: number[][];
}

/** Synced traits of LayerLens. token: -1 = the last one. */
export interface LayerLensState {
  status: Status;
  error: string;
  height: string;
  prompt: string;
  side: number;
  _share: number;
  _has_model: boolean;
  _protocol: number;
  _static: boolean;
  token: number;
  _result: LensResult;
}

/** A picture of AttentionView: the data URL of what the model saw, and the tokens of its patches, row by row. */
export interface LookedAt {
  url: string;
  rows: number;
  columns: number;
  tokens: number[];
}

/**
 * What AttentionView shows besides patterns. size: rows and columns of a pattern; of fewer than tokens, each is a mean.
 *
 * names: of its rows and columns. distance: by model after the reference, layer and head: mean total variation, 0 to 1. pictures: in the
 * prompt. answer: the token that the answer begins with; -1 = there is none.
 */
export interface AttentionResult {
  labels: string[];
  layers: number;
  heads: number;
  tokens: number;
  size: number;
  names: string[];
  distance: number[][][];
  pictures: LookedAt[];
  answer: number;
}

/**
 * Attention of some heads of a layer: base64 of heads x size x size bytes, by model; a byte b is a share of (b / 255) ** 2.
 *
 * rows: of each model that have been read so far.
 */
export interface Patterns {
  layer: number;
  head: number;
  size: number;
  rows: number[];
  data: string[];
}

/**
 * Synced traits of AttentionView. token: whose attention is shown on the pictures, from the end where it is negative.
 *
 * _heads: all heads of the chosen layer, small; _one: the chosen head; _stored: in an export, all.
 */
export interface AttentionViewState {
  status: Status;
  error: string;
  height: string;
  prompt: string;
  side: number;
  _share: number;
  _has_model: boolean;
  _protocol: number;
  _static: boolean;
  layer: number;
  head: number;
  token: number;
  _result: AttentionResult;
  _heads: Patterns[];
  _one: Patterns[];
  _stored: Patterns[];
}

/**
 * The group of one model that the chosen row lies in, all its columns.
 *
 * first: stored row that it begins with. before, after: how many values of the original (empty where it is not known) and of the model lie
 * in each of equal bins from low to high. codes: how often each code is stored; nearest: how often it would be, were every original value
 * rounded to the nearest level. scales: columns by scale index. error: relative, of the group (null: not known). clipped: share of
 * original values beyond the last level. entropy: of the codes, bits.
 */
export interface GroupHistogram {
  label: string;
  bits: number;
  group: number;
  groups: number;
  rows: number;
  columns: number;
  first: number;
  low: number;
  high: number;
  before: number[];
  after: number[];
  codes: number[];
  nearest: number[];
  scales: number[];
  error: number | null;
  clipped: number | null;
  entropy: number;
}

/** What an adapter does to a matrix: Frobenius norms of the change at scale 1, and of the matrix. layer: -1 outside the layers. */
export type LoraCell = [layer: number, matrix: string, rank: number, change: number, weight: number];

/** What LoraExplorer shows. scale: of the answer. base, adapted: tokens of the answers without and with it; kl: mean over `adapted`. */
export interface LoraResult {
  name: string;
  model: string;
  matrices: string[];
  layers: number[];
  cells: LoraCell[];
  scale: number;
  base: KlToken[];
  adapted: KlToken[];
  kl: number | null;
}

/** Synced traits of LoraExplorer. scale: of the slider. selected: layer and matrix, or empty. */
export interface LoraExplorerState {
  status: Status;
  error: string;
  height: string;
  prompt: string;
  side: number;
  _share: number;
  _has_model: boolean;
  _protocol: number;
  _static: boolean;
  scale: number;
  selected: (number | string)[];
  _result: LoraResult;
}

/** Answer again with the adapter at another scale. */
export interface ScaleTo {
  type: "scale";
  scale: number;
}

/** Synced traits of WeightHistogram. row: of the original matrix. */
export interface WeightHistogramState {
  status: Status;
  error: string;
  height: string;
  layer: number;
  matrix: string;
  row: number;
  _layers: number[];
  _matrices: string[];
  _rows: number;
  _original: string;
  _groups: GroupHistogram[];
  _protocol: number;
  _static: boolean;
}

/** Show the group of another row. */
export interface ShowGroup {
  type: "place";
  layer: number;
  matrix: string;
  row: number;
}

/** A massive activation of the residual stream. ratio: over the median magnitude of its layer. */
export type Massive = [side: number, layer: number, token: number, channel: number, value: number, ratio: number];

/**
 * What OutlierMap shows. points: by name. bins: columns of a map, by point; each holds `channels / bins` channels, its largest counts.
 *
 * activations: by point and model, base64 of layers x bins bytes; weights: the same, of the matrix that reads the point. A byte b is
 * lows[point] * 10 ** (b * spans[point] / 255), that of weights with weight_lows and weight_spans; 0 is nothing.
 */
export interface OutlierResult {
  labels: string[];
  layers: number;
  texts: string[];
  points: string[];
  channels: number[];
  bins: number[];
  activations: string[][];
  lows: number[];
  spans: number[];
  weights: string[][];
  weight_lows: number[];
  weight_spans: number[];
  massive: Massive[];
}

/** What one channel does to its group of 128: relative rounding error of the others at `bits`, with it and without it. */
export interface GroupEffect {
  layer: number;
  point: number;
  channel: number;
  bits: number;
  activation: number;
  weight: number;
  activations: number[];
  weights: number[];
}

/** Synced traits of OutlierMap. point: number in `points`; channel: -1 = none is chosen. */
export interface OutlierMapState {
  status: Status;
  error: string;
  height: string;
  prompt: string;
  side: number;
  _share: number;
  _has_model: boolean;
  _protocol: number;
  _static: boolean;
  point: number;
  layer: number;
  channel: number;
  _result: OutlierResult;
  _effect: GroupEffect[];
}

export type FromKernel = Delta | Snapshot | Done | Pong | Tops | Fates;

export type ToKernel = LookAt | LookInto | Ready | Resync | Ping | Stop | Generate | ChatSend | ChatAgain | ChatEdit | ChatGo | Solve | SolveSize | Make | Look | RunCaches | HideNeedle | RunPrompts | Sample | ShowFrame | ReadPrompt | PatchLayer | ScaleTo | ShowGroup;

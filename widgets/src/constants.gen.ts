// Generated from exl2nb/widgets/protocol.py by `npm run protocol`; edit that file, not this one.

export const PROTOCOL_VERSION = 2 as const;

export const BIT_COLOURS = [
  [2.0, [254, 240, 190]],
  [3.0, [190, 222, 150]],
  [4.0, [112, 190, 150]],
  [5.0, [52, 140, 150]],
  [6.0, [45, 90, 140]],
  [8.0, [58, 34, 102]],
] as const;

export const DIVERGING_COLOURS = [[186, 40, 50], [242, 242, 242], [30, 84, 170]] as const;

export const SIZE_UNITS = [["GiB", 1073741824], ["MiB", 1048576], ["KiB", 1024]] as const;

export const SURPRISE_LIMITS = [0.9, 0.5, 0.2, 0.05] as const;

export const KL_LIMITS = [0.001, 0.01, 0.1, 1.0] as const;

export const OWNER_COLOURS = [
  [46, 112, 190],
  [214, 120, 40],
  [62, 150, 92],
  [168, 84, 170],
  [196, 62, 78],
  [20, 140, 150],
  [140, 110, 40],
  [222, 110, 150],
] as const;

export const PLAN_COLOURS = {"weights": "#3b6ea8", "cache": "#52a37f", "work": "#d9a441", "graphs": "#8a6fb0", "logits": "#b5565e", "rounding": "#9a9a9a", "adapters": "#4aa3b8"} as const;

export const DEVICE_COLOURS = ["#5b6470", "#a4541f", "#2f7a58", "#75589c", "#a5464e", "#2f7f93", "#76661f", "#666666"] as const;

export const SHOWN_TOKENS = 14 as const;

export const LINE_PROB = 0.004 as const;

export const PLAN_PARTS = ["weights", "cache", "work", "graphs", "logits", "rounding", "adapters"] as const;

export const PLAN_TERMS: readonly (readonly [name: string, term: unknown])[] = [
  ["tokens", ["min", "chunk", ["*", "batch", "context"]]],
  ["cache", ["*", "batch", ["ceil", "context", "page_tokens"], ["at", "page_bytes", "mode"]]],
  ["work", ["most", "stages", "tokens", "context"]],
  ["graph_rows", ["min", 64, ["step", "batch", 1, 1, 2, 2, 4, 4, 8, 8, ["*", 8, ["ceil", "batch", 8]]]]],
  ["graphs", ["+", "graph_fixed", ["*", "graph_row", "graph_rows"]]],
  ["logits", ["*", "logits_row", "batch"]],
  ["rounding", ["*", ["min", 1, "segments"], ["+", ["step", "weights", 1048576, 2097152, 10485759, 20971520, ["*", 2097152, ["ceil", "weights", 2097152]]], ["*", -1, "weights"], ["step", "cache", 1048576, 2097152, 10485759, 20971520, ["*", 2097152, ["ceil", "cache", 2097152]]], ["*", -1, "cache"]]]],
];

export const SHARE_TERMS: readonly (readonly [name: string, term: unknown])[] = [
  ["layer_cache", ["floor", "cache", "layers"]],
  ["lent_count", ["at", "lent_counts", "host"]],
  ["share_weights", ["sum", "parts", ["step", "first", 0, 0, ["+", "first", 1]], ["step", "last", ["+", "layers", -1], ["+", "last", 1], ["+", "layers", 2]]]],
  ["share_cache", ["*", "layer_cache", ["+", "last", ["*", -1, "first"], ["*", "sign", "lent_count"]]]],
  ["share_work", ["+", "work", "graphs", "logits", "rounding", "stream", ["*", "lent", "lent_count"]]],
  ["share_read", ["+", ["sum", "read", ["step", "first", 0, 0, ["+", "first", 1]], ["step", "last", ["+", "layers", -1], ["+", "last", 1], ["+", "layers", 2]]], ["*", "sign", ["sum", "lent_read", 0, "lent_count"]]]],
];

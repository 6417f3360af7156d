// Numbers of ErrorFlow as words. Pure, so the tests read them without a browser.
import type { FlowResult } from "../protocol.gen";

export function share(value: number | null): string {
  if (value === null) return "";
  const percent = 100 * value;
  if (percent === 0) return "0 %";
  if (percent >= 99.5) return `${percent.toFixed(0)} %`;
  if (percent >= 9.95) return `${percent.toFixed(1)} %`;
  return `${percent >= 0.01 ? percent.toFixed(2) : percent.toExponential(0)} %`;
}

/** The stream before and after one half of a layer, 0 = attention, 1 = MLP. */
export function step(result: FlowResult, side: number, layer: number, half: number): { before: number; after: number; cosine: number } {
  const flow = result.flow[side] ?? [];
  const cosine = result.cosines[side]?.[half]?.[layer] ?? 0;
  return { before: flow[2 * layer + half] ?? 0, after: flow[2 * layer + half + 1] ?? 0, cosine };
}

/** "The MLP lowers the stream's error from 3.10 % to 2.90 %; the error it adds cancels part of it (cosine −0.21)." */
export function sentence(result: FlowResult, side: number, layer: number, half: number): string {
  const { before, after, cosine } = step(result, side, layer, half);
  const name = half ? "The MLP" : "Attention";
  const verb = share(after) === share(before) ? "keeps" : after > before ? "raises" : "lowers";
  const change = verb === "keeps" ? `at ${share(after)}` : `from ${share(before)} to ${share(after)}`;
  const own = cosine > 0.1 ? "points the same way" : cosine < -0.1 ? "cancels part of it" : "is uncorrelated with it";
  return `${name} ${verb} the stream's error ${change}; the error it adds ${own} (cosine ${signed(cosine)}).`;
}

export function signed(value: number): string {
  return `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
}

/** KL with a layer patched back, against the KL of the model. */
export function fall(kl: number, left: number): string {
  const change = kl > 0 ? (100 * (left - kl)) / kl : 0;
  const said = `${change > 0 ? "+" : "−"}${Math.abs(change).toFixed(0)} %`;
  return `KL ${kl.toPrecision(3)} → ${left.toPrecision(3)} (${said})`;
}

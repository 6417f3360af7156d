// Colours of bit widths, light to dark from 2 to 8 bits, as in exl2nb/core/show.py. tests/widgets/test_twins.py compares.
import { BIT_COLOURS, DIVERGING_COLOURS } from "../constants.gen";

export type Rgb = readonly [number, number, number];

export function colour(bits: number): Rgb {
  let [low, from]: (typeof BIT_COLOURS)[number] = BIT_COLOURS[0];
  if (bits <= low) return from;
  for (const [high, to] of BIT_COLOURS) {
    if (bits <= high) return mix(from, to, (bits - low) / (high - low));
    [low, from] = [high, to];
  }
  return from;
}

/** Light to dark for a share of 0 to 1. */
export function shade(share: number): Rgb {
  return colour(2 + 6 * Math.min(1, Math.max(0, share)));
}

/** Fewer bits than the other: red; more: blue; 2 bits apart is full. */
export function diverging(difference: number): Rgb {
  const share = Math.min(1, Math.abs(difference) / 2);
  const [less, same, more] = DIVERGING_COLOURS;
  return mix(same, difference < 0 ? less : more, share);
}

/** Black or white, whichever contrasts more (WCAG relative luminance). */
export function ink(rgb: Rgb): "#000" | "#fff" {
  const [r, g, b] = rgb.map((c) => (c <= 10 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4)) as [number, number, number];
  const luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  return (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) ? "#000" : "#fff";
}

export function css(rgb: Rgb): string {
  return `rgb(${rgb.join(",")})`;
}

function mix(a: Rgb, b: Rgb, t: number): Rgb {
  return [0, 1, 2].map((i) => Math.round((a[i] as number) + t * ((b[i] as number) - (a[i] as number)))) as unknown as Rgb;
}

// The heat map as an SVG file: the cells of the page with their colours and numbers.
import type { Paint, Place } from "./bitgrid";
import { css, ink } from "./palette";

const [WIDE, HIGH, LEFT, TOP] = [40, 24, 70, 40];

export function mapSvg(title: string, matrices: string[], layers: number[], places: Place[], paint: (index: number) => Paint): string {
  const at = new Map(places.map((place, i) => [`${place.layer}/${place.matrix}`, i]));
  const columns = Math.max(1, layers.length);
  const [width, height] = [LEFT + columns * WIDE + 10, TOP + matrices.length * HIGH + 10];
  const text = (x: number, y: number, words: string, fill = "#222", anchor = "middle") =>
    `<text x="${x}" y="${y}" fill="${fill}" text-anchor="${anchor}">${escaped(words)}</text>`;
  const parts = [text(LEFT, 16, title, "#222", "start"), ...layers.map((layer, x) => text(LEFT + (x + 0.5) * WIDE, 34, String(layer)))];
  matrices.forEach((matrix, y) => {
    const top = TOP + y * HIGH;
    parts.push(text(LEFT - 8, top + 16, matrix, "#222", "end"));
    const inside = layers.map((layer) => at.get(`${layer}/${matrix}`));
    const shown = inside.some((index) => index !== undefined) ? inside : [at.get(`-1/${matrix}`)];
    shown.forEach((index, x) => {
      const painted = index === undefined ? null : paint(index);
      if (!painted?.colour) return;
      parts.push(
        `<rect x="${LEFT + x * WIDE}" y="${top}" width="${WIDE - 2}" height="${HIGH - 2}" rx="3" fill="${css(painted.colour)}"/>`,
        text(LEFT + (x + 0.5) * WIDE - 1, top + 15, painted.text, ink(painted.colour)),
      );
    });
  });
  const style = 'font-family="system-ui, sans-serif" font-size="11"';
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" ${style} style="background:#fff">${parts.join("")}</svg>`;
}

function escaped(text: string): string {
  return text.replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);
}

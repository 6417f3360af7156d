// Canvases side by side as one SVG file.
const [SIZE, GAP, TOP] = [300, 16, 46];

export function canvasSvg(title: string, canvases: { name: string; canvas: HTMLCanvasElement }[]): string {
  const width = GAP + canvases.length * (SIZE + GAP);
  const text = (x: number, y: number, words: string) => `<text x="${x}" y="${y}" fill="#222">${escaped(words)}</text>`;
  const parts = canvases.flatMap(({ name, canvas }, i) => {
    const x = GAP + i * (SIZE + GAP);
    const size = `width="${SIZE}" height="${SIZE}"`;
    return [text(x, TOP - 8, name), `<image x="${x}" y="${TOP}" ${size} style="image-rendering:pixelated" href="${canvas.toDataURL()}"/>`];
  });
  const [height, style] = [TOP + SIZE + GAP, 'font-family="system-ui, sans-serif" font-size="12"'];
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" ${style} style="background:#fff">${text(GAP, 18, title)}${parts.join("")}</svg>`;
}

function escaped(text: string): string {
  return text.replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);
}

// No rule of a widget may match inside another: a notebook page holds the style sheets of all widgets shown on it.
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

const SHEETS = "../exl2nb/static"; // npm runs in widgets/
const THEME = /^:is\(\[data-jp-theme-light[^)]*\) /;
const TWINS = [/^\.jp-OutputArea-child:has\(\.exl2nb-\w+\)/, /^body:not\(:has\(\.jp-OutputArea\)\) \.exl2nb-static$/];

interface Sheet {
  selectors: string[];
  keyframes: string[];
}

/** Selectors of a style sheet, one by one, those inside @media and @container too. */
function read(css: string): Sheet {
  const found: Sheet = { selectors: [], keyframes: [] };
  const walk = (text: string) => {
    let [from, depth, open] = [0, 0, 0];
    for (let i = 0; i < text.length; i++) {
      if (text[i] === "{" && depth++ === 0) open = i;
      if (text[i] !== "}" || --depth > 0) continue;
      const head = text.slice(from, open).trim();
      if (/^@(media|container)/.test(head)) walk(text.slice(open + 1, i));
      else if (head.startsWith("@keyframes")) found.keyframes.push(head.slice(11).trim());
      else found.selectors.push(...list(head));
      from = i + 1;
    }
  };
  walk(css.replace(/\/\*.*?\*\//gs, "").replace(/@import[^;]*;/g, ""));
  return found;
}

/** A selector list, split at the commas outside parentheses. */
function list(head: string): string[] {
  const parts = [""];
  let depth = 0;
  for (const letter of head) {
    depth += letter === "(" ? 1 : letter === ")" ? -1 : 0;
    if (letter === "," && depth === 0) parts.push("");
    else parts[parts.length - 1] += letter;
  }
  return parts.map((part) => part.trim().replace(/\s+/g, " "));
}

function under(root: string): (selector: string) => boolean {
  const start = new RegExp(`^\\.${root}(?![\\w-])`);
  return (selector) => start.test(selector.replace(THEME, "")) || TWINS.some((twin) => twin.test(selector));
}

test("reading a style sheet", () => {
  const css = "a, .b:is(i, u) { x: 1 } /* c { } */ @media (x) { .d { } @container (y) { .e { } } } @keyframes f { 50% { z: 1 } }";
  assert.deepEqual(read(css), { selectors: ["a", ".b:is(i, u)", ".d", ".e"], keyframes: ["f"] });
});

test("every rule of a bundle is under the root of its widget", () => {
  const bundles = readdirSync(SHEETS).filter((name) => name.endsWith(".css"));
  assert.ok(bundles.length >= 11);
  for (const name of bundles) {
    const root = `exl2nb-${name.slice(0, -4)}`;
    const { selectors, keyframes } = read(readFileSync(join(SHEETS, name), "utf8"));
    assert.deepEqual(
      selectors.filter((selector) => !under(root)(selector)),
      [],
      name,
    );
    assert.deepEqual(
      keyframes.filter((one) => !one.startsWith(`${root}-`)),
      [],
      `${name}: names of @keyframes are global`,
    );
  }
});

test("sources: a folder writes under its own root, src/shared under .exl2nb", () => {
  for (const folder of readdirSync("src", { withFileTypes: true }).filter((entry) => entry.isDirectory())) {
    const root = folder.name === "shared" ? "exl2nb" : `exl2nb-${folder.name}`;
    for (const name of readdirSync(join("src", folder.name)).filter((one) => one.endsWith(".css"))) {
      const { selectors } = read(readFileSync(join("src", folder.name, name), "utf8"));
      assert.deepEqual(
        selectors.filter((selector) => !(under(root)(selector) || /^\.jp-OutputArea-child:has\(\.exl2nb\)/.test(selector))),
        [],
        `${folder.name}/${name}`,
      );
    }
  }
});

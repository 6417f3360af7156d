// Bundles site/browser.ts, the kernel of the site's page without one, into ../docs/site/browser.js, and
// every src/<widget>/index.ts into ../exl2nb/static/<widget>.{js,css}. The output is committed, so installing never needs node.
// A notebook page holds the style sheets of all widgets shown on it. In each of them `.exl2nb`, the root in src/shared, becomes the root of
// its own widget, so that no rule of one widget can match inside another; tests/css.test.ts holds that.
// --watch rebuilds with source maps; --tests compiles tests/*.test.ts for `node --test`; --check fails when the committed bundles are stale.
import { readdirSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { basename, dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import * as esbuild from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = resolve(here, "../exl2nb/static");
const limitBytes = 50_000; // the whole text travels with every instance and is saved with the notebook
const watch = process.argv.includes("--watch");
const checking = process.argv.includes("--check");

const widgets = readdirSync(join(here, "src"), { withFileTypes: true })
  .filter((entry) => entry.isDirectory() && entry.name !== "shared")
  .map((entry) => ({ in: join(here, "src", entry.name, "index.ts"), out: entry.name }));

/** @type {esbuild.Plugin} */
const rooted = {
  name: "rooted",
  setup(build) {
    build.onEnd((result) => {
      for (const file of result.outputFiles ?? []) {
        const root = `.exl2nb-${basename(file.path, ".css")}`;
        const text = file.path.endsWith(".css") ? file.text.replace(/\.exl2nb(?![\w-])/g, root) : file.text;
        file.contents = new TextEncoder().encode(text);
        if (!checking) writeFileSync(file.path, file.contents);
      }
    });
  },
};

/** @type {esbuild.BuildOptions} */
const options = {
  absWorkingDir: here,
  entryPoints: [...widgets, { in: join(here, "src/shared/host.ts"), out: "host" }],
  outdir: out,
  write: false,
  plugins: [rooted],
  bundle: true,
  splitting: false, // the text is imported from a blob: URL, where a relative chunk cannot resolve
  format: "esm",
  target: ["es2022"],
  minify: !watch,
  sourcemap: watch ? "inline" : false,
  define: { "define.amd": "false" },
  legalComments: "none",
  charset: "utf8",
  logLevel: "warning",
};

const site = resolve(here, "../docs/site/browser.js");
const { outdir: _, ...shared } = options;
const siteOptions = { ...shared, entryPoints: [join(here, "site/browser.ts")], outfile: site, plugins: [], sourcemap: false };

async function buildTests() {
  const tests = readdirSync(join(here, "tests")).filter((name) => name.endsWith(".test.ts"));
  rmSync(join(here, "tests/.build"), { recursive: true, force: true });
  await esbuild.build({
    absWorkingDir: here,
    entryPoints: tests.map((name) => join("tests", name)),
    outdir: "tests/.build",
    outExtension: { ".js": ".mjs" },
    bundle: true,
    platform: "node",
    format: "esm",
    target: ["node20"],
    loader: { ".css": "empty" },
    logLevel: "warning",
  });
}

async function check() {
  const results = await Promise.all([esbuild.build(options), esbuild.build(siteOptions)]);
  const stale = results
    .flatMap((result) => result.outputFiles)
    .filter((file) => {
      try {
        return !readFileSync(file.path).equals(file.contents);
      } catch {
        return true;
      }
    });
  if (stale.length) {
    console.error(
      `stale: ${stale.map((file) => file.path).join(", ")}; run \`npm run build\` and commit exl2nb/static and docs/site/browser.js`,
    );
    process.exitCode = 1;
  }
}

if (process.argv.includes("--tests")) await buildTests();
else if (checking) await check();
else if (watch) await (await esbuild.context(options)).watch();
else {
  await esbuild.build(options);
  await esbuild.build({ ...siteOptions, write: true });
  for (const name of readdirSync(out).sort()) {
    const bytes = statSync(join(out, name)).size;
    console.log(`${name} ${(bytes / 1000).toFixed(1)} kB`);
    if (bytes > limitBytes) {
      console.error(`${name} is larger than ${limitBytes / 1000} kB`);
      process.exitCode = 1;
    }
  }
}

"""Lighthouse on the landing page.

    python tools/lighthouse.py [--build build/site] [--least 95]

Serves the built site on a port of this machine and runs npm's `lighthouse` on it with the Chromium that is installed, as a telephone and as
a desktop computer. Ends with 1 where accessibility or performance is below `--least`. Performance depends on the machine: run it on an idle
one.
"""

from __future__ import annotations

import argparse
import gzip
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIGHTHOUSE = "lighthouse@12"
FLAGS = "--headless --no-sandbox --disable-gpu"
CATEGORIES = ("performance", "accessibility", "best-practices")
TEXTS = {".html", ".css", ".js", ".json", ".svg", ".wasm"}


class Compressed(http.server.SimpleHTTPRequestHandler):
    """Texts compressed, as every host of pages does."""

    def log_message(self, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        """Answer with a file."""
        path = Path(self.translate_path(self.path))
        path = path / "index.html" if path.is_dir() else path
        if not path.is_file() or path.suffix not in TEXTS or "gzip" not in self.headers.get("Accept-Encoding", ""):
            super().do_GET()
            return
        data = gzip.compress(path.read_bytes())
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def scores(address: str, *, desktop: bool) -> dict[str, Any]:
    """Scores 0 to 100, and bytes of all that was loaded."""
    chromium = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
    if chromium is None:
        raise SystemExit("no Chromium; on Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = ["npx", "--yes", LIGHTHOUSE, address, "--quiet", "--output=json", f"--output-path={report}", f"--chrome-flags={FLAGS}"]
        command += [f"--only-categories={','.join(CATEGORIES)}", *(["--preset=desktop"] if desktop else [])]
        subprocess.run(command, check=True, env={**os.environ, "CHROME_PATH": chromium}, cwd=folder, stdout=sys.stderr)
        found = json.loads(report.read_text(encoding="utf-8"))
    audits = found["audits"]
    for audit in audits.values():
        if audit["score"] is not None and audit["score"] < 0.9 and audit["scoreDisplayMode"] in ("binary", "numeric", "metricSavings"):
            print(f"  {audit['id']}: {audit.get('displayValue') or audit['title']}", file=sys.stderr)
    result = {name: round(100 * found["categories"][name]["score"]) for name in CATEGORIES}
    return {
        **result,
        "bytes": audits["total-byte-weight"]["numericValue"],
        "lcp_ms": round(audits["largest-contentful-paint"]["numericValue"]),
    }


def main() -> int:
    """Print the scores as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--least", type=int, default=95)
    args = parser.parse_args()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Compressed, directory=args.build)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/index.html"
        found = {"mobile": scores(address, desktop=False), "desktop": scores(address, desktop=True)}
        server.shutdown()
    print(json.dumps(found, indent=1))
    return 0 if all(one[name] >= args.least for one in found.values() for name in ("performance", "accessibility")) else 1


if __name__ == "__main__":
    sys.exit(main())

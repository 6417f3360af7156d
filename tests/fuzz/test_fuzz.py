"""Every target on its seeds, on what a fuzzer once found, and on a few mutations; `make fuzz` runs them for longer."""

import random
from pathlib import Path

import pytest

from .targets import TARGETS

FOLDER = Path(__file__).parent / "finds"
FINDS = [(path.parent.name, path.name) for path in sorted(FOLDER.glob("*/*")) if path.parent.name in TARGETS]


def mutated(seed, rng):
    """A seed with bytes changed, removed, repeated or moved."""
    data = bytearray(seed)
    for _ in range(rng.randint(1, 4)):
        at, to = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
        match rng.randrange(5):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : min(to, at + 16)]
            case 2:
                data[at:at] = data[at : min(to, at + 64)] * rng.randint(1, 4)
            case 3:
                data[at:at] = rng.choice((b"\0", b"[", b"{", b'"', b"-1", b"1e999", b"9" * 30, b"null", b"\\ud800", b"NaN", b"{{", b"%}"))
            case _:
                data[at:to] = data[at:to][::-1] if to - at < 32 else data[at:to]
    return bytes(data)


@pytest.mark.cpu
@pytest.mark.parametrize("name", TARGETS)
def test_mutations(name):
    rng, target = random.Random(name), TARGETS[name]
    seeds = target.seeds()
    for seed in [b"", *seeds]:
        target.run(seed)
    for _ in range(20 if name in ("tokenizer_file", "generation", "template", "http_body") else 60):
        target.run(mutated(rng.choice(seeds), rng))


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "find"), FINDS)
def test_finds(name, find):
    TARGETS[name].run((Path(__file__).parent / "finds" / name / find).read_bytes())

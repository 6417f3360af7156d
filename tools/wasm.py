"""The CPU engine as WebAssembly, and a model's file for it.

    python tools/wasm.py engine docs/site/engine.wasm     # needs PyPI's ziglang
    python tools/wasm.py model build/model.bin [FOLDER]   # FOLDER: an EXL2 model; default: the demo model at 4 bits of the tests

csrc/wasm/engine.cpp says how the file is laid out. It is the program that the loaded model runs here, with offsets in place of addresses.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKED = ROOT / "tests" / "data" / "demo-exl2-4.0bpw"
SOURCES = (
    "csrc/wasm/engine.cpp",
    "csrc/format/blob.cpp",
    *(f"csrc/cpu/{name}.cpp" for name in ("step", "engine", "moe", "memory", "fused_step", "draw", "dispatch")),
)
FAMILIES = ("kernels", "draw")
FLAGS = [
    "-target",
    "wasm32-wasi",
    "-mexec-model=reactor",
    "-std=c++20",
    "-O3",
    "-msimd128",
    "-mbulk-memory",
    "-fno-exceptions",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wl,--strip-all",
    "-Icsrc",
]
MAGIC, VERSION = 0x314D534157324C45, 1


def compile_engine(target: Path) -> None:
    """Compile csrc/cpu and csrc/wasm into one file."""
    with tempfile.TemporaryDirectory() as folder:
        kernels = []
        for family in FAMILIES:  # as CMakeLists.txt does
            kernels.append(Path(folder) / f"{family}_base.cpp")
            kernels[-1].write_text(f'#define EXL2NB_ISA base\n#include "cpu/{family}.inc"\n', encoding="utf-8")
        command = [sys.executable, "-m", "ziglang", "c++", *FLAGS, *SOURCES, *map(str, kernels), "-o", str(target.resolve())]
        subprocess.run(command, cwd=ROOT, check=True)
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB")


def write_model(folder: Path, target: Path) -> None:
    """Write the file of a model whose program has no experts."""
    import numpy as np

    import exl2nb as ex
    from exl2nb.ops.program import HEADER_WORDS
    from exl2nb.ops.records import ADDRESS_KIND, OP_SCHEMA

    with ex.load(folder, device="cpu", progress=None) as llm:
        llm.generate("a", max_tokens=1)  # the program is written before the first step
        program = llm.model._program
        words = program.code.numpy().copy()
        tensors = {tensor.data_ptr(): tensor for tensor in program._tensors}
        names = {code: (name, list(kinds.items())) for name, (code, kinds) in OP_SCHEMA.items()}
        places, at = [], HEADER_WORDS
        while at < len(words):
            _, fields = names[int(words[at])]
            places += [at + 1 + i for i, (_, kind) in enumerate(fields) if kind == ADDRESS_KIND]
            at += 1 + len(fields)
        head = 9 * 8 + len(words) * 8 + len(places) * 8
        offset = (head + 63) // 64 * 64
        pieces: list[bytes] = []
        offsets: dict[int, int] = {}
        for place in places:
            address = int(words[place])
            if address and address not in offsets:
                data = tensors[address].numpy().tobytes()
                offsets[address] = offset
                pieces.append(data + bytes(-len(data) % 64))
                offset += len(pieces[-1])
            words[place] = offsets.get(address, 0)
        config = llm.config
        values = [MAGIC, VERSION, offset, len(words), len(places), config.num_layers, config.num_kv_heads, config.head_dim, llm.context]
        first = np.array(values, np.int64).tobytes() + words.tobytes() + np.array(places, np.int64).tobytes()
        target.write_bytes(first + bytes(-len(first) % 64) + b"".join(pieces))
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    engine, model = commands.add_parser("engine"), commands.add_parser("model")
    engine.add_argument("target", type=Path)
    model.add_argument("target", type=Path)
    model.add_argument("folder", type=Path, nargs="?", default=PACKED)
    args = parser.parse_args()
    compile_engine(args.target) if args.command == "engine" else write_model(args.folder, args.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Two versions of exl2nb in turns on one machine: import, load, first and later renders of a chat, first token, decode.

    python benchmarks/versions.py --before 59661c4 [--after HEAD] [--rounds 9] [--model DIR] [--device cpu] [--folder build/versions]

Checks both commits out below --folder, compiles their libraries (once), then starts a fresh process of one and of the other in turns, so
that a machine that slows down does so for both. Import and load are processor time; renders and tokens are timed one by one, and the tenth
of them that was disturbed least counts: this holds on a machine that is busy, too. Prints for each figure the smallest and the median of
both and the ratio after / before of the smallest, and says which are more than 2 % worse. 59661c4 is the last commit before strangers'
files were handled in helper processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "tests" / "data" / "demo-exl2-4.0bpw"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
BOUND = 1.02


def worker(checkout: str, model: str, device: str) -> None:
    """In a process of its own: one round of one version."""
    figures, clock, processor = {}, time.perf_counter, time.process_time
    start = processor()
    import exl2nb

    figures["import_cpu_s"] = processor() - start
    assert Path(exl2nb.__file__).is_relative_to(checkout), exl2nb.__file__
    exl2nb.__path__.append(str(Path(checkout) / "build" / "library"))
    import torch  # not part of the load

    torch.set_num_threads(min(2, torch.get_num_threads()))
    start = processor()
    llm = exl2nb.load(model, device=device, progress=None)
    figures["load_cpu_s"] = processor() - start
    time.sleep(1)  # a helper process may be starting
    messages = [
        {"role": "user", "content": "What is a river?"},
        {"role": "assistant", "content": "Water."},
        {"role": "user", "content": "Why?"},
    ]
    start = clock()
    llm.render(messages)
    figures["first_render_s"] = clock() - start
    renders = []
    for _ in range(200):
        start = clock()
        llm.render(messages)
        renders.append(clock() - start)
    figures["render_s"] = _undisturbed(renders)
    ids = [5 + i * 7 % 180 for i in range(256)]
    llm.generate(ids[:32], max_tokens=8, temperature=0, ignore_eos=True)
    firsts, tokens = [], []
    for i in range(16):
        times = [clock()]
        for chunk in llm.stream([4 + i, *ids], max_tokens=65, temperature=0, ignore_eos=True):
            times += [clock()] * len(chunk.tokens)
        firsts.append(times[1] - times[0])
        tokens.append((times[-1] - times[1]) / (len(times) - 2))
    figures["first_token_s"], figures["token_s"] = min(firsts), min(tokens)
    assert "cpu" in __import__("exl2nb.ops._load", fromlist=["load"]).load().loaded, "the compiled library was not found"
    print(json.dumps(figures))


def _undisturbed(times: list[float]) -> float:
    """The mean of the smallest tenth."""
    return statistics.mean(sorted(times)[: max(1, len(times) // 10)])


def prepare(commit: str, folder: Path, device: str) -> Path:
    """A checkout of a commit with its compiled libraries below build/library."""
    commit = subprocess.run(["git", "rev-parse", "--short=10", commit], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    place = folder / commit
    library = place / "build" / "library"
    if not (library / "libexl2nb_cpu.so").exists():
        place.mkdir(parents=True, exist_ok=True)
        archive = subprocess.Popen(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", str(place)], stdin=archive.stdout, check=True)
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "CCACHE_BASEDIR": str(place)}
        configure = ["cmake", "-S", str(place), "-B", str(library), "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
        targets = ["exl2nb_cpu", *(["exl2nb_cuda"] if device != "cpu" else [])]
        for command in (configure, ["cmake", "--build", str(library), "--target", *targets]):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return place


def with_template(model: Path, folder: Path) -> Path:
    """The model with a chat template of its own, as chat models have one."""
    folder.mkdir(exist_ok=True)
    for file in model.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def once(checkout: Path, model: Path, device: str) -> dict[str, float]:
    """One round. -S: an installed exl2nb would come first."""
    packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    code = f"import sys; sys.path[:0] = {[str(checkout), str(Path(__file__).parent), *packages]!r}; import versions; "
    code += f"versions.worker({str(checkout)!r}, {str(model)!r}, {device!r})"
    # an installed package has bytecode
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{checkout.name}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Prepare, run in turns, print; 1 where a figure is more than 2 % worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="59661c4")
    parser.add_argument("--after", default="HEAD")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions")
    args = parser.parse_args()
    places = [prepare(commit, args.folder.absolute(), args.device) for commit in (args.before, args.after)]
    model = with_template(args.model.absolute(), args.folder.absolute() / "model")
    for place in places:
        once(place, model, args.device)  # files into the page cache, tokenizers tried, kernels compiled
    rounds: list[list[dict[str, float]]] = [[], []]
    for number in range(args.rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            rounds[which].append(once(places[which], model, args.device))
    worse = []
    for name in rounds[0][0]:
        before, after = ([one[name] for one in some] for some in rounds)
        ratio = min(after) / min(before)
        row = {
            "figure": name,
            "before": [min(before), statistics.median(before)],
            "after": [min(after), statistics.median(after)],
            "ratio": round(ratio, 4),
        }
        print(json.dumps(row))
        worse += [name] if ratio > BOUND else []
    print(f"{places[0].name} and {places[1].name}, {args.rounds} rounds: more than 2 % worse: {', '.join(worse) or 'none'}")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())

"""What Python and TypeScript both compute, compared on random inputs: node runs the modules of widgets/src."""

import json
import random
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import exl2nb as ex
from exl2nb.core import show
from exl2nb.llm.memory import Stage
from exl2nb.llm.split_plan import Holder, KindFormula, SplitFormula
from exl2nb.widgets import static
from exl2nb.widgets.memory_plan import wire
from exl2nb.widgets.static import kl_step

WIDGETS = Path(__file__).parents[2] / "widgets"
ESBUILD = WIDGETS / "node_modules" / ".bin" / "esbuild"
READY = shutil.which("node") and ESBUILD.exists()
pytestmark = pytest.mark.skipif(not READY, reason="no node or no node_modules: run `npm ci` in widgets/")


def in_node(code: str, inputs: object) -> list:
    """What `code`, a TypeScript module that defines `answer(input)`, answers to each of the inputs."""
    ends = "\nimport { readFileSync } from 'node:fs';\nconsole.log(JSON.stringify(JSON.parse(readFileSync(0, 'utf8')).map(answer)));\n"
    build = [ESBUILD, "--bundle", "--format=cjs", "--platform=node", "--loader=ts"]
    bundle = subprocess.run(build, input=code + ends, cwd=WIDGETS, capture_output=True, text=True, check=True, timeout=60).stdout
    program = f"process.argv.splice(1);{bundle}"
    ran = subprocess.run(["node", "-e", program], input=json.dumps(inputs), capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)


def random_formula(seeded: random.Random):
    demo = ex.plan(Path(ex.__file__).parent / "demo_model").formula
    return replace(
        demo,
        weights=seeded.choice([2**19, 2**20, 10 * 2**20 - 1, 10 * 2**20, seeded.randrange(10**11)]),
        page_bytes={mode: seeded.randrange(10**7) for mode in ("fp16", "q4")},
        chunk=seeded.randrange(1, 4096),
        stages=tuple(Stage(*(seeded.randrange(10**n) for n in (9, 6, 5))) for _ in range(seeded.randrange(4))),
        graph_fixed=seeded.randrange(10**9),
        graph_row=seeded.randrange(10**7),
        logits_row=seeded.randrange(10**6),
        segments=seeded.randrange(2),
        adapters=seeded.randrange(10**8),
    )


def random_choice(seeded: random.Random) -> dict:
    context = seeded.randrange(1, 2 ** seeded.randrange(1, 18))
    return {"context": context, "batch": seeded.randrange(1, 80), "mode": seeded.choice(["fp16", "q4"])}


def test_memory_plans_agree():
    seeded = random.Random(1)
    cases = [(random_formula(seeded), random_choice(seeded)) for _ in range(300)]
    code = 'import { parts } from "./src/plan/formula";\nconst answer = ([formula, choice]) => parts(formula, choice);'
    for (formula, choice), sizes in zip(cases, in_node(code, [(formula.to_dict(), choice) for formula, choice in cases])):
        assert sizes == formula.parts(**choice), f"the page and Python plan {choice} of {formula} differently"


def test_split_plans_agree():
    seeded = random.Random(2)
    cases = []
    for _ in range(200):
        layers, gpus = seeded.randrange(1, 70), seeded.randrange(1, 4)
        parts = [tuple(seeded.randrange(10**8) for _ in range(layers + 2)) for _ in range(4)]
        kinds = {
            kind: KindFormula(parts=a, read=b, stream=seeded.randrange(10**6), lent=seeded.randrange(10**6), formula=random_formula(seeded))
            for kind, a, b in (("cpu", *parts[:2]), ("cuda", *parts[2:]))
        }
        devices = (*([Holder("cpu")] if seeded.randrange(3) else []), *(Holder(f"cuda:{i}") for i in range(gpus)))
        borders = sorted(seeded.randrange(layers + 1) for _ in devices[1:])
        cases.append((SplitFormula(devices=devices, kinds=kinds, lends=seeded.random() < 0.8), borders, random_choice(seeded)))
    code = 'import { shares } from "./src/plan/split_formula";\nconst answer = (given) => shares(...given);'
    answers = in_node(code, [(wire(split), borders, choice) for split, borders, choice in cases])
    for (split, borders, choice), found in zip(cases, answers):
        expected = [
            {name: getattr(one, name) for name in ("device", "first", "last", "weights", "cache", "work", "read", "total")}
            for one in split.shares(borders, **choice)
        ]
        assert [one for one in found if one["last"] > one["first"]] == expected, f"borders {borders}, {choice}, lends {split.lends}"


def test_colours_and_numbers_agree():
    seeded = random.Random(3)
    numbers = [seeded.uniform(-1, 9) for _ in range(300)]
    probs = [None, 0, 1, *static.SURPRISE_LIMITS, *(10 ** seeded.uniform(-4, 0.5) for _ in range(100))]
    sizes = [0, 1023, *(int(2 ** seeded.uniform(0, 45)) for _ in range(200))]
    code = """
        import { bytes, surprise } from "./src/shared/format";
        import { klStep } from "./src/shared/kl";
        import { colour, diverging, ink } from "./src/shared/palette";
        const named = { bytes, surprise, klStep, colour, diverging, ink: (bits) => ink(colour(bits)) };
        const answer = ([name, inputs]) => inputs.map(named[name]);
    """
    inputs = {"bytes": sizes, "surprise": probs, "klStep": probs, "colour": numbers, "diverging": numbers, "ink": numbers}
    here = {
        "bytes": show.size_text,
        "surprise": lambda prob: -1 if prob is None else static.surprise(prob),
        "klStep": lambda kl: -1 if kl is None else kl_step(kl),
        "colour": lambda bits: [*show.colour(bits)],
        "diverging": lambda difference: [*show.diverging(difference)],
        "ink": lambda bits: {(0, 0, 0): "#000", (255, 255, 255): "#fff"}[show.ink(show.colour(bits))],
    }
    for (name, given), found in zip(inputs.items(), in_node(code, [*inputs.items()])):
        wrong = [(x, there) for x, there in zip(given, found) if there != here[name](x)]
        assert not wrong, f"{name} differs from Python's for {wrong[:3]}"


def test_tints_agree():
    css = (WIDGETS / "src" / "shared" / "base.css").read_text(encoding="utf-8")
    found = re.findall(r"--exl-tint-\d: rgb\((\d+) (\d+) (\d+) / (\d+)%\);", css)
    assert ["transparent", *(f"rgba({r},{g},{b},.{share})" for r, g, b, share in found)] == [*static.HIGHLIGHT_TINTS]

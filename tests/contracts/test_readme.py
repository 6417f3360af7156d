"""What the README shows is what happens."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_prints_what_it_says():
    code, output = re.search(r"```python\n(.*?)```\n+```\n(.*?)```", README, re.S).groups()
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().strip() == output.strip()


def test_the_commands_exist():
    from exl2nb.cli.commands import COMMANDS

    named = set(re.findall(r"`(?:exl2nb )?(convert|generate|chat|eval|inspect|logits|doctor|demo)\b", README))
    assert {"convert", "generate", "chat", "eval", "inspect", "logits", "doctor"} <= named
    assert named <= set(COMMANDS)
    targets = set(re.findall(r"(?:^    |`)make ([a-z-]+)", README, re.M))
    makefile = (ROOT / "Makefile").read_text()
    assert not [t for t in targets if not re.search(rf"^{t}:", makefile, re.M)]


def test_links_lead_somewhere():
    linked = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert linked
    assert not [link for link in linked if not (ROOT / link).exists()]


def test_every_benchmark_is_described():
    described = (ROOT / "benchmarks" / "README.md").read_text()
    scripts = [p.relative_to(ROOT / "benchmarks").as_posix() for p in (ROOT / "benchmarks").rglob("*") if p.suffix in (".py", ".cu")]
    assert len(scripts) > 10
    assert not [script for script in scripts if f"`{script}" not in described]

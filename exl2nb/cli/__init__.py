"""Floor 8: the command line. `main` finds the command, runs it, and turns errors into one clear line and an exit code."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run `exl2nb ARGV` and return its exit code: 0 done, 1 the work failed, 2 the request cannot be met, 130 interrupted."""
    from exl2nb.cli.commands import run

    return run(argv)

"""`python -m exl2nb` is the command `exl2nb`."""

from exl2nb.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

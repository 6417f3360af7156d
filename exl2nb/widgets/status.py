"""What a widget is doing, as one word that both halves know."""

from __future__ import annotations

from typing import Literal

Status = Literal["idle", "loading", "running", "stopped", "done", "error"]

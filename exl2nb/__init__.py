"""exl2nb: EXL2-quantised language models in a notebook.

Public names load lazily: importing the package touches neither torch nor Jupyter.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; at run time `__getattr__` below does it
    from exl2nb import sampling as sampling
    from exl2nb import widgets as widgets
    from exl2nb.converter.conversion_job import ConversionJob as ConversionJob
    from exl2nb.converter.conversion_job import demo_measurement as demo_measurement
    from exl2nb.converter.conversion_job import measure as measure
    from exl2nb.converter.publish import pull as pull
    from exl2nb.converter.publish import push as push
    from exl2nb.core import errors as errors
    from exl2nb.core.check import check as check
    from exl2nb.generator.job import Job as Job
    from exl2nb.integrations.evaluate import evaluate as evaluate
    from exl2nb.io.metadata import revisions as revisions
    from exl2nb.llm.functions import compare as compare
    from exl2nb.llm.functions import convert as convert
    from exl2nb.llm.functions import demo as demo
    from exl2nb.llm.functions import inspect as inspect
    from exl2nb.llm.llm import LLM as LLM
    from exl2nb.llm.load import load as load
    from exl2nb.llm.memory import MemoryPlan as MemoryPlan
    from exl2nb.llm.plan import plan as plan
    from exl2nb.llm.sweep import sweep as sweep
    from exl2nb.model.lora_merge import merge as merge
    from exl2nb.model.vision.pictures import Image as Image

__version__ = "0.2.0"

_PUBLIC = {
    "ConversionJob": "exl2nb.converter.conversion_job",
    "Image": "exl2nb.model.vision.pictures",
    "Job": "exl2nb.generator.job",
    "LLM": "exl2nb.llm.llm",
    "MemoryPlan": "exl2nb.llm.memory",
    "check": "exl2nb.core.check",
    "compare": "exl2nb.llm.functions",
    "convert": "exl2nb.llm.functions",
    "demo": "exl2nb.llm.functions",
    "demo_measurement": "exl2nb.converter.conversion_job",
    "errors": "exl2nb.core",
    "evaluate": "exl2nb.integrations.evaluate",
    "inspect": "exl2nb.llm.functions",
    "load": "exl2nb.llm.load",
    "measure": "exl2nb.converter.conversion_job",
    "merge": "exl2nb.model.lora_merge",
    "plan": "exl2nb.llm.plan",
    "pull": "exl2nb.converter.publish",
    "push": "exl2nb.converter.publish",
    "revisions": "exl2nb.io.metadata",
    "sampling": "exl2nb",
    "sweep": "exl2nb.llm.sweep",
    "widgets": "exl2nb",
}
__all__ = [  # noqa: RUF022 - sorted plainly, as dir() shows them
    "ConversionJob",
    "Image",
    "Job",
    "LLM",
    "MemoryPlan",
    "check",
    "compare",
    "convert",
    "demo",
    "demo_measurement",
    "errors",
    "evaluate",
    "inspect",
    "load",
    "measure",
    "merge",
    "plan",
    "pull",
    "push",
    "revisions",
    "sampling",
    "sweep",
    "widgets",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'exl2nb' has no attribute {name!r}; public names: {', '.join(__all__)}")
    if name in ("errors", "sampling", "widgets"):
        return importlib.import_module(f"{_PUBLIC[name]}.{name}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def load_ipython_extension(ipython: Any) -> None:
    """What `%load_ext exl2nb` calls: adds the magics %exl2 and %%ask."""
    importlib.import_module("exl2nb.widgets.magics").register(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """What `%unload_ext exl2nb` calls."""
    importlib.import_module("exl2nb.widgets.magics").unregister(ipython)

"""Options and fixtures that every test may use.

`--device cuda` loads the models of the tests on the GPU with deterministic=True. Without it they run on the CPU, even where there is a GPU.
A test that names a device uses that device either way.
"""

import gc
import importlib.util
import logging
import os
import signal
import sys
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where models run whose test names no device")


def pytest_configure(config):
    """Set the device through the environment: processes that tests start inherit it, and the handler of Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores Ctrl-C in background jobs
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):  # an xdist worker: spinning threads would take the other worker's core
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    device = config.getoption("--device")
    os.environ["EXL2NB_DEVICE"] = device
    if device == "cuda":
        os.environ["EXL2NB_DETERMINISTIC"] = "1"


def pytest_collection_modifyitems(config, items):
    if config.getoption("--device") == "cuda":
        skip = pytest.mark.skip(reason="about the engine on the CPU")
        for item in items:
            if item.get_closest_marker("cpu"):
                item.add_marker(skip)


def pytest_collection_finish(session):
    """Keep what was imported for the tests out of later garbage collections: one of all of it takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def device(request):
    """Device of the models: "cpu" or "cuda"."""
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def near(device):
    """Largest accepted difference of a log probability from fp32. The GPU computes with fp16 activations."""
    return 1e-3 if device == "cpu" else 0.03


@pytest.fixture(autouse=True)
def _cuda_library(request):
    """A test marked gpu fails at once where the CUDA library is not loaded."""
    if request.node.get_closest_marker("gpu"):
        from exl2nb import ops

        assert "cuda" in ops.libraries().loaded, f"the CUDA library is not loaded: {ops.libraries().cuda_problem}"


@pytest.fixture
def threads():
    """Sets the number of torch's threads for one test."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def script():
    """Imports a script, given its path from the root of the repository."""

    def load(path):
        path = Path(__file__).parents[1] / path
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(autouse=True)
def _package_logger():
    """A library that configures logging in one test must not silence the package's loggers in the next."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "exl2nb" and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True


@pytest.fixture(scope="session")
def _demo():
    import exl2nb as ex

    with ex.demo(progress=None) as model:
        yield model


@pytest.fixture(scope="session")
def llm(_demo):
    """The demo model, loaded once per session with the default options. Do not close it; load your own to change its options."""
    return _demo


@pytest.fixture
def fresh_llm(llm):
    """`llm` with an empty prompt cache: no page of an earlier test is reused."""
    assert llm.engine.wait_idle(10)
    llm.cache.clear()
    return llm


@pytest.fixture(autouse=True)
def _shared_model_stays_usable(request):
    """A test that used the shared model leaves it open and idle, with all pages free and prefix reuse on."""
    model = request.getfixturevalue("_demo") if "_demo" in request.fixturenames else None
    yield
    if model is not None:
        assert not model.engine.closed, "the test closed the shared model"
        assert model.engine.wait_idle(10), "a request of this test still runs"
        assert model.engine.pages.num_free == model.engine.pages.num_pages, "pages of this test are still referenced"
        assert model.cache.reuse, "the test left prefix reuse off"

"""What every test starts from, and where its models run.

`--device cuda` runs the same tests with every model on the GPU, loaded with deterministic=True; without it models are on the CPU, also
where there is a GPU. Tests that name a device load there either way.
"""

import logging
import os
import signal

import pytest


def pytest_addoption(parser):
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where models run whose test names no device")


def pytest_configure(config):
    """As environment, so that the processes which tests start follow too; these also inherit what becomes of Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so shells start what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):  # one of several processes: threads that wait for work would take the other one's core
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


@pytest.fixture(scope="session")
def device(request):
    """Where models run: "cpu" or "cuda"."""
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def near(device):
    """How far a log probability may be from fp32's: the GPU computes with fp16 activations."""
    return 1e-3 if device == "cpu" else 0.03


@pytest.fixture(autouse=True)
def _package_logger():
    """A library that configures logging in one test must not silence the package's logger in the next."""
    logger = logging.getLogger("exl2nb")
    logger.disabled, logger.propagate = False, True

"""What every test starts from."""

import logging

import pytest


@pytest.fixture(autouse=True)
def _package_logger():
    """A library that configures logging in one test must not silence the package's logger in the next."""
    logger = logging.getLogger("exl2nb")
    logger.disabled, logger.propagate = False, True

"""The package logger; silent unless the user configures logging."""

import logging

logger = logging.getLogger("exl2nb")
logger.addHandler(logging.NullHandler())

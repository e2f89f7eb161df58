"""What all tests of the command need."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    """The root command sets the process's logging up; other tests have their own."""
    logger, handlers = logging.getLogger(), logging.getLogger().handlers[:]
    levels = logger.level, logging.getLogger("nagara").level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(levels[0])
    logging.getLogger("nagara").setLevel(levels[1])

"""The package transformers, for the few models that are not computed by our own modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedvlm.errors import FedvlmError
from fedvlm.system.timing import timed


@contextmanager
def transformers_for(what: str) -> Iterator[Any]:
    """The package, without its progress bars and warnings: what is wrong with a model is an error here."""
    with timed("import"):
        try:
            import transformers
            from transformers.utils import logging
        except ImportError as error:
            raise FedvlmError(f"{what} is computed by transformers: pip install 'fedvlm[transformers]'") from error
    before = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield transformers
    finally:
        logging.set_verbosity(before)

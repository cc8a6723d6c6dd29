"""Infrastructure logs go to a file, so that the terminal stays the user's."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class _ToUser(logging.Handler):
    """Our own warnings are for the user to see."""

    def __init__(self, say: Callable[[str], None]):
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())


@contextmanager
def log_to_file(path: Path, say: Callable[[str], None]) -> Iterator[logging.Logger]:
    """Send the logs and warnings of all libraries to `path`, and hybridrl's own warnings to `say` as well.

    Yields the logger of the run.
    """
    root, ours = logging.getLogger(), logging.getLogger("hybridrl")
    to_file, to_user = logging.FileHandler(path), _ToUser(say)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level = root.level
    root.addHandler(to_file)
    root.setLevel(logging.INFO)
    ours.addHandler(to_user)
    logging.captureWarnings(True)
    try:
        yield logging.getLogger("run")
    finally:
        logging.captureWarnings(False)
        ours.removeHandler(to_user)
        root.removeHandler(to_file)
        root.setLevel(level)
        to_file.close()

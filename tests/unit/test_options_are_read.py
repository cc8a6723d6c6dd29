"""An option that nothing reads does not exist: every field of every config class is used outside hybridrl/config."""

import dataclasses
import re
from pathlib import Path

from hybridrl import config

ROOT = Path(__file__).resolve().parents[2]


def test_every_option_is_read_somewhere():
    files = [*(ROOT / "hybridrl").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
    source = "\n".join(file.read_text() for file in files if ROOT / "hybridrl/config" not in file.parents)
    options = {f"{cls.__name__}.{field.name}" for cls in vars(config).values() if dataclasses.is_dataclass(cls)
               for field in dataclasses.fields(cls)}
    assert len(options) > 80
    unread = {option for option in options if not re.search(rf"\.{option.partition('.')[2]}\b", source)}
    assert unread == set()

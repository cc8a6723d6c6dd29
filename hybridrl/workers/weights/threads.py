"""Work on as many threads as torch computes with, for functions that release the GIL."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(items: Sequence[Item], function: Callable[[Item], Result]) -> list[Result]:
    """function(item) for all items."""
    threads = min(torch.get_num_threads(), len(items))
    if threads <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))


def spans(total: int) -> list[tuple[int, int]]:
    """The range of 0 .. total in equal parts, one a thread."""
    threads = torch.get_num_threads()
    return [(total * i // threads, total * (i + 1) // threads) for i in range(threads)]

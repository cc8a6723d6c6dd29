"""Work on as many threads as torch computes with, for functions that release the GIL."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(items: Sequence[Item], function: Callable[[Item], Result]) -> list[Result]:
    """function(item) for all items. The caller's thread works too: others, which wake late, take what is left."""
    others = min(torch.get_num_threads(), len(items)) - 1
    if others < 1:
        return [function(item) for item in items]
    found: dict[int, Result] = {}
    left = iter(range(len(items)))

    def work() -> None:
        for number in left:
            found[number] = function(items[number])

    helpers = [_pool(others, os.getpid()).submit(work) for _ in range(others)]
    try:
        work()
    finally:
        wait([helper for helper in helpers if not helper.cancel()])
    for helper in helpers:
        if not helper.cancelled():
            helper.result()
    return [found[number] for number in range(len(items))]


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads that stay; a forked process has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="weights")


def spans(total: int) -> list[tuple[int, int]]:
    """The range of 0 .. total in equal parts, a few a thread."""
    parts = 4 * torch.get_num_threads()
    return [(total * i // parts, total * (i + 1) // parts) for i in range(parts)]

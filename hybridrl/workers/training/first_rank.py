"""Work that rank 0 does for all, so that its failure is everybody's failure and nobody waits forever."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from hybridrl.errors import HybridRLError

Result = TypeVar("Result")


def on_first_rank(work: Callable[[], Result], error: type[HybridRLError]) -> Result:
    """Run `work` on rank 0 and hand its (small, picklable) result to every rank; collective.

    Raises `error` on every rank, with rank 0's message, when `work` raises a HybridRLError or an OSError.
    """
    outcome: list = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[1] = work()
        except (HybridRLError, OSError) as failure:
            outcome[0] = str(failure)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise error(outcome[0])
    return outcome[1]

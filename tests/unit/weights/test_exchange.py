"""The exchange on four ranks, sharded by one dimension and by one of two."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hybridrl.workers.weights.exchange import Traffic, exchange, sharding
from hybridrl.workers.weights.plan import make_plan, needed_elements
from hybridrl.workers.weights.regions import Copy, Region, whole

RANKS = 4
SHAPES = {"even": (8, 3), "uneven": (5, 2), "one_row": (1, 7), "vector": (6,), "cube": (4, 2, 2), "empty": (0, 4),
          "buffer": (2,)}


def whole_weights():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def layout(peer: int) -> list[Copy]:
    """What two tensor-parallel peers read: halves by rows and by columns, a tied weight, the rest whole."""
    rows, columns = Region(12 * peer, (4, 3), (3, 1)), Region(peer, (5, 1), (2, 1))
    return [Copy("even", rows, "even", whole((4, 3))), Copy("even", rows, "tied", whole((4, 3))),
            Copy("uneven", columns, "uneven", whole((5, 1))),
            *(Copy(name, whole(SHAPES[name]), name, whole(SHAPES[name]))
              for name in ("one_row", "vector", "cube", "empty", "buffer"))]


def exchange_on_four_ranks(rank, file, failures):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS,
                            timeout=timedelta(seconds=200))
    try:
        full = whole_weights()
        for mesh, placements in ((init_device_mesh("cpu", (4,)), [Shard(0)]),
                                 (init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)])):
            weights = [(name, distribute_tensor(value, mesh, placements if name != "buffer" else
                                                [Replicate()] * mesh.ndim)) for name, value in full.items()]
            sharded, group = sharding(weights)
            members = dist.get_process_group_ranks(group)
            layouts = [layout(member % 2) for member in members]
            for dtype in (torch.float32, torch.bfloat16):
                for bucket_elements in (1, 13, 1000):
                    plan = make_plan(sharded, layouts, members.index(rank), bucket_elements)
                    check(weights, plan, dtype, group, rank, {n: v.to(dtype) for n, v in full.items()},
                          needed_elements(sharded, layout(rank % 2), members.index(rank)))
    except BaseException as error:
        failures.put(f"rank {rank}: {error!r}")
        raise
    finally:
        dist.destroy_process_group()


def check(weights, plan, dtype, group, rank, expected, needed):
    traffic = Traffic()
    engine = {copy.parameter: torch.full(copy.target.size, torch.nan, dtype=dtype) for copy in layout(rank % 2)}
    for parameter, target, values in (write for some in exchange(iter(weights), plan, dtype, group, traffic)
                                      for write in some):
        target.of(engine[parameter])[...] = values
    for copy in layout(rank % 2):
        wanted = copy.source.of(expected[copy.weight])
        torch.testing.assert_close(engine[copy.parameter], wanted, atol=0, rtol=0)
    assert traffic.received == needed
    assert traffic.written == sum(values.numel() for values in engine.values())


def test_four_ranks_and_two_peers(tmp_path):
    context = multiprocessing.get_context("spawn")
    failures = context.SimpleQueue()
    processes = multiprocessing.start_processes(
        exchange_on_four_ranks, args=(tmp_path / "meeting", failures), nprocs=RANKS, join=False, start_method="spawn")
    try:
        ended = any(processes.join(timeout=5) for _ in range(48))
    except Exception:
        ended = True
    for process in processes.processes:
        process.kill()
    assert ended, "the ranks wait for each other"
    assert failures.empty(), failures.get()
    assert [process.exitcode for process in processes.processes] == [0] * RANKS

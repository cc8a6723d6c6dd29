"""Worker groups on real processes: splits, futures, failures, deadlines, what is left behind."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import ray
import torch
import torch.distributed as dist

from hybridrl import batch as B
from hybridrl.config import ClusterConfig
from hybridrl.controller import Cluster, WorkerGroup
from hybridrl.controller.cluster import check_ranks
from hybridrl.controller.host import most_threads
from hybridrl.errors import BatchError, ConfigError, DeadlineError, HybridRLError, WorkerError
from tests.distributed.workers import Refusing, Tiny
from tests.processes import ended, wait_for

ROOT = Path(__file__).parents[2]


def rows(count: int):
    """Row i has group id i, a response of i % 3 tokens and an object."""
    return B.make_batch(group_ids=torch.arange(count), response_ids=[[i] * (i % 3) for i in range(count)],
                        answer=[{"row": i} for i in range(count)])


def plain(batch) -> dict:
    return {name: [row.tolist() if isinstance(row, torch.Tensor) else row for row in B.rows_of(batch[name])]
            for name in batch.keys()}


@pytest.fixture
def group_of(shared_pool):
    """`group_of(ranks, ...)`: a group on the shared pool of that size, closed after the test."""
    groups = []

    def make(ranks: int, **kwargs) -> WorkerGroup:
        groups.append(WorkerGroup(Tiny, shared_pool(ranks), role="tiny", **kwargs))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


@pytest.fixture
def tiny(group_of) -> WorkerGroup:
    return group_of(4)


# the three splits

@pytest.mark.parametrize(("count", "ranks"), [
    (10, [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]), (1, [0]), (8, [0, 0, 1, 1, 2, 2, 3, 3]), (0, [])])
def test_any_number_of_rows_over_four_workers(tiny, count, ranks):
    marked = tiny.mark(rows(count))
    expected = plain(rows(count)) | {"rewards": [float(rank) for rank in ranks], "total": [count] * count}
    assert B.num_rows(marked) == count
    assert plain(marked) == expected


def test_to_all_answers_by_rank_and_to_first_runs_on_rank_0_alone(group_of):
    group = group_of(4, start=5)
    assert group.add(2) == 7
    assert group.state() == [(0, None, 7), (1, None, 5), (2, None, 5), (3, None, 5)]
    group.step = 12
    assert group.state() == [(0, 12, 7), (1, 12, 5), (2, 12, 5), (3, 12, 5)]


def test_peers_of_a_shard_get_the_same_rows_and_answer_once(group_of):
    group = group_of(4, shard_ranks=2)
    assert plain(group.mark_shared(rows(3))) == plain(rows(3)) | {"rewards": [0.0, 0.0, 2.0]}
    held = group.mark_shared.future(rows(3))
    assert plain(group.mark(held))["rewards"] == [0.0, 1.0, 2.0]  # another axis of the same group


def test_peers_that_do_not_divide_the_ranks_are_refused(group_of):
    with pytest.raises(ConfigError, match=r"peers\('rollout'\) must divide the 4 ranks of the pool, got 3"):
        group_of(4, shard_ranks=3)


def test_join_first_takes_the_first_shards_value(tiny):
    assert tiny.count(rows(7)) == {"rows": 7, "rank": 0}


def test_lists_join_in_row_order(tiny):
    assert tiny.answers(rows(6)) == [{"row": i} for i in range(6)]
    assert tiny.answers(rows(0)) == []


def test_workers_may_write_into_their_batch_and_the_callers_stays(tiny):
    batch = rows(5)
    scaled = tiny.scale_in_place(batch)
    assert plain(scaled)["group_ids"] == [0, 10, 20, 30, 40]
    assert plain(scaled)["response_ids"] == [[], [10], [20, 20], [], [40]]
    assert plain(batch) == plain(rows(5))
    scaled["group_ids"] += 1  # what came back can be written too


def test_two_batches_of_one_call_are_split_alike(tiny):
    assert plain(tiny.mark(rows(5), rows(5)))["returns"] == [[], [1.0], [2.0, 2.0], [], [4.0]]
    assert plain(tiny.mark(rows(5), other=rows(5)))["returns"] == [[], [1.0], [2.0, 2.0], [], [4.0]]
    with pytest.raises(BatchError, match=r"same number of rows, got \[4, 5\]"):
        tiny.mark(rows(5), rows(4))


def test_costs_decide_which_rows_go_where_and_results_are_in_row_order(group_of):
    group = group_of(2, costly=True)
    batch = B.make_batch(response_ids=[[7] * n for n in (1, 9, 2, 3, 3)], answer=list("abcde"))
    marked = group.mark(batch, batch)
    assert marked["rewards"].tolist() == [1, 0, 1, 1, 1]  # 9 tokens against 1 + 2 + 3 + 3
    assert list(marked["answer"]) == group.answers(batch) == list("abcde")
    assert [len(row) for row in B.rows_of(marked["returns"])] == [1, 9, 2, 3, 3]
    assert group.count(batch)["rows"] == 5
    # rows that nobody can weigh, and those of a future, are consecutive
    assert group.mark(batch.exclude("response_ids"))["rewards"].tolist() == [0, 0, 0, 1, 1]
    assert group.mark.future(batch).result()["rewards"].tolist() == [0, 0, 0, 1, 1]
    with pytest.raises(BatchError, match="must return all of its 2 rows, got 1"):
        group.keep_even(B.make_batch(group_ids=torch.tensor([1, 2]), response_ids=[[1], [2]]))


def test_a_row_call_without_a_batch_is_refused(tiny):
    with pytest.raises(BatchError, match="tiny.mark splits a batch by rows, but no argument is a batch"):
        tiny.mark(3)


def test_batches_reach_every_rank_whole(tiny):
    expected = [(rank, 3, 2) for rank in range(4)]
    assert tiny.whole(rows(3), {"batch": rows(2)}) == expected
    assert tiny.whole(tiny.mark.future(rows(3)), {"batch": rows(2)}) == expected


def test_an_unknown_method_names_the_near_ones(tiny):
    with pytest.raises(AttributeError, match="Unknown method of this group 'mrak'. Did you mean mark"):
        tiny.mrak(rows(1))
    with pytest.raises(AttributeError, match="'peers_of'"):
        tiny.peers_of("rollout")


def test_groups_on_one_pool_share_processes(shared_pool, tiny):
    with pytest.raises(ConfigError, match="this pool has a group of role 'tiny'"):
        WorkerGroup(Tiny, shared_pool(4), role="tiny")
    other = WorkerGroup(Tiny, shared_pool(4), role="other", start=9)
    assert other.process() == tiny.process()
    assert len(set(tiny.process())) == 4
    assert (other.add(1), tiny.add(1)) == (10, 1)
    other.close()
    with pytest.raises(HybridRLError, match="the group 'other' was closed"):
        other.state()
    assert tiny.state()[0] == (0, None, 1)


def test_workers_run_at_the_priority_of_this_process(tiny):
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in tiny.process()} == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_workers_know_their_place(shared_pool, tiny):
    assert tiny.environment("RANK") == ["0", "1", "2", "3"]
    assert tiny.environment("WORLD_SIZE") == ["4"] * 4
    cores = len(os.sched_getaffinity(0))
    assert tiny.environment("OMP_NUM_THREADS") == [str(max(1, min(cores // 4, most_threads() or cores)))] * 4
    assert tiny.environment("VLLM_ENABLE_V1_MULTIPROCESSING") == ["0"] * 4
    assert tiny.environment("HF_HUB_OFFLINE") == ["1"] * 4
    assert len(set(tiny.environment("MASTER_PORT"))) == 1


# futures

def test_a_future_does_not_wait(tiny, tmp_path):
    future = tiny.wait_for.future(str(tmp_path / "go"))
    assert not future.done()
    with pytest.raises(DeadlineError, match="tiny.wait_for did not end in .* ranks still running: 0, 1, 2, 3"):
        future.result(timeout_s=0.05)
    (tmp_path / "go").touch()
    assert future.result() == [0, 1, 2, 3]  # that was the caller's patience, not the call's deadline
    assert future.done()
    assert future.result() == [0, 1, 2, 3]


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("count", [7, 1, 0])
def test_rows_move_between_groups_of_other_sizes(group_of, first, second, count):
    held = group_of(first).scale_in_place.future(rows(count))
    received = group_of(second).mark(held)
    shares = B.split_sizes(count, second)
    ranks = [float(rank) for rank, share in enumerate(shares) for _ in range(share)]
    assert plain(received) == {
        "group_ids": [10 * i for i in range(count)], "response_ids": [[10 * i] * (i % 3) for i in range(count)],
        "answer": [{"row": i} for i in range(count)], "rewards": ranks, "total": [count] * count}


def test_uneven_shares_are_evened_out_by_the_next_group(group_of):
    # Group ids 0..8 over 3 ranks are 0 1 2 | 3 4 5 | 6 7 8: the even ones are 2, 1 and 2 rows.
    held = group_of(3).keep_even.future(rows(9))
    received = plain(group_of(2).mark(held))
    assert received["group_ids"] == [0, 2, 4, 6, 8]
    assert received["rewards"] == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_futures_chain_without_waiting(group_of):
    two, three = group_of(2), group_of(3)
    held = three.scale_in_place.future(two.scale_in_place.future(rows(4)))
    assert plain(two.scale_in_place(held))["group_ids"] == [0, 1000, 2000, 3000]


def test_lists_of_batches_and_futures_are_laid_end_to_end(group_of):
    two, three = group_of(2), group_of(3)
    parts = [two.scale_in_place.future(rows(3)), rows(2), two.keep_even.future(rows(5))]
    assert plain(three.mark(parts))["group_ids"] == [0, 10, 20, 0, 1, 0, 2, 4]


def test_a_batch_and_a_future_of_other_row_counts_are_refused(group_of):
    two = group_of(2)
    with pytest.raises(WorkerError, match=r"BatchError: .*same number of rows, got \[4, 5\]"):
        two.mark(rows(5), two.scale_in_place.future(rows(4)))
    assert plain(two.mark(rows(1)))["group_ids"] == [0]


def test_futures_of_values_become_the_values(group_of):
    two, three = group_of(2), group_of(3)
    assert three.add(two.add.future(4)) == 4
    assert three.mark(rows(1), None) is not None
    with pytest.raises(BatchError, match="tiny.state does not return rows"):
        three.mark(two.state.future())


def test_a_failure_upstream_is_named_and_leaves_the_next_group_usable(group_of):
    two, three = group_of(2), group_of(3)
    two.step = 3
    with pytest.raises(WorkerError, match="tiny rank 0 at step 3: BatchError: no such rows|tiny rank 1 at step 3"):
        three.mark(two.fail_on_rows.future(rows(4)))
    assert plain(three.mark(rows(1)))["group_ids"] == [0]


# failures

def test_a_refusal_by_all_ranks_leaves_the_pool_usable(group_of):
    group = group_of(2)
    group.step = 8
    with pytest.raises(WorkerError, match="^tiny rank [01] at step 8: BatchError: not these$") as caught:
        group.refuse("not these")
    assert isinstance(caught.value.__cause__, BatchError)
    assert "in refuse" in caught.value.remote_traceback
    assert caught.value.step == 8
    assert group.sleep(0) == [0, 1]


def test_a_worker_that_can_not_be_built_says_why(shared_pool):
    with pytest.raises(WorkerError, match="^impossible rank [01]: BatchError: rank [01] was asked") as caught:
        WorkerGroup(Refusing, shared_pool(2), role="impossible")
    assert isinstance(caught.value.__cause__, BatchError)


def test_a_failure_of_one_rank_ends_its_peers_wait_and_stops_the_pool(ray_cluster):
    group = WorkerGroup(Tiny, ray_cluster.pool(2), role="policy")
    group.step = 5
    with pytest.raises(WorkerError, match="^policy rank 1 at step 5: KeyError: 'missing key'$") as caught:
        group.fail(1)
    assert caught.value.rank == 1 and "in fail" in caught.value.remote_traceback
    for call in (group.state, lambda: WorkerGroup(Tiny, group.pool, role="other")):
        with pytest.raises(WorkerError, match=r"stopped by an earlier failure \(KeyError: 'missing key'\)"):
            call()


@pytest.mark.parametrize("barrier", [False, True])
def test_a_killed_process_is_reported_within_seconds(ray_cluster, tmp_path, barrier):
    group = WorkerGroup(Tiny, ray_cluster.pool(2), role="policy")
    pids = group.process()
    group.step = 2
    future = group.hang.future(str(tmp_path), barrier)
    wait_for(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks begin")
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match="^policy rank 1 at step 2: process died: ") as caught:
        future.result(timeout_s=60)  # a quarter of the call's own deadline; seconds where nothing else is to be done
    assert (caught.value.role, caught.value.rank, caught.value.step) == ("policy", 1, 2)
    assert ended(*pids)
    with pytest.raises(WorkerError, match="stopped by an earlier failure .process died"):
        group.state()


def test_a_process_that_exits_between_calls_is_reported(ray_cluster):
    group = WorkerGroup(Tiny, ray_cluster.pool(2), role="policy")
    with pytest.raises(WorkerError, match="^policy rank 0: process died: "):
        group.leave(0)
        group.state()


def test_a_call_that_outlives_its_deadline_names_the_ranks_and_stops_the_pool(ray_cluster):
    group = WorkerGroup(Tiny, ray_cluster.pool(2), role="policy")
    pids = group.process()
    with pytest.raises(DeadlineError, match="policy.sleep did not end in .* s; ranks still running: 0, 1"):
        group.sleep.within(0.2)(300)
    assert ended(*pids)
    with pytest.raises(HybridRLError, match="can't be used any more: policy.sleep did not end"):
        group.state()


def test_a_closed_pool_says_so(ray_cluster):
    group = WorkerGroup(Tiny, ray_cluster.pool(1), role="policy")
    pids = group.process()
    group.pool.close()
    assert ended(*pids)
    with pytest.raises(HybridRLError, match="can't be used any more: it was closed"):
        group.state()


# clusters

def test_more_ranks_than_devices_is_an_error(ray_cluster):
    with pytest.raises(ConfigError, match="cluster.ranks must be between 1 and the 8 CPU cores .* got 9"):
        ray_cluster.pool(9)


def test_pools_together_need_no_more_gpus_than_there_are():
    check_ranks(2, gpus=4, cores=8, held=2)
    with pytest.raises(ConfigError, match="3 devices for one more pool and 2 that this run holds .* the 4 GPUs"):
        check_ranks(3, gpus=4, cores=8, held=2)
    with pytest.raises(ConfigError, match="cluster.ranks must be between 1 and the 4 GPUs of this cluster, got 5"):
        check_ranks(5, gpus=4, cores=8)
    check_ranks(8, gpus=0, cores=8, held=8)  # CPU cores are shared


def test_more_ranks_than_devices_is_an_error_before_ray_starts():
    code = """
        import sys
        from hybridrl.config import ClusterConfig
        from hybridrl.controller import Cluster
        from hybridrl.errors import ConfigError
        try:
            Cluster(ClusterConfig(ranks=100_000))
        except ConfigError as error:
            print(error, "ray" in sys.modules)
    """
    said = run_python(code).stdout
    assert "cluster.ranks must be between 1 and the" in said and "got 100000. False" in said


def test_no_cluster_at_the_address_is_an_error():
    with socket.socket() as deaf:  # holds the port, and nothing listens there
        deaf.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cluster.address '{address}': no Ray cluster to join there .*refused"):
            Cluster(ClusterConfig(address=address))
    with pytest.raises(ConfigError, match="cluster.address must be `auto` or host:port, got 'head'"):
        Cluster(ClusterConfig(address="head"))


@pytest.mark.slow
def test_a_running_cluster_is_joined_by_address_and_left_running(ray_cluster, group_of):
    code = f"""
        import torch
        from hybridrl.batch import make_batch
        from hybridrl.config import ClusterConfig
        from hybridrl.controller import Cluster, WorkerGroup
        from tests.distributed.workers import Tiny
        with Cluster(ClusterConfig(address="{ray.get_runtime_context().gcs_address}", ranks=2)) as cluster:
            group = WorkerGroup(Tiny, cluster.pool(), role="tiny")
            print(*group.environment("VLLM_ENABLE_V1_MULTIPROCESSING"), *group.process())
            print(group.mark(make_batch(group_ids=torch.arange(3)))["rewards"].tolist())
    """
    first, second = run_python(code).stdout.splitlines()
    assert first.split()[:2] == ["0", "0"]
    assert second == "[0.0, 0.0, 1.0]"
    assert ended(*[int(pid) for pid in first.split()[2:]])
    assert group_of(2).sleep(0) == [0, 1]


def run_python(code: str) -> subprocess.CompletedProcess:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True,
                          timeout=240, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return done


OWN_CLUSTER = """
    import json, os, sys, time
    from pathlib import Path
    import psutil
    from hybridrl.config import ClusterConfig
    from hybridrl.controller import Cluster, WorkerGroup
    from tests.distributed.workers import Tiny

    if __name__ == "__main__":
        with Cluster(ClusterConfig(ranks=1), Path(sys.argv[1])) as cluster:
            group = WorkerGroup(Tiny, cluster.pool(), role="policy")
            children = [child.pid for child in psutil.Process().children(recursive=True)]
            print(json.dumps({"pids": children, "worker": group.process()[0]}), flush=True)
            group.sleep(300)
"""


def heed_interrupts() -> None:
    """Under a job that a shell started in the background, SIGINT is ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def kill_and_read(process: subprocess.Popen) -> str:
    """What a process wrote to stderr."""
    os.killpg(process.pid, signal.SIGKILL)
    return process.communicate(timeout=60)[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind(tmp_path, number):
    script = tmp_path / "own_cluster.py"
    script.write_text(textwrap.dedent(OWN_CLUSTER))
    temp_dir = tempfile.mkdtemp(prefix="t")  # Ray's sockets need a short path
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path / "logs")], cwd=ROOT, text=True,
                               env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": temp_dir},
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                               preexec_fn=heed_interrupts)
    try:
        line = process.stdout.readline() if select.select([process.stdout], [], [], 120)[0] else ""
        assert line, f"it has not started: {kill_and_read(process)}"
        started = json.loads(line)
        assert started["worker"] in started["pids"]
        assert list(Path(temp_dir).glob("hybridrl-*"))
        os.killpg(process.pid, number)  # what a terminal sends: to the whole group
        errors = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert ended(*started["pids"])
    assert (tmp_path / "logs" / "pool0-rank0.log").exists()
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
        assert not list(Path(temp_dir).glob("hybridrl-*"))
    shutil.rmtree(temp_dir)


# the local backend

@pytest.fixture
def local():
    with Cluster(ClusterConfig(backend="local")) as cluster:
        yield WorkerGroup(Tiny, cluster.pool(), role="tiny")


def test_local_gives_the_same_results_in_this_process(local):
    assert local.process() == [os.getpid()]
    local.step = 4
    assert local.state() == [(0, 4, 0)]
    assert local.add(3) == 3
    for count in (3, 1, 0):
        assert plain(local.mark(rows(count))) == plain(rows(count)) | {"rewards": [0.0] * count,
                                                                      "total": [count] * count}
    assert local.count(rows(2)) == {"rows": 2, "rank": 0}
    assert local.answers(rows(2)) == [{"row": 0}, {"row": 1}]


def test_local_futures_are_accepted_as_arguments(local):
    held = local.keep_even.future(rows(5))
    assert held.done()
    assert plain(local.mark(held))["group_ids"] == [0, 2, 4]
    assert plain(local.mark([held, rows(1)]))["group_ids"] == [0, 2, 4, 0]
    assert plain(held.result())["group_ids"] == [0, 2, 4]  # the columns that `mark` added are not in it
    assert "rewards" not in held.result().keys()


def test_local_refuses_the_same_row_calls(local):
    with pytest.raises(BatchError, match="tiny.mark splits a batch by rows, but no argument is a batch"):
        local.mark(3)
    for other in (rows(4), local.mark.future(rows(4))):
        with pytest.raises(BatchError, match=r"same number of rows, got \[4, 5\]"):
            local.mark(rows(5), other)


def test_local_failures_name_the_same_things(local):
    local.step = 6
    with pytest.raises(WorkerError, match="^tiny rank 0 at step 6: BatchError: not these$") as caught:
        local.refuse("not these")
    assert isinstance(caught.value.__cause__, BatchError)
    with pytest.raises(WorkerError, match="^tiny rank 0 at step 6: KeyError: 'missing key'$") as caught:
        local.fail(0)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(WorkerError, match="stopped by an earlier failure"):
        local.state()


def test_local_leaves_this_process_the_threads_that_its_environment_says(monkeypatch):
    before = torch.get_num_threads()
    try:
        for value, expected in (("1", 1), ("1,4", 1), ("", len(os.sched_getaffinity(0)))):
            monkeypatch.setenv("OMP_NUM_THREADS", value)
            with Cluster(ClusterConfig(backend="local")) as cluster:
                cluster.pool()
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_local_leaves_a_process_group_that_was_there_before(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with Cluster(ClusterConfig(backend="local")) as cluster:
            assert WorkerGroup(Tiny, cluster.pool(), role="tiny").count(rows(2))["rows"] == 2
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_local_runs_one_rank():
    with Cluster(ClusterConfig(backend="local")) as cluster, pytest.raises(ConfigError, match="runs 1 rank, got 2"):
        cluster.pool(2)


def test_local_does_not_import_ray():
    code = """
        import sys
        import torch
        from hybridrl.batch import make_batch
        from hybridrl.config import ClusterConfig
        from hybridrl.controller import Cluster, WorkerGroup
        from tests.distributed.workers import Tiny
        with Cluster(ClusterConfig(backend="local")) as cluster:
            group = WorkerGroup(Tiny, cluster.pool(), role="tiny")
            group.mark(group.mark.future(make_batch(group_ids=torch.arange(3), answer=[1, 2, 3])))
        print("ray" in sys.modules, "vllm" in sys.modules)
    """
    assert run_python(code).stdout.split() == ["False", "False"]

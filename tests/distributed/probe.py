"""A policy worker whose engines tests can reach into."""

import re
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.algorithms.aggregation import aggregate
from hybridrl.batch import rows_of
from hybridrl.dispatch import to_all
from hybridrl.errors import SyncError
from hybridrl.workers.policy import Phase, PolicyWorker
from hybridrl.workers.rollout.engine import Request
from hybridrl.workers.rollout.vllm_weights import record_loading
from hybridrl.workers.weights.changes import as_bits
from hybridrl.workers.weights.delta_sync import DeltaSync
from hybridrl.workers.weights.exchange import Traffic, exchange
from hybridrl.workers.weights.names import checkpoint_weights
from hybridrl.workers.weights.plan import needed_elements
from hybridrl.workers.weights.regions import Write
from hybridrl.workers.weights.sync import WeightSync, fingerprint_ids, largest_gap, training_log_probs


def plain_loss(log_probs, columns, entropies):
    """-sum(loss_weights * advantages * log_probs)."""
    weighted = -columns["advantages"] * log_probs
    return aggregate(weighted, columns["loss_weights"], columns["response_mask"]), {}


class ProbeWorker(PolicyWorker):
    @to_all
    def set_replay(self, replay: str) -> None:
        """Whose experts training follows from now on."""
        self.training.replay = replay

    @to_all
    def gap(self) -> float:
        """Log-prob gap of the engines as they are, without moving to another phase."""
        ids = fingerprint_ids(24, len(self.tokenizer))
        return largest_gap(self.rollout.score(ids), training_log_probs(self.training, ids))

    @to_all
    def scale_weights(self, factor: float) -> None:
        """Change every weight behind the worker's back."""
        with torch.no_grad():
            for _, weight in self.training.weights():
                weight.to_local().mul_(factor)
        self.changed = True

    @to_all
    def sync_by(self, mode: str) -> None:
        """Sync with this `policy.sync.mode` from now on, beginning with a full sync."""
        self.weight_sync = (DeltaSync if mode == "delta" else WeightSync)(
            self.training, self.rollout, self.cfg.sync, self.dtype, self.peers("rollout"))
        self.changed = True

    @to_all
    def nudge(self, share: float, seed: int) -> None:
        """Change a share of the elements of this rank's shards a little."""
        generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        self._enter(Phase.TRAIN)
        with torch.no_grad():
            for _, weight in self.training.weights():
                held = weight.to_local()
                chosen = torch.rand(held.shape, generator=generator) < share
                held.mul_(1 + 0.1 * chosen)
        self.changed = True

    @to_all
    def different_bits(self) -> list[str]:
        """Parameters of an engine that can be read which are not, bit by bit, training's cast to its dtype."""
        held = self.rollout.parameters
        return [name for name, weight in self.training.weights()
                if not torch.equal(as_bits(held[name]), as_bits(weight.full_tensor().to(self.dtype)))]

    @to_all
    def load_without(self, part: str) -> str:
        """A sync in which the last copy from or to a name with `part` in it is missing; returns the error."""
        gone = [copy for copy in self.weight_sync.copies if part in copy.weight or part in copy.parameter][-1]
        try:
            self.rollout.load_weights(([write for write in writes if write[:2] != (gone.parameter, gone.target)]
                                       for writes in self.writes()), 99)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    @to_all
    def layout_without(self, part: str) -> str:
        """The error of an engine that is to find its layout in a checkpoint that lacks names with `part` in them."""
        metas = {name: torch.empty(weight.shape, device="meta") for name, weight in self.training.weights()}

        def rename(weights):
            named = checkpoint_weights(self.training.model.causal_lm, weights)
            return {name: weight for name, weight in named.items() if part not in name}

        try:
            self.rollout.layout(metas, rename)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    @to_all
    def break_a_sync(self, how: str) -> list[str]:
        """Change every weight and sync, with `how` wrong in the middle; then try to sample. Returns the errors.

        `stops` breaks off after some writes, `changes` writes other values than were sent.
        """
        self._enter(Phase.TRAIN)
        with torch.no_grad():
            for _, weight in self.training.weights():
                weight.to_local().mul_(0.95)
        self.changed = True
        write_weights = self.rollout.write_weights

        def broken(writes, inspect=None):
            def spoiled():
                for i, write in enumerate(write for some in writes for write in some):
                    if how == "stops" and i == 5:
                        raise SyncError("broken off")
                    yield [write._replace(values=write.values + 1e-6) if how == "changes" and i == 5 else write]

            write_weights(spoiled(), inspect)

        errors = []
        self.rollout.write_weights = broken
        for call in (self.sync_weights, lambda: self.rollout.generate([Request([5, 6], 2)]),
                     lambda: self.rollout.submit(Request([5, 6], 2)) and self.rollout.drive([])):
            try:
                call()
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        self.rollout.write_weights = write_weights
        return errors

    @to_all
    def reshard(self) -> dict[str, int]:
        """Bytes of the last sync that this rank received and that it needs, and of the whole model."""
        channel = self.weight_sync
        received = self.take_metrics()["sync/received_bytes"]
        return {"received": int(received), "model": 4 * sum(prod(weight.shape) for weight in channel.weights),
                "needed": 4 * needed_elements(channel.weights, channel.copies, channel.index)}

    @to_all
    def wrong_experts(self) -> tuple[int, list[str]]:
        """Compare each expert in the engine, before packing, with training's: (matrices compared, those that differ).

        Written down for vLLM's fused tensors, without the plan: gate and up are cut by rows, down by columns.
        """
        engine: dict[str, Tensor] = {}
        self.rollout.load_weights(self.writes(), self.version,
                                  lambda name, values: engine.update({name: values.clone()}))
        full = checkpoint_weights(self.training.model.causal_lm,
                                  {name: weight.full_tensor() for name, weight in self.training.weights()})
        peers = self.cfg.rollout.tensor_parallel
        compared, wrong = 0, []
        for name, weight in full.items():
            found = re.match(r"(.*layers\.\d+)\..*experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight", name)
            if not found:
                continue
            layer, expert, projection = found.groups()
            down = projection in ("down_proj", "w2")
            mine = weight.chunk(peers, dim=1 if down else 0)[self.rank % peers]
            (fused,) = (v for k, v in engine.items() if k.startswith(layer + ".") and k.endswith("w2_weight" if down
                                                                                             else "w13_weight"))
            held = fused[int(expert)]
            if not down:
                held = held.chunk(2)[projection in ("up_proj", "w3")]
            compared += 1
            wrong += [] if torch.equal(held, mine) else [name]
        return compared, wrong

    @to_all
    def layouts_at(self, folder: str, tensor_parallel: int) -> Any:
        """What vLLM's loaders of another model copy on each of `tensor_parallel` ranks, in this process.

        The model is built on the meta device, once as each rank. Returns (weights as (name, shape), layouts).
        """
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.utils import initialize_model

        with torch.device("meta"):
            training = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        metas = {name: torch.empty(weight.shape, device="meta") for name, weight in training.state_dict().items()
                 if name != "lm_head.weight" or not training.config.tie_word_embeddings}
        base = EngineArgs(model=folder, dtype="float32", skip_tokenizer_init=True).create_engine_config()
        base.parallel_config.tensor_parallel_size = tensor_parallel
        group, layouts = parallel_state._TP, []
        try:
            for rank in range(tensor_parallel):
                cfg = deepcopy(base)  # it will know the layers that are built under it
                parallel_state._TP = SimpleNamespace(rank_in_group=rank, world_size=tensor_parallel)
                with set_current_vllm_config(cfg), torch.device("meta"), torch.no_grad():
                    model = initialize_model(vllm_config=cfg)
                    layouts.append(record_loading(model, metas, partial(checkpoint_weights, training)).copies)
        finally:
            parallel_state._TP = group
        return [(name, tuple(weight.shape)) for name, weight in metas.items()], layouts

    def writes(self) -> Iterator[list[Write]]:
        channel = self.weight_sync
        return exchange(self.training.weights(), channel.plan, self.dtype, channel.group, Traffic())

    @to_all
    def generate_across_a_sync(self, batch: TensorDict, tokens: int, before: int) -> Any:
        """Sample; after `before` engine steps change all weights and sync.

        Returns (ids, log-probs, versions) by row, and what a listener to the first of them was told from step to step.
        """
        self._enter(Phase.ROLLOUT)
        requests = [Request(ids.tolist(), tokens, 1.0, seed)
                    for ids, seed in zip(rows_of(batch["prompt_ids"]), batch["seeds"].tolist(), strict=True)]
        told: list[Any] = []
        listeners = [told.append] + [None] * (len(requests) - 1)
        futures = list(map(self.rollout.submit, requests, listeners)) if self.rollout.leads else []
        steps, step = 0, self.rollout.step

        def counted():
            nonlocal steps
            steps += 1
            if steps == before + 1:
                with torch.no_grad():
                    for _, weight in self.training.weights():
                        weight.to_local().mul_(1.1)
                self.changed = True
                self._sync()
            return step()

        self.rollout.step = counted
        try:
            self.rollout.drive(futures)
        finally:
            self.rollout.step = step
        return tuple([(c.token_ids, c.log_probs, c.versions) for c in some]
                     for some in ([future.result() for future in futures], told))

    @to_all
    def offered_later(self, first: list[int], second: list[int]) -> Any:
        """Submit a second request only once the first has begun: (both responses, steps taken)."""
        self._enter(Phase.ROLLOUT)
        step, steps, late = self.rollout.step, 0, []

        def counted():
            nonlocal steps
            steps += 1
            if steps == 3 and self.rollout.leads:
                late.append(self.rollout.submit(Request(second, 6, 1.0, 2)))
                futures.append(late[0])
            return step()

        futures = [self.rollout.submit(Request(first, 12, 1.0, 1))] if self.rollout.leads else []
        self.rollout.step = counted
        try:
            self.rollout.drive(futures)
        finally:
            self.rollout.step = step
        return [future.result().token_ids for future in futures], steps


class CrampedWorker(ProbeWorker):
    """Its vLLM takes prompts in chunks of 24 tokens, and has a cache of 7 blocks of 32 tokens."""

    def _build_rollout(self, seed):
        import vllm

        config, build = self.training.model.causal_lm.config, vllm.LLM
        block_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4 * 32
        cramped = {"block_size": 32, "enable_chunked_prefill": True, "max_num_batched_tokens": 24,
                   "kv_cache_memory_bytes": 7 * block_bytes}
        with mock.patch.object(vllm, "LLM", lambda **options: build(**options | cramped)):
            rollout = super()._build_rollout(seed)
        self._count(rollout.engine.engine_core.engine_core.scheduler)
        return rollout

    def _count(self, scheduler: Any) -> None:
        self.counts = {"preempted": 0, "cached": 0, "chunks": 0}
        schedule, preempt = scheduler.schedule, scheduler._preempt_request

        def counted(*args, **kwargs):
            found = schedule(*args, **kwargs)
            for request in found.scheduled_new_reqs:
                self.counts["cached"] += request.num_computed_tokens
                done = request.num_computed_tokens + found.num_scheduled_tokens[request.req_id]
                self.counts["chunks"] += done < len(request.prompt_token_ids)
            return found

        def preempted(*args, **kwargs):
            self.counts["preempted"] += 1
            return preempt(*args, **kwargs)

        scheduler.schedule, scheduler._preempt_request = counted, preempted

    @to_all
    def events(self) -> dict[str, int]:
        """Requests that were preempted and cut into chunks, and prompt tokens that were found in the cache."""
        return self.counts

"""The policy: FSDP training and a rollout engine in one process, taking turns on one device.

            update, log_probs, save, load                         generate
    TRAIN ────────────────────────────── sync_weights ──────────────────────────────> ROLLOUT
      ^    offload optimizer > wake weights > sync > offload parameters > wake KV cache   │
      └──────────────────── sleep rollout engine > bring training state back ─────────────┘

A method called in the other phase moves there first; `generate` never samples from weights older than the
last update.
"""

import time
from enum import Enum
from pathlib import Path

import psutil
import torch
from tensordict import TensorDict

from hybridrl.algorithms.partials import Partial
from hybridrl.batch import num_rows, put, require, rows_of
from hybridrl.config import EnvironmentConfig, PolicyConfig
from hybridrl.dispatch import over_rows, to_all
from hybridrl.errors import ConfigError
from hybridrl.models import check_context, resolve_model, stop_ids
from hybridrl.workers.base import WorkerContext
from hybridrl.workers.rollout.engine import Completion, Request, RolloutEngine
from hybridrl.workers.rollout.episode_rows import episode_batch, tasks_of
from hybridrl.workers.rollout.episodes import EpisodeRunner
from hybridrl.workers.rollout.transformers_engine import TransformersEngine
from hybridrl.workers.rollout.vllm_engine import VLLMEngine, rollout_dtype
from hybridrl.workers.routing import Mixture, experts_column
from hybridrl.workers.trainer import TrainerWorker
from hybridrl.workers.training.engine import LossFunction
from hybridrl.workers.weights.delta_sync import DeltaSync
from hybridrl.workers.weights.sync import WeightSync, fingerprint_ids, largest_gap, training_log_probs


class Phase(Enum):
    """Which engine owns the device."""

    TRAIN = "train"
    ROLLOUT = "rollout"


class PolicyWorker(TrainerWorker):
    """One rank of the policy.

    Args:
        context: rank, device, role.
        cfg: model, training, rollout and sync options.
        seed: base seed of the rollout engine; rows carry their own.
    Raises:
        ModelError: the model folder can't be used. ConfigError: ranks don't divide by tensor_parallel.
    """

    def __init__(self, context: WorkerContext, cfg: PolicyConfig, seed: int = 0):
        super().__init__(context, cfg.model, cfg.training, cfg.rollout.temperature)
        self.cfg = cfg
        self.folder = resolve_model(cfg.model.path)
        self.dtype = getattr(torch, rollout_dtype(cfg.rollout, self.device))
        check_routing(cfg, self.training.model.mixture)
        self.training.replay, self.training.compare_routing = cfg.routing_replay, cfg.routing_compare
        self.rollout = self._build_rollout(seed)
        kind = DeltaSync if cfg.sync.mode == "delta" else WeightSync
        self.weight_sync = kind(self.training, self.rollout, cfg.sync, self.dtype, self.peers("rollout"))
        self.phase = Phase.TRAIN
        self.version = 0
        """How many different weights were synced so far; the rollout engine samples under this version."""
        self.changed = True
        """Whether training holds other weights than this version."""
        self.seed = seed
        self._runners: dict[str, EpisodeRunner] = {}
        self.rollout.sleep()

    def _build_rollout(self, seed: int) -> RolloutEngine:
        stop, keep = stop_ids(self.folder, self.tokenizer), self.cfg.routing_replay == "rollout"
        if self.cfg.rollout.engine == "transformers":
            check_context(self.cfg.model, self.cfg.rollout.context,
                          "policy.rollout.max_prompt_tokens + max_response_tokens")
            return TransformersEngine(self.folder, self.device, self.dtype, stop, self.cfg.rollout.max_running,
                                      self.cfg.model.trust_remote_code, keep_experts=keep)
        lora = self.cfg.training.lora if self.cfg.sync.lora == "adapter" else None
        return VLLMEngine(self.folder, self.cfg.rollout, self.device, stop, self.cfg.model.trust_remote_code, seed,
                          lora, self.training.adapted, keep_experts=keep)

    def peers(self, axis: str) -> int:
        return self.cfg.rollout.tensor_parallel if axis == "rollout" else super().peers(axis)

    # ---- phases

    def _enter(self, phase: Phase) -> None:
        """Move to a phase; a move into ROLLOUT brings the newest weights along."""
        if phase is Phase.ROLLOUT and self.phase is phase and self.changed:
            self._enter(Phase.TRAIN)
        if phase is self.phase:
            return
        started, before = time.perf_counter(), self._memory()
        if phase is Phase.ROLLOUT:
            self.training.offload(parameters=False)
            self.rollout.wake()
            self._sync()
        else:
            self.rollout.sleep()
            self.training.onload()
        self.phase = phase
        name = f"enter_{phase.value}"
        self.metrics |= {f"time/{name}": time.perf_counter() - started, f"memory/{name}_before_bytes": before,
                         f"memory/{name}_after_bytes": self._memory()}

    def _sync(self) -> None:
        """Send the training weights over, and compare the engines on a few tokens.

        Training's half of the comparison comes first: its parameters make room for the KV cache before the other.
        """
        self.version += self.changed
        self.metrics |= self.weight_sync.run(self.version)
        ids = self._fingerprint_ids()
        trained = training_log_probs(self.training, ids) if ids else None
        self.training.offload()
        self.rollout.wake_cache()
        self.changed = False
        if trained is not None:
            gap = largest_gap(self.rollout.score(ids), trained)
            self.metrics["sync/max_log_prob_gap"] = gap
            self.weight_sync.check(gap, self.version)

    def _fingerprint_ids(self) -> list[int]:
        """Token ids whose log-probs are compared; none when that is turned off, or nothing fits."""
        context = self.cfg.rollout.context
        # the engine holds one token of context before them and makes one after
        tokens = min(self.cfg.sync.fingerprint_tokens, context - 2)
        return fingerprint_ids(tokens, len(self.tokenizer)) if tokens > 0 and self.cfg.sync.verify != "none" else []

    def _memory(self) -> float:
        """Bytes this process holds on its device: allocated on CUDA, resident on CPU."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return float(total - free)
        return float(psutil.Process().memory_info().rss)

    # ---- rollout

    @to_all
    def sync_weights(self) -> int:
        """Bring the rollout engine to the training weights; returns the new version.

        Raises SyncError when a weight did not arrive or the engines' log-probs differ.
        """
        self._enter(Phase.ROLLOUT)
        return self.version

    @over_rows(axis="rollout")
    def generate(self, batch: TensorDict, temperature: float | None = None,
                 max_tokens: int | None = None) -> TensorDict:
        """Sample one response a row.

        Args:
            batch: `prompt_ids`, and `seeds` where sampling is to be the same however rows are split.
            temperature: default `policy.rollout.temperature`; 0 takes the most likely token.
            max_tokens: default `policy.rollout.max_response_tokens`.
        Returns:
            The batch with `response_ids`, `response_mask`, `rollout_log_probs`, `weight_versions`,
            `finish_reason` and `response`; with `policy.routing_replay=rollout` also `routed_experts`.
        """
        self._enter(Phase.ROLLOUT)
        require(batch, "prompt_ids")
        options = self.cfg.rollout
        seeds = batch["seeds"].tolist() if "seeds" in batch.keys() else [None] * num_rows(batch)
        requests = [Request(ids.tolist(), max_tokens or options.max_response_tokens,
                            options.temperature if temperature is None else temperature, seed, self.version)
                    for ids, seed in zip(rows_of(batch["prompt_ids"]), seeds, strict=True)]
        with self.measured("generate"):
            completions = self.rollout.generate(requests)
        if self.rollout.first_token_at is not None:
            self.metrics["time/first_token_unix_s"] = self.rollout.first_token_at
            self.rollout.first_token_at = None
        if self.rollout.leads:
            self._write(batch, completions)
        return batch

    @over_rows(axis="rollout")
    def play(self, batch: TensorDict, environment: EnvironmentConfig, temperature: float | None = None) -> TensorDict:
        """Play an episode a row, all at the same time, and score them.

        Args:
            batch: what the environment's task is made of: `prompt`, `answer`, `task`, where it needs them. Rows with
                equal `group_ids` play the same task. `seeds` are those of sampling, `episode_ids` number the episodes
                (`Player` writes them).
            environment: the environment and its limits.
            temperature: default `policy.rollout.temperature`; 0 takes the most likely token.
        Returns:
            One row for each conversation that could be kept as one sequence, in order of episodes: an episode has
            several where the chat template rewrites history, or where several agents act. The columns of `batch`,
            `prompt_ids` anew, those that `generate` writes, `rewards` (of the whole trajectory; NaN where the episode
            failed), `token_rewards`, `reward_error`, `trajectory_ids`, `agent` and `turns`.
        Raises:
            EpisodeError: no environment can be started. ModelError: the tokenizer has no chat template.
        """
        self._enter(Phase.ROLLOUT)
        require(batch, "episode_ids")
        tasks = tasks_of(batch, self.seed)
        seeds = batch["seeds"].tolist() if "seeds" in batch.keys() else [None] * num_rows(batch)
        runner = self._runner(environment)
        episodes = runner.play(tasks, seeds, self.cfg.rollout.temperature if temperature is None else temperature)
        if not self.rollout.leads:
            return batch
        self.metrics |= runner.metrics
        return episode_batch(batch, episodes, runner.chat.plain, self.rollout.mixture)

    def _runner(self, environment: EnvironmentConfig) -> EpisodeRunner:
        """The runner of an environment; its processes stay from call to call."""
        key = repr(environment)
        if key not in self._runners:
            self._runners[key] = EpisodeRunner(self.rollout, self.tokenizer, self.cfg.rollout, environment)
        return self._runners[key]

    def _write(self, batch: TensorDict, completions: list[Completion]) -> None:
        put(batch, "response_ids", [c.token_ids for c in completions])
        put(batch, "response_mask", [[True] * len(c.token_ids) for c in completions])
        put(batch, "rollout_log_probs", [c.log_probs for c in completions])
        put(batch, "weight_versions", [c.versions for c in completions])
        put(batch, "finish_reason", [c.finish_reason for c in completions])
        put(batch, "response", [self.tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions])
        if self.rollout.mixture is not None:
            put(batch, "routed_experts", experts_column(self.rollout.mixture, batch, [c.experts for c in completions]))

    # ---- training

    def enter_training(self) -> None:
        self._enter(Phase.TRAIN)

    @over_rows(join="first")
    def update(self, batch: TensorDict, loss: LossFunction) -> dict[str, Partial]:
        """As of TrainerWorker; the rollout engine's weights are old from here on."""
        self.changed = True
        return super().update(batch, loss)

    @to_all
    def save(self, folder: str) -> None:
        """As of TrainerWorker, and the weights' version."""
        self.enter_training()
        self.training.save(Path(folder), {"version": self.version, "changed": self.changed})

    @to_all
    def load(self, folder: str) -> None:
        """As of TrainerWorker; sampled tokens go on carrying the versions of the run that was saved.

        The training phase is entered, so that the rollout engine gets these weights before it samples.
        """
        self.enter_training()
        numbers = self.training.load(Path(folder))
        self.version, self.changed = numbers["version"], bool(numbers["changed"])

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()
        self.rollout.close()


def check_routing(cfg: PolicyConfig, mixture: Mixture | None) -> None:
    """Raise ConfigError where routing is to be replayed in a model without experts."""
    if cfg.routing_replay != "off" and mixture is None:
        raise ConfigError(f"policy.routing_replay must be off for a model without experts, got {cfg.routing_replay!r}: "
                          f"{cfg.model.path} has none.")

"""A step of the loop of recipes/grpo.py each time a line comes on standard input.

    python -m benchmarks.versus_trl.our_side WORKLOAD.json vllm|transformers

Answers every step with a JSON line of seconds. Response lengths are forced by each request's own limit.
"""

import json
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import torch

from hybridrl.algorithms.algorithm import Algorithm
from hybridrl.batch import lengths, make_batch, put, repeat
from hybridrl.config import AlgorithmConfig, ClusterConfig, ModelConfig, PolicyConfig, RolloutConfig, TrainingConfig
from hybridrl.controller.cluster import Cluster
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.dispatch import to_all
from hybridrl.models import load_tokenizer
from hybridrl.workers.policy import PolicyWorker


class FixedLengths(PolicyWorker):
    """A policy whose responses have given lengths."""

    @to_all
    def force(self, response_lengths: list[int]) -> None:
        """From now on response i of a generate call has response_lengths[i] tokens, whatever they are."""
        self.rollout.stop_ids = []
        if self.cfg.rollout.engine == "vllm":  # which finds an end token of its own
            self.rollout.engine.input_processor.generation_config_fields = {}
        generate = self.rollout.generate
        self.rollout.generate = lambda requests, *rest: generate(
            [replace(r, max_tokens=n) for r, n in zip(requests, response_lengths, strict=True)], *rest)


def main(workload_path: str, engine: str) -> None:
    """Build the policy and take steps until standard input ends."""
    with open(workload_path) as file:
        workload = json.load(file)
    cfg = PolicyConfig(
        model=ModelConfig(path=workload["folder"]),
        training=TrainingConfig(learning_rate=workload["learning_rate"], max_grad_norm=workload["max_grad_norm"]),
        rollout=RolloutConfig(engine=engine, max_prompt_tokens=max(workload["prompt_lengths"]),
                              max_response_tokens=max(workload["response_lengths"])))
    algorithm = Algorithm(AlgorithmConfig(responses_per_prompt=workload["responses_per_prompt"], corrections=[]),
                          cfg.rollout.max_response_tokens)
    tokenizer = load_tokenizer(cfg.model)
    with Cluster(ClusterConfig(backend="local")) as cluster:
        policy = WorkerGroup(FixedLengths, cluster.pool(), cfg, role="policy")
        policy.sync_weights()
        policy.force(workload["response_lengths"])
        prompt_ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in workload["prompts"]]
        while sys.stdin.readline():
            report = step(policy, algorithm, prompt_ids, workload)
            print("STEP " + json.dumps(report), flush=True)


def step(policy: WorkerGroup, algorithm: Algorithm, prompt_ids: list[list[int]], workload: dict) -> dict[str, float]:
    """One step of the recipe's loop; seconds of its stages."""
    seconds: dict[str, float] = {}

    @contextmanager
    def stage(name):
        started = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - started

    with stage("step"):
        batch = make_batch(prompt_ids=prompt_ids)
        batch["group_ids"] = torch.arange(len(prompt_ids))
        batch = repeat(batch, workload["responses_per_prompt"])
        with stage("generate"):
            batch = policy.generate(batch)
        put(batch, "rewards", torch.tensor([float(len(text) % 2) for text in batch["response"]]))
        with stage("log_probs"):
            policy.enter_training()
            if algorithm.needs_old_log_probs:
                batch = policy.log_probs(batch)
        batch = algorithm.shape(batch)
        batch["advantages"] = algorithm.advantages(batch)
        batch = algorithm.correct(batch)
        with stage("update"):
            for mini_batch in algorithm.mini_batches(batch):
                policy.update(mini_batch, algorithm.loss)
        with stage("sync"):
            policy.sync_weights()
    assert lengths(batch["response_ids"]).tolist() == workload["response_lengths"], "lengths were not forced"
    return seconds | {"threads": torch.get_num_threads()}


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Teacher and policy as worker groups: one rank or two, the same log-probs and the same updates."""

import pytest
import torch

from hybridrl.algorithms.combined_loss import Loss
from hybridrl.algorithms.distillation import TEACHER_COLUMNS, DistillationLoss
from hybridrl.algorithms.losses import POLICY_LOSSES
from hybridrl.algorithms.partials import finalize
from hybridrl.batch import from_lengths, lengths, narrow
from hybridrl.config import DistillOptionsConfig, ModelConfig, TeacherConfig, TrainingConfig
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.workers.teacher import TeacherWorker
from hybridrl.workers.trainer import TrainerWorker
from tests.models import tiny_model
from tests.unit.training.reference import random_batch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcome(shared_pool, tmp_path_factory):
    """(ranks, rows) -> the teacher's columns and the metrics of two updates."""
    root = tmp_path_factory.mktemp("models")
    policy = ModelConfig(path=str(tiny_model(root / "policy")))
    taught = TeacherConfig(model=ModelConfig(path=str(tiny_model(root / "teacher", "qwen3", seed=1))),
                           micro_batch_tokens=30)

    def run(ranks, rows=7):
        pool, options = shared_pool(ranks), DistillOptionsConfig(loss="top_k", top_k=5)
        groups = [WorkerGroup(TeacherWorker, pool, taught, options, policy, role="teacher"),
                  WorkerGroup(TrainerWorker, pool, policy, TrainingConfig(learning_rate=1e-3, micro_batch_tokens=40),
                              role="student")]
        teacher, student = groups
        try:
            batch = student.log_probs(teacher.log_probs(narrow(random_batch(), 0, rows)))
            sizes = lengths(batch["response_ids"])
            total = int(sizes.sum())
            batch["response_mask"] = from_lengths(torch.ones(total, dtype=torch.bool), sizes)
            batch["loss_weights"] = from_lengths(torch.full((total,), 1 / total), sizes)
            loss = DistillationLoss(Loss(POLICY_LOSSES["ppo_clip"], {}), weight=2.0)
            updates = [finalize(student.update(batch, loss)) for _ in range(2)]
            return {name: batch[name].values() for name in TEACHER_COLUMNS["top_k"]}, updates
        finally:
            for group in groups:
                group.close()

    return run


@pytest.mark.parametrize("rows", [7, 2])  # of two rows the first is empty: one rank has nothing to do
def test_one_rank_and_two(outcome, rows):
    (columns, updates), (others, other_updates) = outcome(1, rows), outcome(2, rows)
    assert torch.equal(columns["teacher_top_ids"], others["teacher_top_ids"])
    for name in ("teacher_log_probs", "teacher_top_log_probs"):
        torch.testing.assert_close(columns[name], others[name], rtol=0, atol=1e-4)
    for found, expected in zip(other_updates, updates, strict=True):
        for name in ("train/loss", "train/grad_norm", "distill/top_k_kl", "distill/top_k_mass"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3), name
    assert updates[1]["distill/top_k_kl"] < updates[0]["distill/top_k_kl"]

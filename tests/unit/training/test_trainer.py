"""What a trainer's worker writes into a batch, against all logits of transformers."""

import pytest
import torch

from hybridrl.batch import rows_of
from hybridrl.config import ModelConfig, TrainingConfig
from hybridrl.errors import BatchError
from hybridrl.workers.base import WorkerContext
from hybridrl.workers.trainer import TrainerWorker
from tests.unit.training.reference import plain_model, random_batch

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")


def trainer(path, temperature=1.0):
    return TrainerWorker(WorkerContext(0, 1, CPU, "policy"), ModelConfig(path=str(path)), TrainingConfig(), temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_columns_on_demand_are_those_of_the_whole_distribution(folder, temperature):
    batch, model = random_batch(), plain_model(folder())
    scored = trainer(folder(), temperature).log_probs(batch, also=["entropies", "sum_squared_probs"])
    columns = [rows_of(scored[name]) for name in ("old_log_probs", "entropies", "sum_squared_probs")]
    texts = [rows_of(batch[name]) for name in ("prompt_ids", "response_ids")]
    for prompt, response, old, entropies, squares in zip(*texts, *columns, strict=True):
        if not len(response):
            continue
        logits = model(torch.cat([prompt, response])[None]).logits[0].detach() / temperature
        log_p = logits[len(prompt) - 1:-1].log_softmax(-1)
        expected = (log_p.gather(1, response[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1),
                    log_p.exp().square().sum(-1))
        for found, right in zip((old, entropies, squares), expected, strict=True):
            torch.testing.assert_close(found, right.float(), rtol=1e-5, atol=1e-5)


def test_other_columns_are_refused(folder):
    with pytest.raises(BatchError, match="Unknown column 'entropy'. Did you mean entropies"):
        trainer(folder()).log_probs(random_batch(), also=["entropy"])
    assert "entropies" not in trainer(folder()).log_probs(random_batch()).keys()

"""What the workers of a recipe would refuse, found before any of them starts.

As far as a model folder's config and the headers of its weights tell: models are built without values.
"""

from typing import Any

import torch

from hybridrl.config import (
    ClusterConfig,
    CriticConfig,
    DistillConfig,
    JudgeConfig,
    ModelConfig,
    PolicyConfig,
    RewardModelConfig,
    RolloutConfig,
    ServePolicyConfig,
    SFTConfig,
    TeacherConfig,
    TrainingConfig,
    configs_in,
)
from hybridrl.models import (
    check_classifier,
    check_context,
    check_same_vocabulary,
    check_vocabulary,
    load_tokenizer,
    resolve_model,
)
from hybridrl.workers.judge import check_chat_template
from hybridrl.workers.policy import check_routing
from hybridrl.workers.reward_model import chosen_template
from hybridrl.workers.teacher import check_top_k
from hybridrl.workers.training.attention import choose_kernel
from hybridrl.workers.training.context import check_heads
from hybridrl.workers.training.frozen import ClassifierModel, TeacherModel
from hybridrl.workers.training.models import PolicyModel, ValueModel, compute_dtype, prepare
from hybridrl.workers.training.optimizer import make_optimizers
from hybridrl.workers.training.reading import read
from hybridrl.workers.training.sharded_model import check_offload


def check_models(cfg: Any) -> None:
    """Check every model that a recipe's options name against the options around it.

    Args:
        cfg: the recipe's whole config, with the policy under `policy`.
    Raises:
        ModelError: a folder that can't be used, or doesn't fit its config. ConfigError: an option that the model or
            this machine's device rules out; devices of a cluster that is joined are not known here.
    """
    cluster = getattr(cfg, "cluster", ClusterConfig())
    device = None if cluster.address else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for key, part in configs_in(cfg):
        if isinstance(part, PolicyConfig):
            model = check_training(part.model, part.training, device, f"{key}.training")
            check_routing(part, model.mixture)
            check_vocabulary(part.model)
            _check_longest(part.model, part.rollout, f"{key}.rollout")
        elif isinstance(part, SFTConfig):
            check_training(part.policy.model, part.policy.training, device)
            check_vocabulary(part.policy.model)
            check_context(part.policy.model, part.max_tokens, "max_tokens")
        elif isinstance(part, ServePolicyConfig):
            check_vocabulary(part.model)
            _check_longest(part.model, part.rollout, f"{key}.rollout")
        elif isinstance(part, CriticConfig):
            check_training(part.model, part.training, device, f"{key}.training", module=ValueModel)
            check_same_vocabulary(load_tokenizer(cfg.policy.model), load_tokenizer(part.model))
            _check_longest(part.model, cfg.policy.rollout, "policy.rollout", "critic")
        elif isinstance(part, TeacherConfig):
            check_training(part.model, TrainingConfig(), None, key, trainable=False, module=TeacherModel)
            _check_longest(part.model, cfg.policy.rollout, "policy.rollout", "teacher")
        elif isinstance(part, DistillConfig):
            if part.distill.loss == "top_k":
                check_top_k(part.distill.top_k, part.teacher.model, part.policy.model)
        elif isinstance(part, RewardModelConfig) and part.path:
            check_classifier(resolve_model(part.path))
            check_training(part, TrainingConfig(), None, key, trainable=False, module=ClassifierModel)
            chosen_template(part, load_tokenizer(part), load_tokenizer(cfg.policy.model), key)
        elif isinstance(part, JudgeConfig) and part.path:
            check_chat_template(part, load_tokenizer(part), key)
            _check_longest(part, part.rollout, f"{key}.rollout", "judge")


def check_training(model: ModelConfig, training: TrainingConfig, device: torch.device | None,
                   key: str = "policy.training", trainable: bool = True,
                   module: type[PolicyModel] = PolicyModel) -> PolicyModel:
    """Raise what a TrainingEngine of these arguments would; returns its model, without values.

    A `device` of None leaves out what depends on it.
    """
    made = module(read(module.loads, model, "auto", "meta"), torch.float32)
    if training.context_parallel > 1:
        heads = made.causal_lm.config.get_text_config().num_attention_heads
        check_heads(heads, training.context_parallel, key)
    prepare(made, trainable, training, torch.float32, key)
    if trainable:
        make_optimizers([p for p in made.parameters() if p.requires_grad], made.matrices(), training, key)
    if device is not None:
        check_offload(training, device, key)
        choose_kernel(training.attention, device, compute_dtype(device) or torch.float32, made.head_size, key)
    return made


def _check_longest(model: ModelConfig, rollout: RolloutConfig, key: str, what: str = "model") -> None:
    check_context(model, rollout.context, f"{key}.max_prompt_tokens + max_response_tokens", what)

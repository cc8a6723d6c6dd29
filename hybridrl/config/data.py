"""Problems to train and to evaluate on."""

from dataclasses import dataclass, field
from typing import Any

from hybridrl.config.checks import check, check_choice


@dataclass(kw_only=True, slots=True)
class DataConfig:
    source: str = "jsonl"
    """`jsonl`, `parquet`, `dataset` (a Hugging Face dataset saved on disk), `reasoning_gym`, or `none`: numbered rows
    for an environment that makes its own tasks."""
    path: str = ""
    """File of `jsonl` and `parquet`, folder of `dataset`."""
    task: str = ""
    """Task name of `reasoning_gym`, for instance `chain_sum`."""
    task_options: dict[str, Any] = field(default_factory=dict)
    """Options of the `reasoning_gym` task."""
    task_size: int = 1000
    """Problems that `reasoning_gym` makes; rows of `none`."""
    task_seed: int = 0
    """Seed of the problems of `reasoning_gym` and the tasks of `none`; number i is made from `task_seed + i`, so keep
    held-out seeds far away."""
    prompt_field: str = "prompt"
    """Field that holds the prompt: a text, or a list of chat messages."""
    answer_field: str = "answer"
    """Field that holds the reference answer; rows may leave it out when empty."""
    response_field: str = "response"
    """Field that holds the response to learn (SFT); not needed by chat messages that end with the assistant's turn."""
    system_prompt: str = ""
    """System message put before a text prompt when a chat template is used."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template; off feeds the text as it is."""
    bad_rows: str = "error"
    """`error` stops at a malformed row and names it; `skip` leaves it out and counts it."""
    shuffle: bool = True
    """Draw prompts in a new seeded order each epoch."""

    def validate(self, key: str = "data") -> None:
        check_choice(f"{key}.source", self.source, ("jsonl", "parquet", "dataset", "reasoning_gym", "none"))
        check_choice(f"{key}.bad_rows", self.bad_rows, ("error", "skip"))
        check(bool(self.prompt_field), f"{key}.prompt_field", self.prompt_field, "a field name")
        check(self.chat_template or not self.system_prompt, f"{key}.system_prompt", self.system_prompt,
              "empty with chat_template=false")
        if self.source == "reasoning_gym":
            check(bool(self.task), f"{key}.task", self.task, "a reasoning-gym task with source=reasoning_gym")
            check(not self.path, f"{key}.path", self.path, f"empty with {key}.source=reasoning_gym")
        else:
            check(not self.task, f"{key}.task", self.task, f"empty with {key}.source={self.source}")
        if self.source in ("reasoning_gym", "none"):
            check(self.task_size >= 1, f"{key}.task_size", self.task_size, "at least 1")
        else:
            check(bool(self.path), f"{key}.path", self.path, f"a path with source={self.source}")

    def check_prompts(self, key: str = "data") -> None:
        """Raise ConfigError where rows have no prompt of their own; for uses without an environment."""
        check(self.source != "none", f"{key}.source", self.source, "a source of prompts without an environment")


@dataclass(kw_only=True, slots=True)
class EvalDataConfig(DataConfig):
    """Held-out problems. Evaluation is off while neither `path` nor `task` is given."""

    shuffle: bool = False
    """Draw problems in a seeded order; off takes them as they come."""

    @property
    def enabled(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.path or self.task or self.source in ("reasoning_gym", "none"))

    def validate(self, key: str = "eval_data") -> None:
        if self.enabled:
            DataConfig.validate(self, key)

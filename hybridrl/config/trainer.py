"""Steps, run folder, evaluation, checkpoints, trackers."""

from dataclasses import dataclass, field

from hybridrl.config.checks import check, check_choice, check_k, check_temperature


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    run_dir: str = ""
    """Folder of the run; empty makes `runs/<recipe>-<date>-<time>`. An existing one is resumed."""
    steps: int = 100
    """Steps of the run."""
    prompts_per_step: int = 16
    """Prompts drawn for one step."""
    eval_every: int = 0
    """Steps between evaluations on `eval_data` and `eval_suites`; 0 evaluates only before the first and after the last
    step."""
    eval_samples: int = 1
    """Responses per evaluation problem."""
    eval_temperature: float = 0.0
    """Sampling temperature of evaluations; 0 takes the most likely token."""
    eval_greedy: bool = False
    """Take the likeliest response to each problem, too."""
    eval_k: list[int] = field(default_factory=list)
    """The k of avg@k, pass@k and maj@k, each at most `eval_samples`."""
    eval_prompts: int = 256
    """Problems of one evaluation: the first of `eval_data`, and of each suite."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves only at the end and when interrupted."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept."""
    export: bool = True
    """Write the trained model in Hugging Face format at the end."""
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Any of `tensorboard`, `wandb`, `mlflow`; `metrics.jsonl` is always written."""
    save_samples: int = 4
    """Rows of each step written to `samples.jsonl`."""
    dry_run: bool = False
    """Before the first step, take the largest possible micro-batch through forward and backward passes: says what it
    takes and what is left, or stops with the largest `micro_batch_tokens` that fits."""

    def validate(self) -> None:
        check(self.steps >= 0, "trainer.steps", self.steps, "at least 0")
        check(self.prompts_per_step >= 1, "trainer.prompts_per_step", self.prompts_per_step, "at least 1")
        for name in ("eval_every", "checkpoint_every", "save_samples"):
            check(getattr(self, name) >= 0, f"trainer.{name}", getattr(self, name), "at least 0")
        for name in ("eval_samples", "eval_prompts", "keep_checkpoints"):
            check(getattr(self, name) >= 1, f"trainer.{name}", getattr(self, name), "at least 1")
        check_temperature("trainer.eval_temperature", self.eval_temperature)
        check(not self.eval_greedy or self.eval_temperature > 0, "trainer.eval_greedy", self.eval_greedy,
              "false with eval_temperature=0, which takes the likeliest response")
        check_k("trainer.eval_k", self.eval_k, self.eval_samples, "eval_samples")
        for tracker in self.trackers:
            check_choice("trainer.trackers", tracker, ("tensorboard", "wandb", "mlflow"))

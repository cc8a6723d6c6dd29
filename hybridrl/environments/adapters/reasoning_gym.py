"""Problems of reasoning-gym, one turn each, scored by their own task. Source: Stojanovski et al., arXiv:2505.24760."""

import random
from typing import Any

from hybridrl.data.sources import reasoning_gym_problems, with_task_options
from hybridrl.environments.environment import Environment, Step, Task, Trajectory
from hybridrl.errors import ConfigError
from hybridrl.rewards import functions

KEY = "environment.options"


class ReasoningGym(Environment):
    """Shows a problem, takes one response, and scores it with the scorer of its task.

    The problem is the row itself where that is a reasoning-gym entry (`data.source=reasoning_gym`); else it is made
    from the row's `number` (`data.source=none`), or from the task's seed where there is none.

    Args:
        task: name of the task whose problems are made; needed unless rows are entries.
        task_options: its options.
        prompt: what is shown, with `{question}`.
        extract, allow_eval: as the reward function `reasoning_gym` takes them.
    """

    def __init__(self, task: str = "", task_options: dict[str, Any] | None = None, prompt: str = "{question}",
                 extract: str = "none", allow_eval: bool = False):
        self._task, self._options, self._prompt = task, task_options or {}, prompt
        self._extract, self._allow_eval = extract, allow_eval

    @staticmethod
    def check_options(task: str = "", task_options: dict[str, Any] | None = None, prompt: str = "{question}",
                      extract: str = "none", allow_eval: bool = False) -> None:
        """Raises ConfigError: no such task, options that it refuses, an unknown way to extract."""
        if task:
            reasoning_gym_problems(task, task_options or {}, 0, 1, KEY)
        if "{question}" not in prompt:
            raise ConfigError(f"{KEY}.prompt must have {{question}}, got {prompt!r}.")
        functions.extractor(extract)

    def reset(self, task: Task) -> str:
        row = task.data if isinstance(task.data, dict) else {}
        if "source_dataset" in row.get("metadata", {}):
            self._entry = row
        elif self._task:
            seed = int(row["number"]) if "number" in row else random.Random(task.seed).getrandbits(31)
            problem = reasoning_gym_problems(self._task, self._options, seed, 1, KEY)[0]
            self._entry = with_task_options(problem, self._options)
        else:
            raise ValueError(f"{KEY}.task is empty and the row is no reasoning-gym entry.")
        return self._prompt.replace("{question}", self._entry["question"])

    def step(self, action: str) -> Step:
        return Step(done=True)

    def state(self) -> dict[str, Any]:
        return {"task": self._entry["metadata"]["source_dataset"], "answer": str(self._entry["answer"])[:1000]}

    def verify(self, trajectory: Trajectory) -> float:
        return functions.reasoning_gym(str(trajectory.response), self._entry, extract=self._extract,
                                       allow_eval=self._allow_eval)

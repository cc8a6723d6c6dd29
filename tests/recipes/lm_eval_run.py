"""lm-eval through its Python interface: `python -m tests.recipes.lm_eval_run MODEL_ARGS FOLDER TASK ...`.

Tasks are YAML files in the folder, which gets `found.json`. (The command `lm_eval` does the same, and prints tables.)
"""

import json
import sys
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager


def main() -> None:
    model_args, folder, *tasks = sys.argv[1:]
    found = simple_evaluate("local-completions", model_args=model_args, tasks=tasks, apply_chat_template=True,
                            task_manager=TaskManager(include_path=folder, include_defaults=False))
    kept = {name: found[name] for name in ("results", "samples")}
    (Path(folder) / "found.json").write_text(json.dumps(kept, default=str))


if __name__ == "__main__":
    main()

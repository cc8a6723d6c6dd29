"""`recipes.grpo` with a policy worker that is killed in the middle of a phase.

    FATAL=update:3:1 python -m tests.recipes.fatal_grpo ...     rank 1 dies in the update of step 3
"""

import os
import signal

import recipes.grpo
from hybridrl.dispatch import over_rows, to_all
from hybridrl.workers.policy import PolicyWorker


class FatalPolicyWorker(PolicyWorker):
    """Dies as FATAL says."""

    def _die(self, phase: str) -> None:
        if os.environ["FATAL"] == f"{phase}:{self.step}:{self.rank}":
            os.kill(os.getpid(), signal.SIGKILL)

    @over_rows(axis="rollout")
    def generate(self, batch, *args, **kwargs):
        step, steps = self.rollout.step, []

        def counted():
            steps.append(1)
            if len(steps) == 3:
                self._die("generate")
            return step()

        self.rollout.step = counted
        try:
            return super().generate(batch, *args, **kwargs)
        finally:
            self.rollout.step = step

    @over_rows(join="first")
    def update(self, batch, loss):
        def after_the_backward_pass(*args, **kwargs):
            self._die("update")
            return step(*args, **kwargs)

        optimizer = self.training.optimizer
        step, optimizer.step = optimizer.step, after_the_backward_pass
        try:
            return super().update(batch, loss)
        finally:
            optimizer.step = step

    def _sync(self):
        write = self.rollout.write_weights

        def after_the_first_bucket(writes, inspect=None):
            def watched():
                for some in writes:
                    yield some
                    self._die("sync")

            write(watched(), inspect)

        # Only what follows the update: the sync before the first sampling belongs to `generate`.
        if self.version:
            self.rollout.write_weights = after_the_first_bucket
        try:
            super()._sync()
        finally:
            self.rollout.write_weights = write

    @to_all
    def save(self, folder):
        super().save(folder)
        self._die("save")


if __name__ == "__main__":
    from tests.recipes import fatal_grpo  # workers must find the class by name

    recipes.grpo.PolicyWorker = fatal_grpo.FatalPolicyWorker
    recipes.grpo.main()

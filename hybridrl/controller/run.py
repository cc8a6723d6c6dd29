"""A run: its folder, steps, metrics, checkpoints, and what happens on Ctrl-C.

    with Run(cfg, "grpo") as run:
        run.restore(policy=policy, prompts=prompts)
        for step, batch in run.steps(prompts):
            with run.phase("generate"):
                ...
            run.log(step, metrics)
            run.checkpoint(step, policy=policy, prompts=prompts)

The first Ctrl-C (or SIGTERM) lets the step finish, saves a checkpoint and stops; a second one stops at once.
Either way the run resumes from its newest checkpoint, and the metrics of a resumed run are those of an
unbroken one.
"""

import json
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from tensordict import TensorDict

from hybridrl.batch import num_rows
from hybridrl.controller.checkpoints import Checkpoints
from hybridrl.controller.logs import log_to_file
from hybridrl.controller.progress import ProgressBar
from hybridrl.controller.run_folder import LineFile, changed_options, lock, open_folder, write_options
from hybridrl.controller.samples import evenly, samples_of
from hybridrl.controller.trackers import TRACKERS, Tracker, check_trackers
from hybridrl.metrics import to_line


class Run:
    """One run of a recipe; `cfg` is its root config, with `trainer` and `cluster`.

    Attributes: dir (the folder), log_dir, step (the last one begun or restored), resumed (the folder was there).
    """

    def __init__(self, cfg: Any, recipe: str):
        self.cfg, self.recipe = cfg, recipe
        self.step = 0
        self._things: dict[str, Any] = {}
        self._saved_step = -1
        self._seconds: dict[str, float] = defaultdict(float)
        self._in_step = self._stopping = False
        self._trackers: list[Tracker] | None = None

    def __enter__(self) -> Self:
        trainer = self.cfg.trainer
        check_trackers(trainer.trackers)
        self.dir, self.resumed = open_folder(trainer.run_dir, self.recipe)
        self.log_dir = self.dir / "logs"
        with ExitStack() as stack:
            stack.enter_context(lock(self.dir))
            self.progress = ProgressBar(self.recipe, trainer.steps, live=self.cfg.cluster.backend != "local")
            stack.callback(self.progress.close)
            self._log = stack.enter_context(log_to_file(self.log_dir / "controller.log", self.say))
            self.say(f"{'resuming' if self.resumed else 'run'} {self.dir}")
            if self.resumed:
                for change in changed_options(self.dir, self.cfg):
                    self.say(f"option changed: {change}")
            write_options(self.dir, self.cfg, self.recipe)
            self._checkpoints = Checkpoints(self.dir / "checkpoints", trainer.keep_checkpoints)
            self._metrics, self._samples = (LineFile(self.dir / f"{name}.jsonl") for name in ("metrics", "samples"))
            stack.callback(self._metrics.close)
            stack.callback(self._samples.close)
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, signal.SIGTERM):
                    stack.callback(signal.signal, number, signal.getsignal(number))
            self._catch_signals()
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        with self._cleanup:
            for tracker in self._trackers or []:
                tracker.close()
            if error is not None:
                self._log.info("the run stopped", exc_info=error)
                if self._checkpoints.newest_first():
                    self.say(f"The run can be resumed: --config {self._shown('config.yaml')}")

    def restore(self, **things: Any) -> int:
        """Load the newest sound checkpoint into `things` and return its step; 0 when there is none.

        A thing is a worker group with `save(folder)` and `load(folder)`, or an object with a JSON-able
        `state_dict()` and `load_state_dict()`. Metrics and samples after that step are cut. Raises
        CheckpointError when every checkpoint is damaged or it lacks one of the things.
        """
        self._things = things
        self.step = self._saved_step = self._checkpoints.restore(things, self.say)
        for lines in (self._metrics, self._samples):
            lines.cut(self.step or -1)  # without a checkpoint the run starts over, its step 0 included
        if self.step:
            self.say(f"restored step {self.step}")
        return self.step

    def steps(self, prompts: Any) -> Iterator[tuple[int, TensorDict]]:
        """(step, batch) for each remaining step; batches are `prompts.next_batch(trainer.prompts_per_step)`.

        Raises KeyboardInterrupt after a step during which Ctrl-C was pressed, once that step is saved.
        """
        trainer = self.cfg.trainer
        self.progress.start(self.step)
        self._catch_signals()  # again: a cluster that started since may have set its own handlers
        while self.step < trainer.steps:
            self.step += 1
            self._began = time.perf_counter()
            self._seconds.clear()
            self._in_step = True
            yield self.step, prompts.next_batch(trainer.prompts_per_step)
            if self._stopping and self._things:
                self._save(self.step)
            self._in_step = False
            if self._stopping:
                raise KeyboardInterrupt(f"stopped after step {self.step}")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to this step's `time/<name>`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - began

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics, with its `time/...`, to `metrics.jsonl`, the trackers and the progress line.

        `time/step` runs from the drawing of the batch to this call. Values are numbers or 0-d tensors.
        """
        if self._in_step:
            self._seconds["step"] = time.perf_counter() - self._began
        row = {name: float(value) for name, value in metrics.items()}
        row |= {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._metrics.write(to_line(step, row))
        if self._trackers is None:
            options = asdict(self.cfg)
            self._trackers = [TRACKERS[name](self.dir, options, step) for name in self.cfg.trainer.trackers]
        for tracker in self._trackers:
            tracker.log(step, row)
        self.progress.update(step, row)

    def samples(self, step: int, batch: TensorDict) -> None:
        """Write `trainer.save_samples` rows, evenly spread over the batch, to `samples.jsonl` (see `samples_of`)."""
        for sample in samples_of(step, batch, evenly(num_rows(batch), self.cfg.trainer.save_samples)):
            self._samples.write(json.dumps(sample, default=str, ensure_ascii=False))

    def checkpoint(self, step: int, **things: Any) -> None:
        """Save `things` when the step is due: every `trainer.checkpoint_every`, the last, or one cut by Ctrl-C.

        Raises CheckpointError when the disk is full; the previous checkpoint stays.
        """
        self._things = things
        trainer = self.cfg.trainer
        due = trainer.checkpoint_every and step % trainer.checkpoint_every == 0
        if due or step == trainer.steps or self._stopping:
            self._save(step)

    def say(self, text: str) -> None:
        """Show a line to the user."""
        self.progress.say(text)

    def _save(self, step: int) -> None:
        if step == self._saved_step:
            return
        began = time.perf_counter()
        folder = self._checkpoints.save(step, self._things)
        self._saved_step = step
        self._log.info("%s saved in %.1f s", folder.name, time.perf_counter() - began)

    def _shown(self, name: str) -> Path:
        """A file of the folder, relative to the working directory if it is below it."""
        path, here = self.dir / name, Path.cwd()
        return path.relative_to(here) if path.is_relative_to(here) else path

    def _catch_signals(self) -> None:
        """Ctrl-C and SIGTERM: at the first one finish the step; at the second, or outside a step, stop at once."""

        def handle(number: int, frame: object) -> None:
            if not self._in_step or self._stopping:
                raise KeyboardInterrupt
            self._stopping = True
            # not through the console: the signal may have come while it was printing
            os.write(2, f"\nStopping after step {self.step}; press Ctrl-C again to stop at once.\n".encode())

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handle)
            signal.signal(signal.SIGTERM, handle)

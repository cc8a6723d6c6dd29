"""What the terminal shows of a run: a live bar with the watched numbers, or a plain line a step."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hybridrl.metrics import format_metrics


class ProgressBar:
    """Live on a terminal; plain lines elsewhere, and where a debugger needs the terminal (`live=False`)."""

    def __init__(self, name: str, total: int, live: bool = True):
        self.console = Console()
        self._live = live and self.console.is_terminal
        self._bar = Progress(TextColumn(name), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[shown]}"),
                             TimeRemainingColumn(), console=self.console)
        self._task: TaskID | None = None
        self._total = total

    def start(self, done: int) -> None:
        """Show the bar with `done` of all steps."""
        if self._live:
            self._task = self._bar.add_task("steps", total=self._total, completed=done, shown="")
            self._bar.start()

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Show a finished step."""
        shown = format_metrics(metrics)
        if self._task is not None:
            self._bar.update(self._task, completed=step, shown=shown)
        else:  # also step 0, which is before the first
            self.say(f"step {step}/{self._total}  {shown}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._task is not None:
            self._bar.stop()

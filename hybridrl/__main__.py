"""The command `hybridrl`."""

import argparse
import sys
from collections.abc import Sequence

from hybridrl.errors import HybridRLError
from hybridrl.show import LARGE_GAP, show


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line; an error of ours is one line on stderr, and the exit status 1."""
    given = vars(_parser().parse_args(words))
    run = given.pop("function")
    try:
        run(**given)
    except HybridRLError as error:
        sys.exit(f"hybridrl: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybridrl", description="Training runs start with python -m recipes.NAME.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("show", help="saved responses and episodes of a run",
                                  description="A table of a run's saved responses or, with --row, one turn by turn.")
    command.add_argument("run", metavar="RUN", help="the run's folder")
    command.add_argument("--step", type=int, metavar="N", help="only of this step")
    command.add_argument("--row", type=int, metavar="K", help="this row of the step, or of the last step")
    command.add_argument("--sort", choices=("step", "reward"), default="step", help="order of the table")
    command.add_argument("--tokens", action="store_true", help="show the tokens of the row: «not trained», "
                         "[token|log-prob gap], <v3> where another weight version begins")
    command.add_argument("--gap", type=float, default=LARGE_GAP, metavar="NATS",
                         help="mark log-prob gaps from this size on (default: %(default)s)")
    command.add_argument("--evaluation", action="store_true",
                         help="responses of the run's evaluations instead of those it trained on")
    command.set_defaults(function=show)
    return parser


if __name__ == "__main__":
    main()

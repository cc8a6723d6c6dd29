"""What episodes happen in: the contract, environments that come with the library, and the processes they run in."""

from hybridrl.environments.binding import ENVIRONMENTS
from hybridrl.environments.environment import (
    Action,
    AsyncEnvironment,
    Environment,
    Message,
    Observation,
    Step,
    Task,
    Trajectory,
    Turn,
)

__all__ = ["ENVIRONMENTS", "Action", "AsyncEnvironment", "Environment", "Message", "Observation", "Step", "Task",
           "Trajectory", "Turn"]

"""An environment whose observations are the results of tools that the policy calls."""

from typing import Any

from hybridrl.environments.environment import Action, Environment, Message, Step, Task, Trajectory
from hybridrl.environments.tools.calling import call
from hybridrl.environments.tools.calls import FORMATS, BadCall, Call, calls_in
from hybridrl.environments.tools.tool import KEY, Tool, tool_from
from hybridrl.errors import ConfigError, unknown
from hybridrl.rewards.binding import BoundReward, bind


class ToolEnvironment(Environment):
    """Runs the tool calls of each response and shows their results; the first response without a call is the answer.

    The answer is scored by a reward function; an episode that ends without one has reward 0. A call that can't be
    read, names no tool or has wrong arguments is answered with what is wrong, and counts as a call.

    Args:
        tools: names of `hybridrl.environments.tools.TOOLS`, import paths `package.module:function`, or mappings with
            `tool`, and `name`, `options` (of a class), `time_s`, `output_chars`.
        function: a name of `hybridrl.rewards.REWARDS`, or `package.module:function`.
        options: keyword arguments handed to it.
        format: how the model writes calls, a name of FORMATS.
        max_calls: calls of one episode; a response with another call ends it.
        time_s: longest call, in seconds. The calls of a response run one after the other.
        output_chars: longest result; the rest is cut.
    """

    def __init__(self, tools: list, function: str, options: dict[str, Any] | None = None, format: str = "hermes",
                 max_calls: int = 8, time_s: float = 10.0, output_chars: int = 4000):
        self._tools, self._score = self.check_options(tools, function, options, format, max_calls, time_s,
                                                      output_chars)
        self.tools = [tool.schema for tool in self._tools.values()]
        self._format, self._max_calls = format, max_calls
        self._schemas = {name: tool.parameters for name, tool in self._tools.items()}

    @staticmethod
    def check_options(tools: list, function: str, options: dict[str, Any] | None = None, format: str = "hermes",
                      max_calls: int = 8, time_s: float = 10.0, output_chars: int = 4000
                      ) -> tuple[dict[str, Tool], BoundReward]:
        """The tools by name and the reward function. Raises ConfigError when they don't fit."""
        if format not in FORMATS:
            raise ConfigError("environment.options.format: " + unknown("format of tool calls", format, FORMATS))
        if max_calls < 1:
            raise ConfigError(f"environment.options.max_calls must be at least 1, got {max_calls}.")
        if not tools:
            raise ConfigError(f"{KEY} must name at least one tool.")
        made: dict[str, Tool] = {}
        for entry in tools:
            tool = tool_from(entry, time_s, output_chars)
            if tool.name in made:
                raise ConfigError(f"{KEY}: two tools have the name {tool.name!r}; give one another `name`.")
            made[tool.name] = tool
        return made, bind(function, options or {})

    def reset(self, task: Task) -> None:
        self._left, self._answered = self._max_calls, False

    def step(self, action: Action) -> Step:
        calls = calls_in(action, self._format, self._schemas)
        if not calls or self._left == 0:
            self._answered = not calls
            return Step(done=True, info={"calls": 0, "failed_calls": len(calls)})
        results = [self._result(one) for one in calls]
        if self._left == 0:
            results[-1][1]["content"] += "\n[That was the last call: answer now.]"
        failed = sum(not ok for ok, _ in results)
        return Step([message for _, message in results], info={"calls": len(calls), "failed_calls": failed})

    def _result(self, one: Call | BadCall) -> tuple[bool, Message]:
        """Whether a call went well, and the message that answers it."""
        name = one.name if isinstance(one, Call) else ""
        ok, text = self._run(one)
        return ok, {"role": "tool", "name": name[:64], "content": text}

    def _run(self, one: Call | BadCall) -> tuple[bool, str]:
        if self._left == 0:
            return False, "This call was not run: no calls are left."
        self._left -= 1
        if isinstance(one, BadCall):
            return False, f"The tool call was not understood: {one.error}"
        if one.name not in self._tools:
            return False, f"There is no tool {one.name[:64]!r}, only {', '.join(self._tools)}."
        tool = self._tools[one.name]
        faults = tool.faults(one.arguments)
        if faults:
            return False, f"Wrong arguments of {one.name}: {'; '.join(faults)}."
        return call(tool, one.arguments)

    def state(self) -> dict[str, int]:
        return {"calls_left": self._left}

    def verify(self, trajectory: Trajectory) -> float:
        if not self._answered:
            return 0.0
        task = trajectory.task
        return self._score({"response": str(trajectory.response), "answer": task.answer, "prompt": task.prompt,
                            "task": task.data})

"""Where episodes are played."""

from dataclasses import dataclass, field
from typing import Any

from hybridrl.config.checks import check


@dataclass(kw_only=True, slots=True)
class EnvironmentConfig:
    name: str = ""
    """`agent`, `guess`, `tools`, `verifier`; of other packages `gymnasium`, `openenv`, `reasoning_gym`, `textarena`,
    `verifiers`; or a class's import path, `package.module:Class`; empty plays no episodes."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
    chat_template: bool = True
    """Render observations with the tokenizer's chat template; off feeds them as they are, one after the other."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """More variables for the chat template, for instance `{enable_thinking: false}`."""
    system_prompt: str = ""
    """System message put before the first observation unless that begins with one."""
    max_turns: int = 8
    """Turns of one episode, those of all its agents together."""
    max_turn_tokens: int = 0
    """Longest response of one turn, in tokens; 0 leaves `policy.rollout.max_response_tokens`, which limits all turns
    and the observations between them together."""
    max_running_episodes: int = 256
    """Episodes that one engine plays at a time, at most; fewer run while they would not fit its key-value cache."""
    turn_timeout_s: float = 60.0
    """Longest call of one method of the environment, or time of an agent between two calls, in seconds."""
    episode_timeout_s: float = 600.0
    """Longest episode, in seconds."""
    min_success_frac: float = 0.5
    """Share of the episodes of one call that must not fail; below it the run stops."""

    @property
    def enabled(self) -> bool:
        """Whether an environment is named."""
        return bool(self.name)

    def validate(self, key: str = "environment") -> None:
        check(self.chat_template or not self.system_prompt, f"{key}.system_prompt", self.system_prompt,
              "empty with chat_template=false")
        check(self.max_turns >= 1, f"{key}.max_turns", self.max_turns, "at least 1")
        check(self.max_turn_tokens >= 0, f"{key}.max_turn_tokens", self.max_turn_tokens, "at least 0")
        check(self.max_running_episodes >= 1, f"{key}.max_running_episodes", self.max_running_episodes, "at least 1")
        check(self.turn_timeout_s > 0, f"{key}.turn_timeout_s", self.turn_timeout_s, "positive")
        check(self.episode_timeout_s > 0, f"{key}.episode_timeout_s", self.episode_timeout_s, "positive")
        check(0 <= self.min_success_frac <= 1, f"{key}.min_success_frac", self.min_success_frac, "from 0 to 1")

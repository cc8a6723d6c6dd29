"""OpenAI's API in front of a rollout engine: for agents that play episodes, and for people."""

"""hybridrl: post-train language models with reinforcement learning, one controller, two engines in one process."""

__version__ = "0.1.0"

"""hybridrl: post-train language models with reinforcement learning, one controller, two engines in one process."""

import os

# Read when torch is first imported: its start-up notes belong to no user's terminal.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

__version__ = "0.1.0"

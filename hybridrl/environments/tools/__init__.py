"""Tools for the policy: Python functions that it calls in its responses, and the environment that runs them."""

from hybridrl.environments.tools.environment import ToolEnvironment
from hybridrl.environments.tools.tool import TOOLS, Tool

__all__ = ["TOOLS", "Tool", "ToolEnvironment"]

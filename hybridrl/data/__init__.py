"""Datasets to batches of prompts: sources, chat templates and tokens, a loader that resumes exactly."""

from hybridrl.data.loader import PromptLoader, row_seeds
from hybridrl.data.prompts import PromptSet, load_examples, load_prompts

__all__ = ["PromptLoader", "PromptSet", "load_examples", "load_prompts", "row_seeds"]

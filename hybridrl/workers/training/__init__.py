"""FSDP2 training of Hugging Face causal language models: log-probs, updates, checkpoints, export."""

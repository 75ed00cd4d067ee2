"""State of a run, and models in the formats of others."""

from moetrain.checkpoint.train_state import CheckpointFolder

__all__ = ["CheckpointFolder"]

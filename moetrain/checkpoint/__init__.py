"""State of a run, and models in the formats of others."""

from moetrain.checkpoint.hugging_face import PretrainedWeights, from_pretrained, save_pretrained
from moetrain.checkpoint.train_state import CheckpointFolder

__all__ = ["CheckpointFolder", "PretrainedWeights", "from_pretrained", "save_pretrained"]

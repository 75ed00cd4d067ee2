"""Text to global batches."""

from moetrain.data.batches import GlobalBatches, Prefetcher
from moetrain.data.build import Data, build_data
from moetrain.data.packing import TokenDataset

__all__ = ["Data", "GlobalBatches", "Prefetcher", "TokenDataset", "build_data"]

"""The training loss of a DeepSeek model: next token plus multi-token prediction, as sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from moetrain.config.model import ModelConfig


class _MicroBatch(Protocol):
    """What this loss needs of a micro-batch (``moetrain.accumulate.MicroBatch``)."""

    @property
    def input_ids(self) -> Tensor: ...

    @property
    def extra(self) -> Mapping[str, Tensor]: ...

    @property
    def position_ids(self) -> Tensor | None: ...

    def targets(self, ahead: int = 1) -> Tensor: ...

    def attention_documents(self) -> Tensor | None: ...


class DeepSeekLoss:
    """Terms ``lm``, ``mtp_1`` ... ``mtp_D``; total = lm + mtp_weight / D * sum of the mtp terms (V3 paper eqs 24-25).

    Args:
        config: the model's.
        mtp_weight: lambda; may be changed between steps (V3: 0.3 for the first 10T tokens, then 0.1).
    """

    def __init__(self, config: ModelConfig, mtp_weight: float = 0.3) -> None:
        depth = config.num_nextn_predict_layers
        self.names = ("lm", *(f"mtp_{k}" for k in range(1, depth + 1)))
        self.depths = tuple(range(depth + 1))
        self.mtp_weight = mtp_weight

    @property
    def weights(self) -> tuple[float, ...]:
        depth = len(self.depths) - 1
        return (1.0, *([self.mtp_weight / depth] * depth if depth else []))

    def __call__(self, model: nn.Module, micro_batch: _MicroBatch) -> Tensor:
        """[1 + D] sums, at least fp32."""
        sums: Tensor = model(micro_batch.input_ids, **self.inputs(micro_batch))
        return sums

    def inputs(self, micro_batch: _MicroBatch) -> dict[str, Tensor | None]:
        """What the model takes besides the token ids.

        Raises:
            ValueError: the micro-batch holds something else, a misspelled key maybe.
        """
        if micro_batch.extra:
            raise ValueError(
                f"a DeepSeek model takes no {', '.join(micro_batch.extra)}: input_ids, labels, attention_mask, "
                "position_ids and document_ids are what it knows"
            )
        return {
            "position_ids": micro_batch.position_ids,
            "document_ids": micro_batch.attention_documents(),
            "targets": torch.stack([micro_batch.targets(depth + 1) for depth in self.depths]),
        }

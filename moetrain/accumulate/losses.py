"""The loss interface of a step, and the causal language-model loss for any model that gives logits.

A loss here is a vector of *sums*, one per term; the accumulator divides each by its own global denominator and weighs
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moetrain.accumulate.window import IGNORED, MicroBatch


class Loss(Protocol):
    """``loss(model, micro_batch) -> [n_terms]`` sums over the micro-batch's targets, at least fp32.

    Attributes:
        names: names of the terms.
        depths: whose targets each term sums over: 0 = next token, k = the token k further on (MTP depth k).
        weights: weight of each term in the total, read at every step.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def depths(self) -> Sequence[int]: ...

    @property
    def weights(self) -> Sequence[float]: ...

    def __call__(self, model: nn.Module, micro_batch: MicroBatch) -> Tensor: ...


class CausalLMLoss:
    """Next-token cross-entropy of a model called with ``input_ids`` (and ``attention_mask``, ``position_ids``, extras).

    Packed documents come as ``position_ids`` that start again, as transformers expects them; ``document_ids`` only end
    the loss at a document's end.
    """

    names = ("lm",)
    depths = (0,)
    weights = (1.0,)

    def __call__(self, model: nn.Module, micro_batch: MicroBatch) -> Tensor:
        inputs: dict[str, Tensor] = {"input_ids": micro_batch.input_ids, **micro_batch.extra}
        if micro_batch.attention_mask is not None:
            inputs["attention_mask"] = micro_batch.attention_mask
        if micro_batch.position_ids is not None:
            inputs["position_ids"] = micro_batch.position_ids
        out = model(**inputs)
        logits: Tensor = getattr(out, "logits", out)
        return self.sum_of(logits, micro_batch)

    @staticmethod
    def sum_of(logits: Tensor, micro_batch: MicroBatch) -> Tensor:
        """[1]: summed cross-entropy, at least fp32; zero, with its graph, where no label is valid."""
        stat = torch.promote_types(logits.dtype, torch.float32)
        loss = F.cross_entropy(
            logits.flatten(0, 1).to(stat), micro_batch.targets().flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return loss.unsqueeze(0)


causal_lm_loss = CausalLMLoss()

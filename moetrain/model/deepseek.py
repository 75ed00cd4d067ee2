"""DeepSeek-V2-Lite, V2 and V3 as one class for one device; how it is spread is applied from outside (``parallel/``).

Legend: B rows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moetrain.config.model import ModelConfig
from moetrain.model.backends import LOGITS, Backend
from moetrain.model.block import Block
from moetrain.model.gate import Gate
from moetrain.model.layers import Embedding, Linear, RMSNorm
from moetrain.model.mla import MLA
from moetrain.model.moe import RoutedExperts
from moetrain.model.mtp import MTPModule, shifted
from moetrain.model.rope import rotation
from moetrain.model.weights import FreshWeights
from moetrain_kernels.products import linear_cross_entropy


class Part(NamedTuple):
    """A run of the model's steps, for who computes it in pieces.

    layers: which blocks; first: embeds the tokens before them; last: after them comes the final norm, the head and
    multi-token prediction.
    """

    layers: range
    first: bool
    last: bool


class DeepSeek(nn.Module):
    """The whole model. Weights are drawn as torch's modules draw theirs; ``init_weights(seed)`` draws them again.

    ``config`` has DeepSeek's keys. May be built under ``torch.device("meta")``, and then has no weights yet.
    """

    #: names of parameters and buffers that were taken out, since another rank holds them
    elsewhere: frozenset[str] = frozenset()
    logits: int = LOGITS  # elements of them that exist at a time

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.mtp = nn.ModuleList(MTPModule(config, k + 1) for k in range(config.num_nextn_predict_layers))
        if not self.lm_head.weight.is_meta:
            self.init_weights(int(torch.randint(2**31, (), device="cpu")))

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        targets: Tensor | None = None,
        part: Part | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Logits, or with ``targets`` the summed losses, for which logits never exist whole.

        Args:
            input_ids: [B, T] int64.
            position_ids: [B, T] int64; default 0..T-1 in every row.
            document_ids: [B, T] integers; attention stays within a document. None = one document a row.
            targets: [1 + num_nextn_predict_layers, B, T] int64: what the head (row 0) and MTP module k (row k) have to
                predict at each position, -100 = nothing.
            part: compute only this; modules that it does not use may be None. Default: everything.
            hidden: [B, T, D], what the part before gave; needed by all but the first.

        Returns:
            of a part that is not the last: its hidden states, [B, T, D]; else
            [B, T, V] in the model's dtype, or with targets the cross-entropy sums, [1 + num_nextn_predict_layers], at
            least fp32: main, then MTP depth 1, 2, ...
        """
        T = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(T, device=input_ids.device).unsqueeze(0)
        part = part or Part(range(len(self.layers)), first=True, last=True)
        if part.first:
            hidden = self.embed_tokens(input_ids)
        assert hidden is not None
        x = hidden
        turn = rotation(self.config, position_ids, x.dtype)
        for i in part.layers:
            x = self.layers[i](x, turn, document_ids)
        if not part.last:
            return x
        hidden = self.norm(x)
        if targets is None:
            logits: Tensor = self.lm_head(hidden)
            return logits
        sums = [self._cross_entropy(hidden, targets[0])]
        for k, module in enumerate(self.mtp, start=1):
            hidden = module(hidden, self.embed_tokens(shifted(input_ids, k)), turn, document_ids)
            sums.append(self._cross_entropy(hidden, targets[k]))
        return torch.stack(sums)

    def _cross_entropy(self, hidden_BTD: Tensor, target_BT: Tensor) -> Tensor:
        head = self.lm_head
        chunk = max(128, self.logits // self.config.vocab_size)
        return linear_cross_entropy(
            hidden_BTD.flatten(0, 1), head.weight, target_BT.flatten(), in_place_grad=head.in_place_grad, chunk=chunk
        )

    @torch.no_grad()
    def init_weights(self, seed: int, device: torch.device | str | None = None) -> None:
        """Fresh ones (``FreshWeights``), with the config's ``initializer_range``.

        A model on the meta device is materialised on ``device`` first.
        """
        if any(p.is_meta for p in self.parameters()):
            self.to_empty(device=device or "cpu")
        weights = FreshWeights(self.config.initializer_range, seed)
        for name, tensor in self.state_dict().items():
            weights.fill(name, tensor.shape, 0, tensor)

    def use_backend(self, backend: Backend) -> None:
        """Runs attention, routers and experts on the given implementation (see ``Backend.for_device``)."""
        self.logits = backend.logits
        for module in self.modules():
            if isinstance(module, MLA):
                module.attention = backend.attention
            elif isinstance(module, Gate):
                module.route = backend.route
            elif isinstance(module, RoutedExperts):
                module.product = backend.experts

    def set_in_place_gradients(self, on: bool) -> None:
        """Whether weight gradients are added inside the backward products; only for who owns the gradients.

        Gradient hooks of parameters do not fire then (DistributedDataParallel needs them; FSDP2 does not).
        """
        for module in self.modules():
            if hasattr(module, "in_place_grad"):
                setattr(module, "in_place_grad", on)  # noqa: B010 - of several classes

"""What DeepEP's documentation says of ``deep_ep.Buffer``, over gloo: real collectives, no speed. The contract:

``dispatch`` sends each token once to every rank of its experts (``topk_idx``); rows arrive by source rank and token,
with experts numbered from this rank's first and -1 for others', weights 0 there. ``combine`` sums a token's rows from
all ranks, and the weights beside them. ``dispatch`` with a handle goes the same ways, without experts. Events are
waited for.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class Event:
    def __init__(self):
        self.waited = False

    def current_stream_wait(self):
        self.waited = True


class Buffer:
    def __init__(self, group):
        self.group, self.ranks, self.events = group, group.size(), []

    def _event(self):
        self.events.append(Event())
        return self.events[-1]

    def get_dispatch_layout(self, topk_idx, num_experts):
        rank = topk_idx // (num_experts // self.ranks)
        in_rank = torch.stack([(rank == r).any(dim=1) for r in range(self.ranks)], dim=1)
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        return in_rank.sum(0), None, per_expert, in_rank, self._event()

    def dispatch(
        self, x, *, handle=None, topk_idx=None, topk_weights=None, num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None, is_token_in_rank=None, num_tokens_per_expert=None, async_finish=False,
    ):  # fmt: skip
        assert async_finish
        if handle is None:
            assert topk_idx.dtype == torch.int64 and topk_weights.dtype == torch.float32
            token = is_token_in_rank.t().nonzero()[:, 1]
            out = is_token_in_rank.sum(0)
            into = torch.empty_like(out)
            dist.all_to_all_single(into, out, group=self.group)
            handle = (token, out.tolist(), into.tolist(), len(topk_idx))
        else:
            assert topk_idx is None and topk_weights is None
            token = handle[0]
        rows = (
            tuple(self._go(part[token], handle) for part in x) if isinstance(x, tuple) else self._go(x[token], handle)
        )
        if topk_idx is None:
            return rows, None, None, None, None, self._event()
        idx, weights = self._go(topk_idx[token], handle), self._go(topk_weights[token], handle)
        local = len(num_tokens_per_expert) // self.ranks
        mine = idx // local == dist.get_rank(self.group)
        idx = torch.where(mine, idx % local, -1)
        return rows, idx, torch.where(mine, weights, 0.0), None, handle, self._event()

    def combine(self, x, handle, *, topk_weights=None, async_finish=False):
        token, _, _, tokens = handle
        back = x.new_zeros(tokens, x.shape[1]).index_add_(0, token, self._go(x, handle, back=True))
        if topk_weights is not None:
            weights = self._go(topk_weights, handle, back=True)
            topk_weights = weights.new_zeros(tokens, weights.shape[1]).index_add_(0, token, weights)
        return back, topk_weights, self._event()

    def _go(self, x, handle, back=False):
        _, out, into, _ = handle
        if back:
            out, into = into, out
        raw = x.contiguous().view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x.contiguous()
        got = raw.new_empty(sum(into), *raw.shape[1:])
        dist.all_to_all_single(got, raw, into, out, group=self.group)
        return got.view(x.dtype)

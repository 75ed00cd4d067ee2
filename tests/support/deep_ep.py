"""What DeepEP's documentation says of ``deep_ep.Buffer``, over gloo: real collectives, no speed. The contract:

``dispatch`` sends each token once to every rank of its experts (``topk_idx``); rows arrive by source rank and token,
with experts numbered from this rank's first and -1 for others', weights 0 there. ``combine`` sums a token's rows from
all ranks, and the weights beside them. ``dispatch`` with a handle goes the same ways, without experts. What they return
is there once its event has been waited for, and NaN before (integers: far too large).
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class Event:
    """What it stands for is under way: the tensors hold nothing that makes sense until somebody waits for it, and what
    they come from must not be written meanwhile."""

    def __init__(self, inputs, outputs):
        self._inputs = [(x, x._version) for x in inputs]
        self._arrived = [(x, x.clone()) for x in outputs]
        for x in outputs:
            raw = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
            raw.fill_(0x7F if raw is not x else torch.nan if x.is_floating_point() else 1 << 40)

    def current_stream_wait(self):
        assert all(x._version == version for x, version in self._inputs)
        for x, arrived in self._arrived:
            x.copy_(arrived)
        self._inputs, self._arrived = [], []


class _Config:
    def __init__(self, ranks):
        self.ranks = ranks

    def get_nvl_buffer_size_hint(self, hidden_bytes, ranks):
        return hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes, ranks):
        return 0


class Buffer:
    get_dispatch_config = get_combine_config = _Config

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0):
        self.group, self.ranks = group, group.size()

    def get_dispatch_layout(self, topk_idx, num_experts):
        rank = topk_idx // (num_experts // self.ranks)
        in_rank = torch.stack([(rank == r).any(dim=1) for r in range(self.ranks)], dim=1)
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        return in_rank.sum(0), None, per_expert, in_rank, None  # on the stream that asks

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
        sent, here = (x, rows) if isinstance(x, tuple) else ((x,), (rows,))
        if topk_idx is None:
            return rows, None, None, None, None, Event(sent, here)
        idx, weights = self._go(topk_idx[token], handle), self._go(topk_weights[token], handle)
        local = len(num_tokens_per_expert) // self.ranks
        mine = idx // local == dist.get_rank(self.group)
        idx = torch.where(mine, idx % local, -1)
        weights = torch.where(mine, weights, 0.0)
        event = Event((*sent, topk_idx, topk_weights), (*here, idx, weights))
        return rows, idx, weights, None, handle, event

    def combine(self, x, handle, *, topk_weights=None, async_finish=False):
        assert async_finish
        token, _, _, tokens = handle
        sent, back_weights = [x], []
        back = x.new_zeros(tokens, x.shape[1]).index_add_(0, token, self._go(x, handle, back=True))
        if topk_weights is not None:
            sent.append(topk_weights)
            weights = self._go(topk_weights, handle, back=True)
            topk_weights = weights.new_zeros(tokens, weights.shape[1]).index_add_(0, token, weights)
            back_weights = [topk_weights]
        return back, topk_weights, Event(sent, [back, *back_weights])

    def _go(self, x, handle, back=False):
        _, out, into, _ = handle
        if back:
            out, into = into, out
        raw = x.contiguous().view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x.contiguous()
        got = raw.new_empty(sum(into), *raw.shape[1:])
        dist.all_to_all_single(got, raw, into, out, group=self.group)
        return got.view(x.dtype)

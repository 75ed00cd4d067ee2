"""AdamW with the right parameters under weight decay.

Matrices decay (linear layers, embedding, head, gate, stacked experts); vectors (norms) do not. The routing bias is a
buffer and no optimizer ever sees it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.optim.adamw import adamw


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Every trainable parameter in exactly one group: two dimensions or more decay, fewer do not.

    Parameters of different meshes (experts under expert parallelism) are apart: torch steps a group as one.
    """
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for p in model.parameters():
        if p.requires_grad:
            groups.setdefault((p.ndim < 2, getattr(p, "device_mesh", None)), []).append(p)
    decaying_first = sorted(groups.items(), key=lambda item: item[0][0])
    return [
        {"params": params, "weight_decay": 0.0 if vector else weight_decay} for (vector, _), params in decaying_first
    ]


class Bf16Moments(torch.optim.AdamW):
    """AdamW whose moments lie in bf16 (V3 paper 3.3.3); parameters and the step itself are in fp32.

    torch's fused step on one parameter at a time, with moments of that one in fp32 for as long. Each step rounds them
    to the nearest, so a second moment that changes by less than 1/256 a step stays where it is: ``betas[1]`` has to be
    below 0.996 (V3: 0.95).
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("a window is evaluated once: this optimizer takes no closure")
        for group in self.param_groups:
            if group["betas"][1] > 1 - 2**-8:
                raise ValueError(f"moments in bf16 would not move with betas[1] {group['betas'][1]}: 0.996 at most")
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                    for name in _MOMENTS:
                        state[name] = torch.zeros_like(p, dtype=torch.bfloat16)
                first, second = (state[name].to(p.dtype) for name in _MOMENTS)
                adamw(
                    [p], [p.grad], [first], [second], [], [state["step"]], fused=True, amsgrad=False, maximize=False,
                    beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], eps=group["eps"],
                    weight_decay=group["weight_decay"],
                )  # fmt: skip
                state["exp_avg"].copy_(first)
                state["exp_avg_sq"].copy_(second)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():  # torch has cast them to the parameters' dtype
            for name in _MOMENTS:
                state[name] = state[name].to(torch.bfloat16)


_MOMENTS = ("exp_avg", "exp_avg_sq")


def build_adamw(
    groups: list[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    moments: Literal["fp32", "bf16"] = "fp32",
) -> tuple[torch.optim.AdamW, str]:
    """AdamW over ``parameter_groups``, and a line that says which implementation runs.

    torch's fused step does the whole update in one pass over each tensor, on CPU and CUDA and for sharded parameters.
    """
    kind = Bf16Moments if moments == "bf16" else torch.optim.AdamW
    optimizer = kind(groups, lr=lr, betas=betas, eps=eps, fused=True)
    return optimizer, f"optimizer: torch AdamW, fused{', moments in bf16' if moments == 'bf16' else ''}"

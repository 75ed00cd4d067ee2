"""A transformers model as it is: balance over the whole window, and its routing bias moves. Needs transformers."""

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from moetrain import Balance, MoEAccumulator
from moetrain.accumulate import windows
from moetrain.integrations.transformers import transformers_routers

config = DeepseekV3Config(
    vocab_size=128, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=3,
    first_k_dense_replace=1, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_shared_experts=1,
    num_experts_per_tok=2, n_group=1, topk_group=1, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=16, max_position_embeddings=64, use_cache=False, initializer_range=0.05,
)  # fmt: skip
torch.manual_seed(0)
model = DeepseekV3ForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
balance = Balance(scope="window", alpha=1e-3, bias_rate=1e-2)
routers = transformers_routers(model)
accumulator = MoEAccumulator(model, optimizer, balance=balance, routers=routers, max_norm=1.0)


def loader(batches: int):
    generator = torch.Generator().manual_seed(0)
    for _ in range(batches):
        ids = (torch.randint(0, 10, (4, 1), generator=generator) + torch.arange(32)) % 10
        yield {"input_ids": ids, "labels": ids}


for step, window in enumerate(windows(loader(120), micro_batches=4), start=1):
    report = accumulator.step(window)
    if step % 10 == 0:
        print(f"step {step}  loss {report.losses['lm']:.4f}  worst expert {float(report.max_violation.max()):.2f}")

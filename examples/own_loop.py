"""A loop of one's own: any model that gives logits, any loader, exact accumulation. Run: python examples/own_loop.py"""

import torch

from moetrain import Balance, ModelConfig, MoEAccumulator
from moetrain.accumulate import windows
from moetrain.model import DeepSeek, DeepSeekLoss

config = ModelConfig(
    model_type="deepseek_v3", vocab_size=128, hidden_size=64, intermediate_size=128, moe_intermediate_size=32,
    num_hidden_layers=3, first_k_dense_replace=1, num_attention_heads=4, n_routed_experts=8, n_shared_experts=1,
    num_experts_per_tok=2, scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True, kv_lora_rank=16,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, max_position_embeddings=64, initializer_range=0.05,
)  # fmt: skip
torch.manual_seed(0)
model = DeepSeek(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def loader(batches: int):
    """Counting modulo 10 from a random start; half of every row is a prompt without a loss."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(batches):
        ids = (torch.randint(0, 10, (4, 1), generator=generator) + torch.arange(32)) % 10
        labels = ids.clone()
        labels[:, :16] = -100
        yield {"input_ids": ids, "labels": labels}


balance = Balance(scope="window", alpha=1e-3, bias_rate=1e-2)
accumulator = MoEAccumulator(model, optimizer, loss=DeepSeekLoss(config), balance=balance, max_norm=1.0)
for step, window in enumerate(windows(loader(120), micro_batches=4), start=1):
    report = accumulator.step(window)
    if step % 10 == 0:
        print(f"step {step}  loss {report.losses['lm']:.4f}  worst expert {float(report.max_violation.max()):.2f}")

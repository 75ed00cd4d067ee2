"""Inside an Accelerate loop, on one process or several: accelerate launch examples/accelerate_loop.py"""

import torch
from accelerate import Accelerator
from transformers import MixtralConfig, MixtralForCausalLM

from moetrain import Balance
from moetrain.accumulate import windows
from moetrain.integrations.accelerate import accelerate_accumulator
from moetrain.integrations.transformers import transformers_routers

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=8, max_position_embeddings=64, use_cache=False,
)  # fmt: skip
rows = (torch.randint(0, 10, (480, 1)) + torch.arange(32)) % 10
loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=4)
model = MixtralForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

# gradients are summed over the processes and divided by what the whole window holds: no accumulate(), no scaling
balance, routers = Balance(scope="window", alpha=1e-2), transformers_routers(model)
accumulator = accelerate_accumulator(
    accelerator, model, optimizer, scheduler=scheduler, balance=balance, routers=routers, max_norm=1.0
)
for step, window in enumerate(windows(loader, micro_batches=8 // accelerator.num_processes), start=1):
    report = accumulator.step(window)
    if step % 5 == 0:
        losses = f"loss {report.losses['lm']:.4f}  balance {report.losses['balance']:.5f}"
        accelerator.print(f"step {step}  {losses}  lr {report.learning_rate:.4e}")
accelerator.end_training()

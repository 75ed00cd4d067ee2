"""Inside an Accelerate loop: torchrun --nproc_per_node 2 examples/accelerate_loop.py takes the steps of one process.

On a CPU `accelerate launch --num_processes 2` starts one process; on GPUs it starts two.
"""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from transformers import MixtralConfig, MixtralForCausalLM

from moetrain import Balance
from moetrain.accumulate import windows
from moetrain.integrations.accelerate import accelerate_accumulator
from moetrain.integrations.transformers import transformers_routers

accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
accelerator.print(f"{accelerator.num_processes} processes")
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
group = torch.distributed.group.WORLD if accelerator.num_processes > 1 else None  # fills windows of unequal length
for step, window in enumerate(windows(loader, 8 // accelerator.num_processes, group=group), start=1):
    report = accumulator.step(window)
    if step % 5 == 0:
        losses = f"loss {report.losses['lm']:.4f}  balance {report.losses['balance']:.5f}"
        accelerator.print(f"step {step}  {losses}  lr {report.learning_rate:.4e}")
accelerator.end_training()

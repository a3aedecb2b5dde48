"""A loop of one's own with Accelerate, and what it takes to survive: the lines with a mark.

windtunnel train --hosts 2 --inject kill:host=1,step=7 examples/elastic_accelerate.py
"""

import argparse
import hashlib

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from windtunnel.training.checkpoint.adapters.accelerate import ElasticAccelerator  # elastic
from windtunnel.training.elastic import Job, run  # elastic

EPOCHS, EXAMPLES, BATCH, CONTEXT = 3, 44, 2, 12


def train(job: Job, cpu: bool) -> dict:  # elastic: it was main()
    set_seed(3)
    accelerator = ElasticAccelerator(job, cpu=cpu, gradient_accumulation_steps=2)  # elastic: Accelerator(…)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
    model = LlamaForCausalLM(config)
    tokens = torch.randint(64, (EXAMPLES, CONTEXT), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(tokens), batch_size=BATCH, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 4, 60)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    for _epoch in accelerator.epochs(EPOCHS):  # elastic: range(EPOCHS)
        for (batch,) in accelerator.batches(loader):  # elastic: loader
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                accelerator.print(f"loss {loss.item():.4f}  lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
    accelerator.end_training()
    weights = torch.cat([one.detach().flatten() for one in accelerator.unwrap_model(model).parameters()])
    digest = hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()
    return {"lr": scheduler.get_last_lr()[0], "weights": digest}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    run(lambda job: train(job, args.cpu or not torch.cuda.is_available()))  # elastic: train(…)

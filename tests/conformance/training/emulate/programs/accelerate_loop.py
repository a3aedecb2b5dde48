"""A training loop of one's own with Accelerate: accumulation, clipping, a metric gathered from all ranks."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=args.accumulate)
    set_seed(1)
    config = GPT2Config(vocab_size=4096, n_positions=args.sequence, n_embd=256, n_layer=2, n_head=4)
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(config.vocab_size, (4096, args.sequence))
    loader = DataLoader(TensorDataset(tokens), batch_size=args.batch, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = get_linear_schedule_with_warmup(optimizer, 10, 1000)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    model.train()
    steps = 0
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps += 1
            losses = accelerator.gather_for_metrics(loss.detach().repeat(args.batch))
            accelerator.print(f"step {steps}: loss {losses.mean().item():.3f}")
            if args.save:
                accelerator.save_state("state")
        if steps == 20:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()

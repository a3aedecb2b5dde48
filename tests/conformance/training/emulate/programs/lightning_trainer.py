"""A LightningModule of a small GPT, trained by Lightning's Trainer."""

import argparse

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class LanguageModel(L.LightningModule):
    def __init__(self, vocabulary=4096, width=256, layers=2, heads=4, length=256):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        logits = self(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "fsdp"])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()

    L.seed_everything(42)
    model = LanguageModel(length=args.sequence)
    loader = DataLoader(
        TensorDataset(torch.randint(4096, (4096, args.sequence))), batch_size=args.batch, shuffle=True
    )
    strategy = FSDPStrategy(auto_wrap_policy={Block}) if args.strategy == "fsdp" else "ddp"
    checkpoints = L.pytorch.callbacks.ModelCheckpoint(every_n_train_steps=1)
    trainer = L.Trainer(
        accelerator="gpu",
        devices="auto",
        num_nodes=args.nodes,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=20,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0 if args.strategy == "ddp" else None,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=args.save,
        callbacks=[checkpoints] if args.save else [],
    )
    trainer.fit(model, loader)


if __name__ == "__main__":
    main()

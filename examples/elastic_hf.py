"""Hugging Face's Trainer, and what it takes to survive: the lines with a mark.

windtunnel train --hosts 2 --inject kill:host=1,step=7 examples/elastic_hf.py
"""

import hashlib
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from windtunnel.training.checkpoint.adapters.huggingface import ElasticTrainerCallback  # elastic
from windtunnel.training.elastic import Job, run  # elastic


class Tokens(Dataset):
    def __init__(self, count: int, length: int):
        self.rows = torch.randint(64, (count, length), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def train(job: Job) -> dict:  # elastic: it was main()
    args = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        seed=3,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=Tokens(44, 12))
    ElasticTrainerCallback(job).attach(trainer)  # elastic
    trainer.train()
    weights = torch.cat([one.detach().flatten() for one in trainer.model.parameters()])
    digest = hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    return {"steps": trainer.state.global_step, "losses": losses, "weights": digest}


if __name__ == "__main__":
    run(train)  # elastic: main()

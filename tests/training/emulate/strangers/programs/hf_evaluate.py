"""A T5 trained by Seq2SeqTrainer, which evaluates by generating after each step."""

import torch
from torch.utils.data import Dataset
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)


class Pairs(Dataset):
    def __init__(self, count, length=32):
        self.rows = torch.randint(3, 1000, (count, length), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[:16]}


def score(prediction):
    assert prediction.predictions.shape == (8, 17), prediction.predictions.shape
    return {"score": float((prediction.predictions[:, 1:] == prediction.label_ids).mean())}


def main():
    set_seed(42)
    config = T5Config(
        vocab_size=1000, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    arguments = Seq2SeqTrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_steps=6,
        bf16=True,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        predict_with_generate=True,
        generation_max_length=17,
        save_strategy="no",
        report_to="none",
    )
    Seq2SeqTrainer(
        model=T5ForConditionalGeneration(config),
        args=arguments,
        train_dataset=Pairs(256),
        eval_dataset=Pairs(8),
        compute_metrics=score,
    ).train()


if __name__ == "__main__":
    main()

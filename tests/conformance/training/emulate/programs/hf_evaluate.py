"""A BART trained by Seq2SeqTrainer, which evaluates by generating after each step."""

import torch
from torch.utils.data import Dataset
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
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
    assert prediction.predictions.shape == (16, 20), prediction.predictions.shape
    return {"score": float((prediction.predictions[:, 1:17] == prediction.label_ids[:, :16]).mean())}


def main():
    set_seed(42)
    config = BartConfig(
        vocab_size=1000,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_position_embeddings=64,
        forced_eos_token_id=None,
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
        generation_max_length=20,
        save_strategy="no",
        report_to="none",
    )
    Seq2SeqTrainer(
        model=BartForConditionalGeneration(config),
        args=arguments,
        train_dataset=Pairs(256),
        eval_dataset=Pairs(16),
        compute_metrics=score,
    ).train()


if __name__ == "__main__":
    main()

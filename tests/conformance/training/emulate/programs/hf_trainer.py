"""A Llama from a config, trained by Hugging Face's Trainer in bfloat16 on synthetic tokens."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Tokens(Dataset):
    def __init__(self, count, length, vocabulary):
        self.rows = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


SIZES = {
    "tiny": (4096, 512, 1408, 2, 8, 4),
    "8b": (128256, 4096, 14336, 32, 32, 8),
    "70b": (128256, 8192, 28672, 80, 64, 8),
}

FSDP = {
    "version": 2,
    "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "reshard_after_forward": True,
    "state_dict_type": "SHARDED_STATE_DICT",
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--save-steps", type=int, default=0)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    args = parser.parse_args()

    set_seed(42)
    vocabulary, width, inner, layers, heads, groups = SIZES[args.size]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=args.sequence,
        attn_implementation=args.attention,
    )
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulate,
        max_steps=20,
        learning_rate=3e-4,
        bf16=True,
        gradient_checkpointing=args.size != "tiny",
        logging_steps=1,
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 500,
        report_to="none",
        dataloader_num_workers=0,
        **({"fsdp": "full_shard auto_wrap", "fsdp_config": FSDP} if args.fsdp else {}),
    )
    data = Tokens(4096, args.sequence, config.vocab_size)
    Trainer(model=model, args=arguments, train_dataset=data).train()


if __name__ == "__main__":
    main()

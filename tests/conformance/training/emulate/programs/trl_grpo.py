"""GRPO of TRL: completions are generated, rewarded on the host, and learned; evaluated by generation, too."""

import argparse

from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl_tokenizer import prompts, tokenizer


def reward(completions, **kwargs):
    return [float(len(set(text.split()))) for text in completions]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--evaluate", action="store_true")
    args = parser.parse_args()
    set_seed(42)
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    arguments = GRPOConfig(
        output_dir="out",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_generations=4,
        max_completion_length=16,
        max_steps=6,
        beta=0.0,
        bf16=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        eval_strategy="steps" if args.evaluate else "no",
        eval_steps=1,
        gradient_checkpointing=False,
    )
    GRPOTrainer(
        model=LlamaForCausalLM(config),
        reward_funcs=reward,
        args=arguments,
        train_dataset=prompts(256),
        eval_dataset=prompts(8) if args.evaluate else None,
        processing_class=words,
    ).train()


if __name__ == "__main__":
    main()

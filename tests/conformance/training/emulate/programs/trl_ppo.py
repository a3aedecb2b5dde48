"""PPO of TRL: a policy, its reference, a value model and a reward model, all small Llamas."""

import copy

from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, set_seed
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl_tokenizer import prompts, tokenizer


def main():
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
        num_labels=1,
    )
    arguments = PPOConfig(
        output_dir="out",
        per_device_train_batch_size=2,
        num_mini_batches=1,
        num_ppo_epochs=1,
        gradient_accumulation_steps=1,
        total_episodes=256,
        response_length=16,
        stop_token="eos",
        num_sample_generations=0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=True,
        gradient_checkpointing=False,
    )
    data = prompts(256).map(lambda row: words(row["prompt"]), remove_columns=["prompt"])
    policy = LlamaForCausalLM(config)
    PPOTrainer(
        args=arguments,
        processing_class=words,
        model=policy,
        ref_model=copy.deepcopy(policy),
        reward_model=LlamaForSequenceClassification(config),
        value_model=LlamaForSequenceClassification(config),
        train_dataset=data,
        eval_dataset=data.select(range(8)),
    ).train()


if __name__ == "__main__":
    main()

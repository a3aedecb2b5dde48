"""Self-training as people write it: a Llama generates continuations with `generate()`, then learns them."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=16)
    args = parser.parse_args()

    set_seed(42)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    prompts = torch.randint(3, 4096, (args.batch, args.prompt)).to("cuda")
    for _ in range(5):
        with torch.no_grad():
            tokens = model.generate(prompts, max_new_tokens=args.new, do_sample=args.sample, pad_token_id=0)
        assert tokens.shape == (args.batch, args.prompt + args.new), tokens.shape
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()

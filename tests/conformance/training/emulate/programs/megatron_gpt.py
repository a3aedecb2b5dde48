"""A small GPT on Megatron-Core, after its quick start: with its extensions or without."""

# ruff: noqa: E402
import argparse
import os
import sys

import torch

FUSED = "--fused" in sys.argv
if not FUSED:  # as where they are not installed
    sys.modules.update(
        dict.fromkeys(("transformer_engine", "apex", "amp_C", "fused_weight_gradient_mlp_cuda"))
    )
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig


def batches(vocabulary, batch, length, device):
    generator = torch.Generator().manual_seed(1234)
    positions = torch.arange(length, device=device).unsqueeze(0).expand(batch, -1)
    mask = torch.tril(torch.ones(1, 1, length, length, device=device)) < 0.5
    while True:
        tokens = torch.randint(vocabulary, (batch, length + 1), generator=generator).to(device)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, mask


def loss_func(output):
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach()}


def forward_step(data, model):
    tokens, labels, positions, mask = next(data)
    return model(tokens, positions, mask, labels=labels), loss_func


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()

    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tp, pipeline_model_parallel_size=args.pp
    )
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    vocabulary = 8192
    config = TransformerConfig(
        num_layers=2, hidden_size=512, num_attention_heads=8, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp, masked_softmax_fusion=False,
        gradient_accumulation_fusion=args.fused, sequence_parallel=args.fused,
        fp8="hybrid" if args.fp8 else None,
    )  # fmt: skip
    model = GPTModel(
        config=config, vocab_size=vocabulary,
        transformer_layer_spec=(
            get_gpt_layer_with_transformer_engine_spec() if args.fused else get_gpt_layer_local_spec()
        ),
        max_sequence_length=args.length, pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(), share_embeddings_and_output_weights=False,
    ).to("cuda", torch.bfloat16)  # fmt: skip
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True,
            use_distributed_optimizer=args.distributed_optimizer,
        ),
        model,
    )  # fmt: skip
    model.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=3e-4, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0,
            use_distributed_optimizer=args.distributed_optimizer,
        ),
        [model],
    )  # fmt: skip
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = model.no_sync
    data = batches(vocabulary, args.batch, args.length, torch.device("cuda", local))
    schedule = get_forward_backward_func()
    for step in range(args.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = schedule(
            forward_step_func=forward_step, data_iterator=data, model=model,
            num_microbatches=args.micro_batches, seq_length=args.length, micro_batch_size=args.batch,
            forward_only=False,
        )  # fmt: skip
        optimizer.step()
        if losses and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            print(f"step {step} loss {losses[-1]['lm loss'].item():.3f}")


if __name__ == "__main__":
    main()

"""Capture: run an unmodified script as chosen ranks of a world that is not there; write down what it does.

This is the *live* room of the capability: it runs the user's program for real, on PyTorch, with every
operator of the absent device answered by its shape function.

- `native/`: a small library that gives a CPU-only libtorch a CUDA device, and records what is issued to it.
- `surface`, `names`: complete ``torch.cuda``, its streams and events, storages and printing; what is refused.
- `world`, `values`: complete ``torch.distributed``; carry objects and values between captured ranks.
- `observe`, `ending`: modules, optimisers, steps, call sites; how far the script is run.
- `substitutes`, `kernels`, `fused`: shapes that PyTorch lacks, ``torch.compile``, own and fused kernels.
- `patches`: how functions of PyTorch are replaced, in all of these.
- `failure`: why a script failed, in one sentence.
- `session`, `worker`, `rank`: who asks for ranks, the process that forks them, and what runs in each.
- `host`: the same for a job whose device is the CPU itself.
"""

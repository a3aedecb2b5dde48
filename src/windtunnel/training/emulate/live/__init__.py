"""Capture: run an unmodified script as chosen ranks of a world that is not there; write down what it does.

This is the *live* room of the capability: it runs the user's program for real, on PyTorch, with every
operator of the absent device answered by its shape function.

- `native/`: a small library that gives a CPU-only libtorch a CUDA device, and records what is issued to it.
- `surface`: completes ``torch.cuda``, its streams and events, storages and printing.
- `world`: completes ``torch.distributed``; carries real objects between captured ranks.
- `observe`: modules, optimisers, steps, call sites; garbage collected at fixed points.
- `substitutes`: what is refused, shapes that PyTorch lacks, ``torch.compile``, own operators, checkpoints.
- `failure`: why a script failed, in one sentence.
- `worker`, `session`: the process in which ranks run, and the one that asks for them.
- `host`: the same for a job whose device is the CPU itself.
"""

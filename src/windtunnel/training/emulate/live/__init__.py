"""Capture: run an unmodified script as chosen ranks of a world that is not there; write down what it does.

This is the *live* room of the capability: it runs the user's program for real, on PyTorch, with every
operator of the absent device answered by its shape function.

- `native/`: a small library that gives a CPU-only libtorch a CUDA device, and records what is issued to it.
- `surface`, `streams`, `data`: complete ``torch.cuda``, its streams and events, storages and printing.
- `world`, `mailbox`: complete ``torch.distributed``; carry real objects between captured ranks.
- `observe`, `rows`, `collector`: modules, optimisers, steps, call sites; garbage collected at fixed points.
- `compiled`, `custom`, `saving`: ``torch.compile``, the script's own operators, checkpoints.
- `shapes`, `refusals`, `failure`: shapes that PyTorch lacks, what is refused, and the sentence that says so.
- `worker`, `session`: the process in which ranks run, and the one that asks for them.
- `host`: the same for a job whose device is the CPU itself.
"""

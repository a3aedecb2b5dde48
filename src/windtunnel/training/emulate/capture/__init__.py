"""Capture: run an unmodified script as chosen ranks of a world that is not there, and write down what it
does.

This is the *live* room of the capability: it runs the user's program for real, on PyTorch, with every
operator of the absent device answered by its shape function. `native/` is a small library that gives a
CPU-only libtorch a CUDA device; `surface` completes ``torch.cuda``; `world` completes ``torch.distributed``;
`observe` knows modules, optimisers and steps; `worker` is the process in which a rank runs; `session` starts
the workers.
"""

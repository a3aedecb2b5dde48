"""Checkpoints in peers' memory for loops that frameworks run: one module each, imported where it is used.

    from windtunnel.training.checkpoint.adapters.huggingface import ElasticTrainerCallback  # its Trainer
    from windtunnel.training.checkpoint.adapters.lightning import ElasticCallback  # lightning.Trainer
    from windtunnel.training.checkpoint.adapters.accelerate import ElasticAccelerator

Each saves after every optimizer step what the framework itself would write to disk, and where the loop stands
in its data (`cursor`), and goes on at the exact next step when the training function is called again. The
process group is that of `elastic.run`: all three take one that is there.
"""

"""windtunnel: put a real training job, serving policy or agent sandbox into a cluster that you do not have.

    import windtunnel as wt

    run = wt.emulate("train.py", "--size", "8b", cluster="h100-sxm:16x8")
    print(run.summary.iteration_time_s, run.summary.peak_reserved_bytes, run.summary.critical_path)

What is named here is loaded when it is first used: importing windtunnel costs nothing.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

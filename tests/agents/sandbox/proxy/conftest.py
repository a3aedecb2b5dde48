from agents.sandbox.proxy.model_bench import bench, model, proxy
from agents.sandbox.proxy.ways_out import way

__all__ = ["bench", "model", "proxy", "way"]

from model_bench import bench, model, proxy
from ways_out import way

__all__ = ["bench", "model", "proxy", "way"]

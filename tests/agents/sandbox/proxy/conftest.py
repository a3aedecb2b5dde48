from model_bench import bench, model, proxy

__all__ = ["bench", "model", "proxy"]

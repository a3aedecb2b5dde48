from model_bench import bench, coordinator, model

__all__ = ["bench", "coordinator", "model"]

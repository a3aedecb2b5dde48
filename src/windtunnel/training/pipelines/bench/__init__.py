"""The comparison that pipeline templates are judged by: ``windtunnel bench training.pipelines``."""

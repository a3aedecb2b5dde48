"""Pipeline templates (Oobleck, Jang et al., SOSP 2023): a pipeline-parallel job that goes on without spares.

A few plans of how to cut the model over so and so many machines are made before the job starts. Any number of
machines that is left is a sum of such plans; lost layers are copied from a pipeline that has them.
"""

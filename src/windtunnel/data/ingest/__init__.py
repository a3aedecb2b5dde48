"""Samples read, transformed and batched by workers beside the trainers, as many as they need (Meta's DPP)."""

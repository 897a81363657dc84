"""NVFP4."""

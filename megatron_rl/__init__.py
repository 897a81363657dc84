"""Asynchronous RL training of large mixture-of-experts models with Megatron-Core and vLLM."""

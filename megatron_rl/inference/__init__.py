"""What an inference engine must offer a run, and its one implementation, vLLM."""

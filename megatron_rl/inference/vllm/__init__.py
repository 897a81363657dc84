"""vLLM as the inference engine of a run. `plugin` is what runs inside its processes; the rest talks to it."""

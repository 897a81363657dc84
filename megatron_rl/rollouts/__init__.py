"""Sampling: the client of a vLLM server, episodes, the worker process, and the state that steers them (buffer, ledger, fleet)."""

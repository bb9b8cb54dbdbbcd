"""The front door: a fleet behind one address that speaks vLLM's HTTP API."""

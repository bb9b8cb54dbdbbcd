"""Engines behind one small interface: vLLM in a Ray actor, or simulated."""

"""Adapters for trainers; each imports its trainer, so none is imported by the rest."""

"""Versioned weights: what a trainer gives, how it travels, and the order of an update."""

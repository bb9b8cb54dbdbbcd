"""Moving a prompt's KV from a prefill engine to a decode engine.

`backend` says what a KV connector needs, one file per connector; `legs` is the only place that
knows the order of prefill, pull, leader and siblings.
"""

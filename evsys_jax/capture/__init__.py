"""Captured model calls: the record, the durable store, and one verified chain per rollout."""

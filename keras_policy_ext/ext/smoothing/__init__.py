"""Prepare a model for eight bits: folded scales, and rules by layer."""

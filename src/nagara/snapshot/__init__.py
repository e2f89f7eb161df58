"""Saved replicas: host facts and variants, capture, restore, hooks, canary."""

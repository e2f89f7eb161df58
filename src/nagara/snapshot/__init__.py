"""Saved replicas: host facts and variants, capture, restore, hooks, canary.

What an app itself uses is here: `before_snapshot` and `after_restore` register functions,
`listen` makes the process hear the node, `reseed` renews its random generators.
"""

from nagara.snapshot.hooks import after_restore, before_snapshot, listen, reseed

__all__ = ["after_restore", "before_snapshot", "listen", "reseed"]

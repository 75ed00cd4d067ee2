"""Knowing before paying: what a run needs, and whether it fits where it was started."""

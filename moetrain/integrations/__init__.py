"""The accumulation core in other people's models and loops."""

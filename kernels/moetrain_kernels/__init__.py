"""Kernels of moetrain: the operations that decide a training step's speed, usable without the rest of it.

Each module holds one operation: a plain PyTorch reference that says what it computes, and the fast way with
its gradient. Imports torch and, where it is installed, triton; nothing of moetrain. Import the module of the
operation you need.
"""

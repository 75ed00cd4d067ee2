"""The one exception that means "you can mend this", so that mistakes in what was given end in one sentence.

The command line prints a ``UserError`` as ``moetrain: <sentence>`` and exits with code 2. Anything else that
escapes is a fault of the program and keeps its traceback. The module is a leaf: it imports nothing.
"""


class LostRankError(RuntimeError):
    """Ranks lost each other; its text says which one waited where."""


class UserError(Exception):
    """A mistake in what the user gave; its text is one clear sentence naming the key or file and the mend."""

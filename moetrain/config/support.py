"""What the config can say but the program cannot do yet: one list, so that nothing is silently ignored.

A field enters here when it is typed before it works, and leaves with the change that makes it work.
"""

from __future__ import annotations

from moetrain.config.run import RunConfig
from moetrain.errors import UserError


def unsupported(config: RunConfig) -> list[tuple[str, str]]:
    """The settings of ``config`` that do not work yet, each with what to use in its place."""
    parallel = config.parallel
    table = [
        (parallel.cp > 1, f"parallel.cp: {parallel.cp}", "parallel.cp=1"),
    ]
    return [(what, instead) for wanted, what, instead in table if wanted]


def refuse_unsupported(config: RunConfig) -> None:
    """Raise UserError with the first setting of ``config`` that does not work yet and the mend."""
    for what, instead in unsupported(config):
        raise UserError(f"{what} does not work yet in this version; use {instead}")

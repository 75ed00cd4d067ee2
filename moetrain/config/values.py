"""Number types of the config: they exist because pydantic's own conversions are too kind and YAML's too odd.

``14.8e12`` is a fine number of tokens, ``true`` and ``"8"`` are not; a schedule such as "0.3 for the first
10T tokens, then 0.1" is one value here (:class:`Piecewise`), so that every place that needs it asks the same
question: the value at this token.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, RootModel, model_validator


class Section(BaseModel):
    """Base of every part of the config: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def shown(value: object) -> str:
    """A value as it stood in the file rather than in Python's spelling, shortened."""
    words = [(True, "true"), (False, "false"), (None, "null")]
    text = next((word for word_value, word in words if value is word_value), repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _whole(value: object) -> int:
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be a whole number, not {shown(value)}")
    return value


def _real(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a number, not {shown(value)}")
    if not math.isfinite(value):
        raise ValueError(f"must be a finite number, not {shown(value)}")
    return float(value)


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {shown(value)}")
    return value


Int = Annotated[int, BeforeValidator(_whole)]
Positive = Annotated[int, BeforeValidator(_whole), Field(gt=0)]
NotNegative = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Real = Annotated[float, BeforeValidator(_real)]
PositiveReal = Annotated[float, BeforeValidator(_real), Field(gt=0)]
NotNegativeReal = Annotated[float, BeforeValidator(_real), Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(_real), Field(ge=0, le=1)]
Truth = Annotated[bool, BeforeValidator(_truth)]


def bytes_of(text: str) -> int:
    """Bytes of a size: ``3GiB``, ``800MB``, ``3e9``.

    Raises:
        ValueError: it is none, or below one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?) *(?:([KMGT])(i?)B?|B)?", text.strip(), re.IGNORECASE)
    size = float(match[1]) if match else 0.0
    if match and match[2]:
        size *= (1024 if match[3] else 1000) ** ("KMGT".index(match[2].upper()) + 1)
    if not 1 <= size < 2**63:
        raise ValueError(f"{text!r} is not a size; write it as 3GiB")
    return int(size)


Pairs = tuple[tuple[float, float], ...]


class Piecewise(RootModel[Pairs]):
    """A value, constant or changing at numbers of tokens: ``0.3``, or ``[[0, 0.3], [10e12, 0.1]]``.

    Kept as pairs (from_tokens, value); the first starts at 0 and from_tokens grow strictly. Values are not
    negative.
    """

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _pairs(cls, given: Any) -> Any:
        if isinstance(given, int | float) and not isinstance(given, bool):
            given = [[0, given]]
        form = "must be a number or a list of [from_tokens, value] pairs"
        if not isinstance(given, list | tuple) or not given:
            raise ValueError(f"{form}, not {shown(given)}")
        pairs: list[tuple[float, float]] = []
        for pair in given:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise ValueError(f"{form}; {shown(pair)} is no such pair")
            start, value = _real(pair[0]), _real(pair[1])
            if value < 0:
                raise ValueError(f"must not be negative, but holds {value!r}")
            if (pairs and start <= pairs[-1][0]) or (not pairs and start != 0):
                raise ValueError(
                    f"must start at token 0 and grow from pair to pair, which {shown(list(pair))} does not"
                )
            pairs.append((start, value))
        return tuple(pairs)

    def at(self, tokens: float) -> float:
        """The value once ``tokens`` training tokens have been seen; a change applies from its token on."""
        return next(value for start, value in reversed(self.root) if tokens >= start or start == 0)

    @property
    def largest(self) -> float:
        """The largest value it ever takes: 0 means that whatever it weighs is off."""
        return max(value for _, value in self.root)

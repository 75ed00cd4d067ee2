"""What `import moetrain` promises: every public name is there, and loading is lazy."""

from __future__ import annotations

import importlib
import types

import pytest

import moetrain


@pytest.mark.parametrize("name", moetrain.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert name in dir(moetrain)
    value = getattr(moetrain, name)
    assert not isinstance(value, types.ModuleType)
    assert name == "__version__" or value.__name__ == name


def test_train_is_the_function_also_after_its_module_was_imported() -> None:
    module = importlib.import_module("moetrain.trainer")
    assert moetrain.train is module.train


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        moetrain.trian  # noqa: B018

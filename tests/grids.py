"""Combinations: some of each kind for every run, the rest when all is asked for."""

import pytest


def representative(values, kept):
    """Values for `parametrize`; those that are not among the ones kept are exhaustive."""
    values, kept = list(values), list(kept)
    assert all(value in values for value in kept), f"{kept} are not all among {values}"
    return [
        value
        if value in kept
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.exhaustive)
        for value in values
    ]

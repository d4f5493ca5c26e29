"""How a posterior family declares its parameters, or looks them up once they are fitted."""

from collections.abc import Mapping
from typing import Any, Protocol

from jax import Array

__all__ = ["FittedParameters", "Parameters"]


class Parameters(Protocol):
    """How a posterior family declares the parameters of one site, or looks them up once they are fitted."""

    def __call__(self, symbol: str, init: Any) -> Any:
        """The value of a parameter; `init` is its first value, or a function of a key that makes it."""
        ...

    def state(self, symbol: str, init: dict[str, Array]) -> dict[str, Array]:
        """Mutable state, a dict of arrays that a loss updates."""
        ...


class FittedParameters:
    """The fitted parameters of one GP site, as `Parameters`.

    Args:
        params: fitted parameters of all sites, and mutable state.
        site: the GP site.
        prefix: of the names of parameters.
    """

    def __init__(self, params: Mapping[str, Any], site: str, prefix: str) -> None:
        self.params, self.site, self.prefix = params, site, prefix

    def __call__(self, symbol: str, init: Any = None) -> Any:
        del init
        name = f"{self.site}_{self.prefix}_{symbol}"
        if name not in self.params:
            msg = f"The parameter {name!r} is missing. Pass all fitted parameters, `result.params` of `SVI.run`."
            raise ValueError(msg)
        return self.params[name]

    state = __call__

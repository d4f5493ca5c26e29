"""Reading traced programs."""

from collections.abc import Iterator


def equations(jaxpr) -> Iterator:
    """All equations of a program, those of the programs within it too."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for value in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)

"""How a term of the model is integrated under a joint Gaussian, found from its program.

The linear predictors of a term are the affine variables that its nonlinear operations read. Latents that enter in
another way have nodes of their own.
"""

from collections.abc import Callable, Collection
import math
from typing import NamedTuple

from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._internal.axis_dependence import MIXED, axes_of
from numpyro_sgp._internal.linear_predictors import Program
from numpyro_sgp._internal.row_dependence import Dependence, row_dependence
from numpyro_sgp.guides.joint_run import AbstractJointRun

__all__ = ["Root", "Term", "Terms"]


class Root(NamedTuple):
    """A linear predictor of a term.

    Attributes:
        number: of the variable in the program.
        shape: of the variable.
        rows: its axes along which entries of the term look at one entry each.
        others: its other axes: each entry of the term looks at all entries along them.
    """

    number: int
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    others: tuple[int, ...]

    @property
    def row_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.rows)

    @property
    def count(self) -> int:
        """How many numbers of it an entry of the term looks at."""
        return math.prod(self.shape[axis] for axis in self.others)

    def arranged(self, x: Array, ndim: int) -> Array:
        """(..., rows, count) of (..., shape), with as many row axes as asked for."""
        lead = x.ndim - len(self.shape)
        order = (*range(lead), *(lead + axis for axis in (*self.rows, *self.others)))
        pad = (1,) * (ndim - len(self.rows))
        return jnp.transpose(x, order).reshape(*x.shape[:lead], *pad, *self.row_shape, self.count)

    def restored(self, x: Array) -> Array:
        """The inverse of `arranged`, (shape) of (rows, count)."""
        x = x.reshape(*self.row_shape, *(self.shape[axis] for axis in self.others))
        return jnp.transpose(x, np.argsort((*self.rows, *self.others)).tolist())


class Term(NamedTuple):
    """How a term of the model is integrated.

    Attributes:
        name: of the output.
        roots: its linear predictors, those with the fewest row axes first.
        sites: GP sites that these depend on.
        linear: the latents in them.
        nodes: the latents that have nodes of their own.
    """

    name: str
    roots: tuple[Root, ...]
    sites: tuple[str, ...]
    linear: tuple[str, ...]
    nodes: tuple[str, ...]


class Terms:
    """The terms of a program.

    Args:
        run: the joint Gaussian in a run of the guide.
        program: the terms as functions of its members.
    """

    def __init__(self, run: AbstractJointRun, program: Program) -> None:
        self.run, self.program = run, program

    def term(self, name: str) -> Term:
        found = self.program.depends[self.program.outputs[name]]
        sites = tuple(site for site in self.run.group.sites if site in found)
        latents = [latent for latent in self.run.group.latents if latent in found]
        size = {latent: np.size(self.program.starts[latent]) for latent in latents}
        linear, roots = [], self._roots(name, sites) or ()
        for latent in sorted(latents, key=lambda latent: -size[latent]):
            more = self._roots(name, (*sites, *linear, latent))
            if more is not None and self._count(more) <= max(2, self._count(roots)):
                linear.append(latent)
                roots = more
        nodes = tuple(latent for latent in latents if latent not in linear)
        if self.run.group.effects in nodes:
            msg = (
                f"The effects {self.run.group.effects!r} enter the term {name!r} beside more than two linear "
                "predictors. Use `joint=False`, or name the members of the joint posterior without them."
            )
            raise ValueError(msg)
        return Term(name, roots, sites, tuple(linear), nodes)

    @staticmethod
    def _count(roots: tuple[Root, ...]) -> int:
        return sum(root.count for root in roots)

    def _roots(self, name: str, variable: Collection[str]) -> tuple[Root, ...] | None:
        """The linear predictors of a term while some inputs vary, or None where latents alone make one that is shared.

        Raises:
            ValueError: predictors whose rows do not correspond.
        """
        numbers = self.program.roots(name, variable)
        roots, apart = self._roots_of(numbers, name, variable), self.program.taken_apart(numbers, variable)
        if roots is None or apart == numbers:
            return roots
        fewer = self._roots_of(apart, name, variable)
        return roots if fewer is None or self._count(fewer) >= self._count(roots) else fewer

    def _roots_of(self, numbers: tuple[int, ...], name: str, variable: Collection[str]) -> tuple[Root, ...] | None:
        program = self.program
        values = dict(zip(numbers, program.evaluate(numbers, program.starts), strict=True))
        roots, places = [], {}
        for number in numbers:
            value = jnp.asarray(values[number])

            def term(x: Array, number: int = number) -> Array:
                given = {**values, number: x}
                return program.evaluate([program.outputs[name]], program.starts, given)[0]

            rows = [(axis, self._place(term, value, axis)) for axis in range(value.ndim)]
            row_axes = tuple(axis for axis, place in rows if place is not None)
            others = tuple(axis for axis, place in rows if place is None)
            root = Root(number, value.shape, row_axes, others)
            if not program.depends[number] & set(self.run.group.sites) and (root.count > 1 or not row_axes):
                return None
            for position, place in enumerate(reversed([place for _, place in rows if place is not None])):
                if places.setdefault(position, place) != place:
                    if set(variable) <= set(self.run.group.sites):
                        msg = (
                            f"The term {name!r} looks at the linear predictors of GP sites along different axes. "
                            "Write it with one order of axes, or use `joint=False`."
                        )
                        raise ValueError(msg)
                    return None
            roots.append(root)
        return tuple(sorted(roots, key=lambda root: len(root.rows)))

    @staticmethod
    def _place(term: Callable[[Array], Array], value: Array, axis: int) -> int | None:
        """The axis of a term that corresponds to an axis of a predictor, 0 for a sum over it; None for neither."""
        if value.shape[axis] == 1:
            return None
        place = axes_of(term, value, axis - value.ndim)
        if place not in (None, MIXED):
            return place
        moved = row_dependence(lambda x: term(jnp.moveaxis(x, -1, axis)), jnp.moveaxis(value, axis, -1))
        return 0 if moved in (Dependence.NONE, Dependence.SUM) else None

"""The guide for functions of time, and of time and place."""

from collections.abc import Callable, Mapping
from typing import Any

from jax.typing import ArrayLike
from numpyro.infer.autoguide import AutoNormal

from numpyro_sgp._internal.checks import positive
from numpyro_sgp.guides.guide import AbstractAutoSparseGP
from numpyro_sgp.guides.members import Joint
from numpyro_sgp.inducing.points import as_points
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily, Inducing, check_names, for_site
from numpyro_sgp.posteriors.markov.family import Markov
from numpyro_sgp.posteriors.markov.pair_family import SparseMarkov

__all__ = ["AutoMarkovGP"]


class AutoMarkovGP(AbstractAutoSparseGP):
    """Exact smoothing of every GP site of a model over time, in O(N), to be trained with `NaturalGradient`.

    The posterior is that of `AutoTSVGP(model, None)`, q(f) ∝ p(f) Π_n t_n(f_n) with a Gaussian site t_n for each row.
    A step costs N d³ operations for a kernel with d states. Matérn kernels have one, two or three states, `Cosine` has
    two, `Constant` one, and `Periodic`, the only one that is approximated, one and two for each wave. Those of sums add
    up, and those of products multiply.

    Inputs are times in any order, (N, 1); the same time may come more than once. A row that is masked, or a time at
    which predictions are wanted, costs as much as any other. Give all rows at every step.

    With `inducing=Z` the inducing variables are the states of the process at M times Z, f and its derivatives for a
    Matérn kernel. The sites of all rows between two times are one site of the pair of states around them. A step costs
    M d³ operations and those of its rows, which may be a minibatch. The posterior is that of the guide without
    `inducing` where Z has all times of the data.

    With `space=Z` f is a function of time and place, and its kernel the product of one of time and one of place,
    `Select(Matern32(...), [0]) * Select(SquaredExponential(...), [1, 2])`, or a sum of such products. The time is the
    first column in which all of these have a state-space form. The inducing variables are processes of time, the values
    of f at M places Z: q(f) is that of `AutoTSVGP` with `sites="per_datum"` and inducing inputs at all pairs of times
    and places, and exact where Z has all places of the data. A step costs N (d M)² operations.

    Args:
        model: a NumPyro model with `GaussianProcess` sites of one input, or with `space` of several.
        inducing: inducing times Z, (M,) or (M, 1), or `(kernel, X, rng_key)` to them, or a dict of these by site.
            Several for each lengthscale; they are not trained. None for all times of the data.
        space: places Z, (M, D − 1), in the columns of X without the time; they are not trained. None for functions of
            time.
        num_harmonics: how many waves stand for a `Periodic` kernel; more for one whose `lengthscale` is below 0.5.
        parallel: run over time by associative scans, in log N rounds, with all states in memory. None takes them where
            the default backend is an accelerator, without `space`.
        base: guide for the other latents: an autoguide class, or a guide. A class starts a latent at what was observed
            of it, if it is the location of an outcome, and near its prior median otherwise.
        joint: which other latents have one joint Gaussian with a GP site: "auto" for all that meet it in a term of the
            model, False for none, or a tuple of names. A step smooths once more for each number in them. Latents that a
            kernel depends on stay with `base`, and so do those of a guide of your own or of `AutoDelta`. Functions that
            meet in a term are one site, with the sum of their kernels.
        prefix: of the names of parameters, `{site}_{prefix}_{symbol}`.

    Raises:
        TypeError: a kernel without a state-space form, or, with `space`, that is no sum of such products.
        ValueError: inputs that are no times, or of another width than `space`; `num_harmonics` that is no positive
            integer; fewer than two inducing times; a dict that names what is no GP site; `parallel` or `inducing` with
            `space`; `parallel` with `inducing`.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> import numpyro_sgp as sgp
        >>> def model(t, y=None):
        ...     kernel = sgp.kernels.Matern32(0.2) + sgp.kernels.Constant(1.0)
        ...     f = numpyro.sample("f", sgp.GaussianProcess(kernel, t))
        ...     numpyro.sample("y", dist.Poisson(jnp.exp(f)).to_event(1), obs=y)
        >>> t, y = jnp.linspace(0.0, 1.0, 1000)[:, None], jnp.ones(1000)
        >>> guide = sgp.AutoMarkovGP(model)
        >>> svi = numpyro.infer.SVI(model, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
        >>> result = svi.run(jax.random.key(0), 5, t, y, progress_bar=False)
        >>> later = guide.posterior(jax.random.key(1), result.params, t + 1.0)["f"]  # a forecast
        >>> later.mean.shape, later.variance.shape
        ((1000,), (1000,))

    References:
        Chang, Wilkinson, Khan and Solin (2020), "Fast variational learning in state-space Gaussian process models";
        Hamelijnck, Wilkinson, Loppi, Solin and Damoulas (2021), "Spatio-temporal variational Gaussian processes";
        Adam, Eleftheriadis, Durrande, Artemev and Hensman (2020), "Doubly sparse variational Gaussian processes", and
        Wilkinson, Solin and Adam (2021), "Sparse algorithms for Markovian Gaussian processes", for inducing states.
    """

    def __init__(
        self,
        model: Callable,
        *,
        inducing: Inducing | Mapping[str, Inducing] | None = None,
        space: ArrayLike | None = None,
        num_harmonics: int = 8,
        parallel: bool | None = None,
        base: Any = AutoNormal,
        joint: Joint = "auto",
        prefix: str = "auto",
    ) -> None:
        num_harmonics = positive("num_harmonics", num_harmonics, "The default is 8.")
        if space is not None:
            space = as_points(space, "space")
            if parallel:
                msg = "`parallel=True` is for functions of time alone, and there is `space`. Leave `parallel` out."
                raise ValueError(msg)
        if inducing is not None and (space is not None or parallel):
            other = "`space`" if space is not None else "`parallel=True`"
            msg = f"`inducing` is for functions of time alone, without associative scans, and there is {other}."
            raise ValueError(msg)
        self._inducing = inducing
        self._markov = Markov(num_harmonics, parallel, space)
        super().__init__(model, base=base, prefix=prefix, joint=joint)

    def family(self, site: str) -> AbstractPosteriorFamily:
        if self._inducing is None:
            return self._markov
        return SparseMarkov(for_site(self._inducing, site, "inducing"), self._markov.num_harmonics)

    def check_sites(self, sites: set[str]) -> None:
        check_names(self._inducing, sites, "inducing")

"""The table of guides that every test of models runs through, and parameters at which nothing is special."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI
from numpyro.primitives import Messenger
import optax

import numpyro_sgp as sgp
from numpyro_sgp.distributions.wrappers import rewrap, unwrap
from numpyro_sgp.posteriors.decoupled.coefficients import Coefficients
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily, inducing_param, root_of_prior
from numpyro_sgp.posteriors.gaussian import InducingGaussian
from numpyro_sgp.posteriors.sites import DatumSites, TiedSites


class OnBasis(Messenger):
    """A model whose kernels are replaced by what inducing inputs Z can say of them: of finite rank."""

    def __init__(self, model, Z):
        self.Z = Z
        super().__init__(model)

    def process_message(self, msg):
        if msg["type"] == "sample" and isinstance(unwrap(msg["fn"]), sgp.GaussianProcess):
            msg["fn"] = rewrap(msg["fn"], self.of_finite_rank)

    def of_finite_rank(self, prior, _):
        kernel = sgp.features.InducingBasis(prior.kernel, self.Z, prior.jitter)
        return sgp.GaussianProcess(kernel, prior.X, prior.mean_function, jitter=prior.jitter)


# Constructors `(model, inducing, **options) -> guide`.
GUIDES = {
    "whitened": lambda model, Z, **options: sgp.AutoSVGP(model, Z, **options),
    "unwhitened": lambda model, Z, **options: sgp.AutoSVGP(model, Z, whiten=False, **options),
    "natural": lambda model, Z, **options: sgp.AutoSVGP(model, Z, natural=True, **options),
    "tied": lambda model, Z, **options: sgp.AutoTSVGP(model, Z, **options),
    "per_datum": lambda model, Z, **options: sgp.AutoTSVGP(model, Z, sites="per_datum", **options),
    "dense": lambda model, Z, **options: sgp.AutoTSVGP(
        model, dict.fromkeys(Z) if isinstance(Z, dict) else None, **options
    ),
}
# One of each kind, for what does not depend on how a posterior is parametrised.
KINDS = ["whitened", "natural", "tied", "dense"]


@dataclasses.dataclass(frozen=True)
class MeanField(AbstractPosteriorFamily):
    """A family of one's own: whitened inducing variables that are independent of each other."""

    inducing: np.ndarray

    def gaussian(self, param, prior, batch_shape):
        inducing = inducing_param(param, self.inducing, prior, False)
        zeros = jnp.zeros((*batch_shape, inducing.num_inducing), prior.X.dtype)
        S_sqrt = jnp.exp(param("log_s", zeros))[..., None] * jnp.eye(inducing.num_inducing, dtype=zeros.dtype)
        return InducingGaussian(inducing, root_of_prior(inducing, prior), param("m", zeros), S_sqrt)


def mean_field(model, Z, **options):
    by_site = isinstance(Z, dict)
    return sgp.AutoSparseGP(
        model, {site: MeanField(z) for site, z in Z.items()} if by_site else MeanField(Z), **options
    )


# Those, and ones of another form: for what is said of posteriors alone.
POSTERIORS = {
    **{name: GUIDES[name] for name in KINDS},
    "weights": lambda model, Z, **options: sgp.AutoWeightSpaceGP(OnBasis(model, Z), **options),
    "decoupled": lambda model, Z, **options: sgp.AutoDecoupledGP(model, Z, Z, **options),
    "mean_field": mean_field,
}
# The same with other latents independent of GP sites: for what is said of the base guide.
FACTORISED = {
    **POSTERIORS,
    **{
        name: lambda *args, name=name, **options: GUIDES[name](*args, joint=False, **options)
        for name in ("natural", "tied")
    },
}
MINIBATCH = ["whitened", "unwhitened", "natural", "tied"]
ONE_SITE_A_ROW = ["per_datum", "dense"]
NATURAL = ["natural", "tied", "per_datum", "dense"]


# The bound for any likelihood, which is not the tighter one with Gaussian noise: what dense formulas have.
LOOSE = sgp.QuadratureELBO(bound="titsias")


def optimizer(guide_name, step_size=0.5, learning_rate=1e-2):
    """What a user takes for that guide."""
    others = optax.adam(learning_rate)
    return sgp.NaturalGradient(step_size, others=others) if guide_name in NATURAL else others


def initial_parameters(model, guide, *args, **kwargs):
    """Parameters, constrained, as `SVI.init` makes them."""
    svi = SVI(model, guide, optax.sgd(0.0), sgp.QuadratureELBO())
    return svi.get_params(svi.init(jax.random.key(0), *args, **kwargs))


def arbitrary_parameters(model, guide, *args, seed=0, **kwargs):
    """Parameters with the posterior of every GP site moved to an arbitrary place away from the prior."""
    rng = np.random.default_rng(seed)

    def normal(value):
        return rng.normal(size=value.shape).astype(value.dtype)

    def moved(name, value):
        if name.endswith(("_m", "_log_s")):
            return normal(value)
        if isinstance(value, Coefficients):
            return dataclasses.replace(value, values=normal(value.values))
        if name.endswith("_S_sqrt"):
            return value + 0.3 * np.tril(normal(value))
        if isinstance(value, TiedSites):
            root = normal(value.Lambda2)
            return TiedSites(normal(value.lambda1), root @ np.swapaxes(root, -1, -2), value.reference)
        if isinstance(value, DatumSites):
            return DatumSites(normal(value.lambda1), np.square(normal(value.Lambda2)), value.X)
        return value

    params = initial_parameters(model, guide, *args, **kwargs)
    return {name: moved(name, value) for name, value in params.items()}


def loss_at(params, model, guide, *args, key=0, loss=None, **kwargs):
    """The loss at given parameters."""
    loss = sgp.QuadratureELBO() if loss is None else loss
    rng_key = jax.random.key(key) if isinstance(key, int) else key
    return loss.loss(rng_key, params, model, guide, *args, **kwargs)

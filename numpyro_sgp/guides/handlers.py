"""Effect handlers: hide GP values from the base guide, replace GP sites by posteriors."""

from collections.abc import Callable, Collection, Mapping
import contextlib
from typing import Any

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import distributions as dist
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.primitives import Messenger, apply_stack

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.wrappers import entry_mask, rewrap, unwrap

__all__ = [
    "GivenDeviations",
    "GivenGaussianProcesses",
    "HiddenSamples",
    "ImproperAtZero",
    "KeysBySite",
    "ModelForBase",
    "SwapGaussianProcesses",
    "UnchangedState",
    "is_missing_outcome",
    "until",
]


def _is_latent(msg: dict) -> bool:
    return msg["type"] == "sample" and not msg["is_observed"] and msg["value"] is None


def _needs_value(msg: dict) -> bool:
    return _is_latent(msg) and not msg["infer"].get("is_auxiliary")


def _is_collected(msg: dict) -> bool:
    """Whether it is a site inside `scan` or `cond`, after all of its values have been drawn."""
    return msg["type"] == "sample" and msg.get("_control_flow_done", False)


def _check_control_flow(msg: dict) -> None:
    if _is_collected(msg) and isinstance(unwrap(msg["fn"]), GaussianProcess):
        message = (
            f"The GP site {msg['name']!r} lies inside `scan` or `cond`, where a guide cannot put a posterior in its "
            "place. Sample it before, at the inputs of all steps, and pass its values in: `scan(step, init, (f, y))`."
        )
        raise ValueError(message)


class ModelForBase:
    """The model with its GP values set to zero and hidden: what the base guide sees, without any N × N work."""

    def __init__(self, model: Callable) -> None:
        self.model = model
        self.latents: tuple[str, ...] | None = None  # None: all of them

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _ZeroGaussianProcesses(self.latents):
            if self.latents is None:
                return self.model(*args, **kwargs)
            return until(self.latents, lambda: self.model(*args, **kwargs))()


class _ZeroGaussianProcesses(Messenger):
    def __init__(self, latents: tuple[str, ...] | None) -> None:
        self.latents = latents
        super().__init__()

    def process_message(self, msg: dict) -> None:
        if msg["type"] == "plate":
            _check_plate(msg)
        _check_control_flow(msg)
        if not _is_latent(msg):
            return
        gp = unwrap(msg["fn"])
        if isinstance(gp, GaussianProcess):
            msg["value"] = jnp.zeros(msg["fn"].shape(), gp.X.dtype)
            msg["stop"] = True
        elif self.latents is not None and msg["name"] not in self.latents:
            # An outcome to be predicted, not a latent variable of the fit.
            msg["kwargs"]["rng_key"] = numpyro.prng_key()
            msg["stop"] = True


class ImproperAtZero(Messenger):
    """Gives latents with an improper prior, which cannot be drawn, the value that is zero where it is unconstrained."""

    def process_message(self, msg: dict) -> None:
        if _is_latent(msg) and isinstance(unwrap(msg["fn"]), dist.ImproperUniform):
            transform: Any = biject_to(msg["fn"].support)
            shape = (*msg["kwargs"].get("sample_shape", ()), *msg["fn"].shape())
            msg["value"] = transform(jnp.zeros(transform.inverse_shape(shape)))


class HiddenSamples(handlers.block):
    """Hides the base guide's samples; those outside are still asked for a key by name, and may give one of their own.

    The message that asks has the type "prng_key", as one of `numpyro.prng_key`, and the name as its "site".
    """

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and self.hide_fn(msg) and _needs_key(msg):
            msg["kwargs"]["rng_key"] = _key_for(msg["name"])
        super().process_message(msg)


def _key_for(site: str) -> Array:
    request: Any = {"type": "prng_key", "site": site, "fn": lambda rng_key: rng_key}
    return apply_stack(request | {"args": (), "kwargs": {"rng_key": None}, "value": None})["value"]


class KeysBySite(Messenger):
    """Gives the sample sites of some names keys that follow from the names, hidden ones of a base guide too."""

    def __init__(self, rng_key: Array, names: Collection[str]) -> None:
        self.keys = {name: jax.random.fold_in(rng_key, number) for number, name in enumerate(sorted(names))}
        super().__init__()

    def process_message(self, msg: dict) -> None:
        request = msg["name"] if msg["type"] == "sample" else msg.get("site") if msg["type"] == "prng_key" else None
        if request in self.keys and _needs_key(msg):
            msg["kwargs"]["rng_key"] = self.keys[request]


class CheckedPlates(Messenger):
    """Raises at a plate that is smaller than its batch."""

    def process_message(self, msg: dict) -> None:
        if msg["type"] == "plate":
            _check_plate(msg)


class UnchangedState(Messenger):
    """Gives the model a copy of its mutable state, which it may change in place."""

    def postprocess_message(self, msg: dict) -> None:
        if msg["type"] == "mutable" and isinstance(msg["value"], dict):
            msg["value"] = msg["value"].copy()


class _Seen(BaseException):
    """All sites that a run of the model was for have been seen."""


class _Until(Messenger):
    def __init__(self, names: Collection[str]) -> None:
        self.left = set(names)
        super().__init__()

    def postprocess_message(self, msg: dict) -> None:
        if msg["type"] == "sample" and msg["name"] in self.left:
            self.left.remove(msg["name"])
            if not self.left:
                raise _Seen


def until(names: Collection[str], model: Callable[[], Any]) -> Callable[[], None]:
    """The model up to the last of some sites: terms after it are not evaluated, nor their data needed.

    Args:
        names: of sample sites; without any of them the model is run to its end.
        model: with its arguments given.
    """

    def run() -> None:
        with contextlib.suppress(_Seen), _Until(names):
            model()

    return run


class Alone(Messenger):
    """Hides a run of the model from all handlers outside, which are asked for no keys either."""

    def process_message(self, msg: dict) -> None:
        msg["stop"] = True


def _needs_key(msg: dict) -> bool:
    return msg["value"] is None and msg["kwargs"].get("rng_key") is None


class GivenGaussianProcesses(Messenger):
    """Gives every GP site the same value at all its inputs, or values about it, and keeps the priors."""

    def __init__(self, value: float, spread: float = 0.0) -> None:
        self.value, self.spread = value, spread
        self.priors: dict[str, GaussianProcess] = {}
        super().__init__()

    def process_message(self, msg: dict) -> None:
        if not _is_latent(msg):
            return
        gp = unwrap(msg["fn"])
        if isinstance(gp, GaussianProcess):
            self.priors[msg["name"]] = gp
            shape = msg["fn"].shape()
            values = self.value + self.spread * np.cos(np.arange(shape[-1]))
            msg["value"] = jnp.broadcast_to(jnp.asarray(values, gp.X.dtype), shape)


class GivenDeviations(Messenger):
    """Gives GP sites values by their deviations from the prior mean, which follows the latents that it depends on."""

    def __init__(self, fn: Callable, deviations: Mapping[str, Array]) -> None:
        self.deviations = deviations
        super().__init__(fn)

    def process_message(self, msg: dict) -> None:
        if msg["type"] == "sample" and msg["name"] in self.deviations:
            prior: Any = unwrap(msg["fn"])
            msg["value"] = self.deviations[msg["name"]] + prior.prior_mean


class SwapGaussianProcesses(Messenger):
    """Replaces GP sites by posteriors and gives the other latents the base guide's values, in the model's order."""

    def __init__(
        self,
        base_trace: dict[str, dict],
        posterior: Callable[[str, GaussianProcess, tuple[int, ...]], SparsePosterior],
        predicting: bool,
        *,
        joint: bool = True,
    ) -> None:
        self.base_trace = base_trace
        self.posterior = posterior
        self.predicting = predicting
        self.joint = joint  # whether draws are joint where the posterior is; else row by row, which is no N × N work
        self.exposed: set[str] = set()
        self.gp_sites: dict[str, SparsePosterior] = {}
        self.plate_sizes: dict[str, int] = {}
        self.control_flow = ""  # name of the last primitive
        self.outcomes: set[str] = set()  # observed sites so far
        self.of_rows: dict[str, str] = {}  # plates with as many entries as a GP site inside them has rows
        super().__init__()

    def hides(self, msg: dict) -> bool:
        return msg["type"] == "sample" and msg["name"] not in self.exposed

    def process_message(self, msg: dict) -> None:
        if msg["type"] == "plate":
            self._process_plate(msg)
        elif msg["type"] == "control_flow":
            self._process_control_flow(msg)
        elif msg["type"] == "sample" and msg["is_observed"]:
            self._check_outcomes(msg)
        elif _is_collected(msg):
            self._process_collected(msg)
        elif _is_latent(msg):
            if isinstance(unwrap(msg["fn"]), GaussianProcess):
                self._process_gaussian_process(msg)
            elif msg["name"] in self.base_trace:
                site = self.base_trace[msg["name"]]
                msg.update(fn=site["fn"], value=site["value"], intermediates=site["intermediates"])
                self.exposed.add(msg["name"])
            elif is_missing_outcome(msg["name"], self.outcomes):
                self.exposed.add(msg["name"])  # drawn from the likelihood, in the model and in the guide
            elif not self.predicting and _needs_value(msg):
                self._raise_without_value(msg)

    def _raise_without_value(self, msg: dict) -> None:
        sampled = sorted(name for name, site in self.base_trace.items() if site["type"] == "sample")
        message = (
            f"The base guide leaves the latent site {msg['name']!r} without a value; it samples {sampled}. "
            "Sample it in your guide, or leave `base` at `AutoNormal`, which covers every latent."
        )
        raise ValueError(message)

    def _process_control_flow(self, msg: dict) -> None:
        """Gives the base guide's values to the sites inside, whose messages come here when the primitive is done."""
        self.control_flow = msg["fn"].__name__.removesuffix("_wrapper")

        def given(site: dict) -> Any:
            if site["is_observed"] or site["name"] not in self.base_trace:
                return None
            return self.base_trace[site["name"]]["value"]

        msg["kwargs"]["substitute_stack"].append(("substitute", given))

    def _process_collected(self, msg: dict) -> None:
        _check_control_flow(msg)
        name, site = msg["name"], self.base_trace.get(msg["name"])
        if site is None:
            if not self.predicting and not msg["infer"].get("is_auxiliary"):
                self._raise_without_value(msg)
            return
        if self.control_flow == "cond":
            # NumPyro's `replay`, by which every loss gives the model the guide's values, stops before the branches.
            message = (
                f"The latent site {name!r} lies inside `cond` beside a GP site, where NumPyro cannot replay the "
                "guide's values. Sample it before `cond`, or one site for each branch, and take `jnp.where(pred, ...)`."
            )
            raise ValueError(message)
        if jnp.shape(msg["value"]) == jnp.shape(site["value"]):
            msg.update(fn=site["fn"], value=site["value"], intermediates=site["intermediates"])
        self.exposed.add(name)

    def _process_plate(self, msg: dict) -> None:
        _check_plate(msg)
        self.plate_sizes[msg["name"]] = msg["args"][0]
        if msg["name"] in self.base_trace:
            msg["value"] = self.base_trace[msg["name"]]["value"]

    def _check_outcomes(self, msg: dict) -> None:
        self.outcomes.add(msg["name"])
        _check_numbers(msg)
        self._check_entries(msg)

    def _check_entries(self, msg: dict) -> None:
        """One outcome for each entry of a plate against a table of all entries and all rows: the plate is of the rows.

        As many latents as rows have a plate of their own and leave none of these axes without one.
        """
        stack, fn = msg["cond_indep_stack"], msg["fn"]
        plates = [frame for frame in stack if frame.name in self.of_rows]
        depth = max((-frame.dim for frame in stack), default=0)
        for frame in plates:
            if frame.size not in fn.batch_shape[:-depth] or jnp.ndim(msg["value"]) - fn.event_dim > depth:
                continue
            message = (
                f"GP site {self.of_rows[frame.name]!r} lies inside plate {frame.name!r} of its {frame.size} rows, and "
                f"so it is {frame.size} latents. A GP is one random function: sample it before the plate. For as many "
                "latents as rows give these a plate of their own."
            )
            raise ValueError(message)

    def _process_gaussian_process(self, msg: dict) -> None:
        name = msg["name"]
        for frame in msg["cond_indep_stack"]:
            size = self.plate_sizes.get(frame.name, frame.size)
            if size != frame.size:
                message = (
                    f"GP site {name!r} lies inside plate {frame.name!r}, which subsamples {frame.size} of {size}. "
                    "A GP is one random function: sample it before the plate, at the inputs of the batch, or at all "
                    "inputs and then take `numpyro.subsample(f, event_dim=0)` inside."
                )
                raise ValueError(message)

            if size == msg["fn"].event_shape[-1] > 1:
                self.of_rows[frame.name] = name

        def replace(prior: GaussianProcess, batch_shape: tuple[int, ...]) -> SparsePosterior:
            self.gp_sites[name] = self.posterior(name, prior, batch_shape)
            return self.gp_sites[name]

        msg["fn"] = rewrap(msg["fn"], replace)
        self.exposed.add(name)
        q = self.gp_sites[name]
        if q.joint_run is not None:
            joint = self.predicting and self.joint
            msg["value"] = q.joint_run.draw(name, q, _key_for(name), joint=joint)
        elif not self.joint:
            msg["value"] = SparsePosterior(q.prior, q.moments, q.batch_shape, joint=False).sample(numpyro.prng_key())

    def postprocess_message(self, msg: dict) -> None:
        # The guide reads mutable state and must not be the one to change it: the model is run again by the loss, and
        # what it changes there is what counts. Outer handlers have recorded the value by now; the model gets a copy.
        if msg["type"] == "mutable" and isinstance(msg["value"], dict):
            msg["value"] = msg["value"].copy()


def is_missing_outcome(name: str, outcomes: Collection[str]) -> bool:
    """Whether a latent site holds the outcomes that `obs_mask` of an observed site leaves out."""
    stem = name.removesuffix("_unobserved")
    return stem != name and f"{stem}_observed" in outcomes


def _check_numbers(msg: dict) -> None:
    """Raise at an outcome that is not a number and counts."""
    value, fn = msg["value"], msg["fn"]
    mask = entry_mask(fn)
    if isinstance(value, Tracer) or isinstance(mask, Tracer) or not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        return
    missing = np.isnan(np.asarray(value)) & np.asarray(mask)
    count = int(np.sum(missing.any(axis=tuple(range(missing.ndim - fn.event_dim, missing.ndim)))))
    if count:
        message = (
            f"The outcomes of {msg['name']!r} have {count} entries that are NaN, and the loss would be NaN, too. Leave "
            "them out with `handlers.mask`, or draw them with `obs_mask=` of `numpyro.sample`."
        )
        raise ValueError(message)


def _check_plate(msg: dict) -> None:
    size, subsample_size = msg["args"]
    if subsample_size is not None and subsample_size > size:
        message = (
            f"Plate {msg['name']!r} has size {size}, smaller than its subsample of {subsample_size} rows. "
            "Pass the number of rows of the whole data set as the plate's size (`num_data`)."
        )
        raise ValueError(message)

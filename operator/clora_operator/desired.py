"""What an engine is told of an experiment, and which engine. Pure."""

from __future__ import annotations

import hashlib

from clora_api.control import DesiredExperiment, DesiredServing, InitSource, RunMode
from clora_api.v1alpha1.experiment import ExperimentSpec
from clora_operator.observe import ObservedExperiment
from clora_operator.resources import Engine, Key


def desired_experiment(o: ObservedExperiment, mode: RunMode = RunMode.RUN) -> DesiredExperiment | None:
    """None while its data or its starting weights are not known."""
    if o.data_missing or (o.init is not None and o.init.source is None):
        return None
    return _desired(o, mode, init_source=o.init.source if o.init else None, data_text=o.data_text)


def to_be_served(o: ObservedExperiment) -> DesiredExperiment | None:
    """Of one that has ended: its data and starting weights may be gone, and are not needed."""
    return _desired(o, RunMode.SERVE)


def _desired(
    o: ObservedExperiment, mode: RunMode, *, init_source: InitSource | None = None, data_text: str | None = None
) -> DesiredExperiment | None:
    """None where the stored spec is not of this release."""
    experiment = o.experiment
    if experiment.spec is None:
        return None
    return DesiredExperiment(
        uid=experiment.meta.uid,
        namespace=experiment.meta.namespace,
        name=experiment.meta.name,
        generation=experiment.meta.generation,
        spec=_for_the_engine(experiment.spec),
        mode=mode,
        attempt=experiment.status.restarts,
        committed_step=experiment.status.checkpoint.step if experiment.status.checkpoint else None,
        init_source=init_source,
        data_text=data_text,
        serving_token=serving_token(o),
        tracking_keys=dict(o.tracking_keys.keys) if o.tracking_keys is not None else None,
    )


def desired_serving(o: ObservedExperiment) -> DesiredServing:
    """Known whatever is wrong with its spec, its data and its starting weights."""
    spec = o.experiment.spec
    return DesiredServing(serving_token=serving_token(o), weight=spec.weight if spec else None)


def serving_token(o: ObservedExperiment) -> str | None:
    """None where nobody may ask it: then the engine serves it to nobody."""
    secret = o.serving_secret
    return secret.token if secret is not None and offers_serving(o.engine) else None


def offers_serving(engine: Engine | None) -> bool:
    """As its spec says; whether its pod does is known from itself (EngineInfo.serves)."""
    return engine is not None and engine.spec is not None and engine.spec.serving.enabled


def token_digest(desired: DesiredExperiment | DesiredServing) -> str:
    """Tells one serving token from another; empty without one."""
    return hashlib.sha256(desired.serving_token.encode()).hexdigest() if desired.serving_token else ""


def keys_digest(desired: DesiredExperiment) -> str:
    """Tells one set of trackers' keys from another; empty without any."""
    keys = "\0".join(f"{kind}={key}" for kind, key in sorted((desired.tracking_keys or {}).items()))
    return hashlib.sha256(keys.encode()).hexdigest() if keys else ""


def _for_the_engine(spec: ExperimentSpec) -> ExperimentSpec:
    """Without what only the operator acts on: a change of it is no news for an engine, and an engine of an earlier
    release need not know it."""
    reference = spec.engine_ref.model_copy(update={"namespace": None}) if spec.engine_ref else None
    own = {
        "priority_class_name": None,
        "ttl_seconds_after_finished": None,
        "engine_ref": reference,
        "serving": None,  # the token says it
    }
    return spec.model_copy(update=own)


def engine_key(o: ObservedExperiment) -> Key:
    """The engine that placement has assigned; where it no longer assigns (the experiment has ended), that which was
    told of it."""
    name = o.assignment.engine if o.assignment else None
    if name is None:
        assert o.experiment.status.engine is not None
        name = o.experiment.status.engine.name
    return o.experiment.engine_key(name)

"""Condition types and reasons of both kinds: the one documented list.

`state` is derived from the conditions by one pure function, for people only; programs read conditions.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

ConditionStatus = Literal["True", "False", "Unknown"]


class ExperimentCondition(StrEnum):
    """Condition types of a LoRAExperiment."""

    ACCEPTED = "Accepted"  # the spec can run on the engine it names
    ATTACHED = "Attached"  # the engine of the current epoch holds the adapter
    PROGRESSING = "Progressing"  # steps are being made
    SUCCEEDED = "Succeeded"  # maxSteps (or stopWhen) was reached
    FAILED = "Failed"  # it has failed and stays failed
    SERVED = "Served"  # tenants' requests are answered with its adapter; said once spec.serving was enabled
    TRACKED = "Tracked"  # the trackers of spec.tracking get its metrics; said once it named one


class EngineCondition(StrEnum):
    """Condition types of a LoRAEngine."""

    ACCEPTED = "Accepted"  # the spec makes sense and its references exist
    READY = "Ready"  # the engine answers and serves
    WORKLOAD_CURRENT = "WorkloadCurrent"  # the running pod is what the spec asks for
    DRAINED = "Drained"  # spec.drain is true and nothing is attached any more
    IDLE = "Idle"  # no experiment wants it and nothing is attached; said with spec.scaleDownAfterSeconds


class Reason(StrEnum):
    """Every reason that clora writes into a condition."""

    # Accepted (experiments)
    SPEC_VALID = "SpecValid"
    INVALID_SPEC = "InvalidSpec"  # the engine refused the spec; the message names the field
    ENGINE_NOT_FOUND = "EngineNotFound"
    NAMESPACE_NOT_ALLOWED = "NamespaceNotAllowed"  # by the engine's allowedNamespaces
    NAMESPACE_UNREADABLE = "NamespaceUnreadable"  # the operator may not read the labels that decide it
    RANK_TOO_HIGH = "RankTooHigh"
    DOES_NOT_FIT = "DoesNotFit"  # no engine that it may run on has what it needs; the message says what each lacks
    DATA_NOT_FOUND = "DataNotFound"
    INIT_FROM_NOT_FOUND = "InitFromNotFound"
    INIT_FROM_FAILED = "InitFromFailed"
    PRIORITY_CLASS_NOT_FOUND = "PriorityClassNotFound"
    PRIORITY_CLASS_NOT_ALLOWED = "PriorityClassNotAllowed"  # its value is above those that users may define
    PRIORITY_CLASS_UNREADABLE = "PriorityClassUnreadable"  # the operator may not read PriorityClasses
    # Attached / Progressing (experiments)
    QUEUED = "Queued"  # the engine is full; of an engine: its pod waits for quota, in Kueue's queue say
    PREEMPTED = "Preempted"  # one of a higher priority has taken its slot; it resumes from its last commit
    ENGINE_DRAINING = "EngineDraining"  # its engine's spec.drain is true
    WAITING_FOR_INIT = "WaitingForInit"  # the experiment that initFrom names has not finished
    WAITING_FOR_ENGINE = "WaitingForEngine"  # the engine is not ready yet
    ATTACHING = "Attaching"
    ENGINE_CONFIRMED = "EngineConfirmed"
    ENGINE_UNREACHABLE = "EngineUnreachable"
    CHECKPOINT_UNREACHABLE = "CheckpointUnreachable"
    RUNNING = "Running"
    STORAGE_FULL = "StorageFull"  # it waits for room in its engine's storage, then goes on
    RETRYING = "Retrying"
    SUSPENDED = "Suspended"
    SUSPENDING = "Suspending"
    COMPLETED = "Completed"
    DETACHED = "Detached"
    # Served; Serving too, and why it has no slot
    NOT_SERVED = "NotServed"  # spec.serving is not enabled
    SERVING_NOT_OFFERED = "ServingNotOffered"  # by its engine
    SERVING_FAILED = "ServingFailed"  # the engine could not load its last commit
    SECRET_IN_USE = "SecretInUse"  # noqa: S105 - the Secret for its token belongs to something else
    SECRET_REFUSED = "SecretRefused"  # noqa: S105 - by the API server, for a quota say
    NOT_ATTACHED = "NotAttached"  # it trains, and has no adapter on the engine now
    # Tracked
    TRACKING = "Tracking"
    NOT_TRACKED = "NotTracked"  # spec.tracking names no tracker
    TRACKING_FAILED = "TrackingFailed"  # one of them fails, and is tried again; the message says how
    TRACKING_SECRET_UNUSABLE = "TrackingSecretUnusable"  # noqa: S105 - it, its key or its label is missing
    # Failed
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    EXPERIMENT_ERROR = "ExperimentError"  # any other; the message begins with the engine's word for it
    # Failed, in the engine's words: the spec or its data is wrong, and trying again would not help
    INVALID_DATA = "InvalidData"  # the message names the row
    INVALID_ADAPTER = "InvalidAdapter"  # initFrom's is no LoRA adapter that the engine can load
    INVALID_MODEL = "InvalidModel"  # the engine's has no tokenizer that can be used
    INVALID_ENVIRONMENT_ARGUMENT = "InvalidEnvironmentArgument"  # the message names it
    UNKNOWN_ENVIRONMENT = "UnknownEnvironment"  # the engine knows none of that name
    CHAT_TEMPLATE_UNSUPPORTED = "ChatTemplateUnsupported"  # the model's cannot hold such conversations
    PROMPT_TOO_LONG = "PromptTooLong"  # it leaves no room in the model's context
    NOT_FAILED = "NotFailed"
    NOT_FINISHED = "NotFinished"
    # Engines
    SERVING = "Serving"
    STARTING = "Starting"
    POD_UNSCHEDULABLE = "PodUnschedulable"  # its pod finds no node
    POD_FAILING = "PodFailing"  # its pod's container cannot start, or ends again and again
    UNREACHABLE = "Unreachable"
    UNAUTHORIZED = "Unauthorized"
    TOKEN_NOT_FOUND = "TokenNotFound"  # noqa: S105
    ENDPOINT_IN_USE = "EndpointInUse"
    LEADER_WORKER_SET_MISSING = "LeaderWorkerSetMissing"  # the cluster lacks the kind that engines of several pods need
    UPDATE_PENDING = "UpdatePending"
    UPDATE_REFUSED = "UpdateRefused"  # by the API server or a webhook of it; the engine stays as it was
    DRAINING = "Draining"  # experiments finish their step and commit
    DRAINED = "Drained"
    NOT_DRAINING = "NotDraining"
    UNUSED = "Unused"  # nobody wants it
    WANTED = "Wanted"  # an experiment may run on it, or its files there are to be deleted
    IN_USE = "InUse"  # something is attached
    STAYS_AWAKE = "StaysAwake"  # spec.scaleDownAfterSeconds is not set
    ASLEEP = "Asleep"  # idle for so long that it has no pod; an experiment wakes it
    WAKING = "Waking"  # it was asleep, is wanted, and has not answered yet
    WAKING_HELD_BACK = "WakingHeldBack"  # the same, and something is in its pod's way: the message says what
    UP_TO_DATE = "UpToDate"
    EXTERNAL = "External"  # somebody else runs the engine; clora creates no workload


class State(StrEnum):
    """What people see in the STATE column of an experiment."""

    PENDING = "Pending"
    QUEUED = "Queued"
    ATTACHING = "Attaching"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    UNKNOWN = "Unknown"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


def derive_state(conditions: Mapping[str, tuple[str, str]]) -> State:
    """The state that a set of conditions, type -> (status, reason), amounts to."""

    def get(kind: ExperimentCondition) -> tuple[str, str]:
        return conditions.get(kind, ("Unknown", ""))

    for kind, state in ((ExperimentCondition.FAILED, State.FAILED), (ExperimentCondition.SUCCEEDED, State.SUCCEEDED)):
        if get(kind)[0] == "True":
            return state
    attached, why = get(ExperimentCondition.ATTACHED)
    progressing, pause = get(ExperimentCondition.PROGRESSING)
    if why in (Reason.SUSPENDED, Reason.SUSPENDING):
        return State.SUSPENDED
    if why in (Reason.QUEUED, Reason.PREEMPTED, Reason.ENGINE_DRAINING):
        return State.QUEUED
    if attached == "True":
        return State.RUNNING if progressing == "True" or pause == Reason.STORAGE_FULL else State.ATTACHING
    if attached == "Unknown" and why == Reason.ENGINE_UNREACHABLE:
        return State.UNKNOWN
    return State.ATTACHING if why == Reason.ATTACHING else State.PENDING

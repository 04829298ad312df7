"""The operator's own Prometheus metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

RECONCILES = Counter("clora_operator_reconciles", "Reconciles by kind and result (ok, error).", ["kind", "result"])
RECONCILE_SECONDS = Histogram("clora_operator_reconcile_seconds", "Duration of a reconcile.", ["kind"])
QUEUE_DEPTH = Gauge("clora_operator_queue_depth", "Keys that wait for a worker.")
PLACEMENT_SECONDS = Histogram("clora_operator_placement_seconds", "Duration of a placement pass.")
STATUS_WRITES = Counter("clora_operator_status_writes", "Status writes by kind.", ["kind"])
ENGINE_ERRORS = Counter(
    "clora_operator_engine_request_errors",
    "Requests to engines that failed, by request and error (Retryable, Unauthorized, Refused).",
    ["request", "error"],
)
ENGINES_REACHABLE = Gauge("clora_operator_engines_reachable", "Engines that answer.")

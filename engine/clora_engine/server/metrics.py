"""The engine's Prometheus metrics, read from the supervisor at each scrape. No name or token of a tenant."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from clora_engine.supervisor import Supervisor


class EngineCollector(Collector):
    """Gauges and counters under `clora_engine_`."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def collect(self) -> Iterator[Metric]:
        experiments = GaugeMetricFamily("clora_engine_experiments", "Experiments by phase.", labels=["phase"])
        for phase, count in self._supervisor.phases().items():
            experiments.add_metric([phase.value], count)
        yield experiments
        yield GaugeMetricFamily("clora_engine_epoch", "The present life of the engine.", self._supervisor.epoch)
        yield GaugeMetricFamily("clora_engine_ready", "1 when it serves.", float(self._supervisor.ready))
        stats = self._supervisor.sampler_stats()
        if stats is None:
            return
        yield CounterMetricFamily(
            "clora_engine_trainer_busy_seconds",
            "Seconds in which the trainer ran a command.",
            self._supervisor.trainer_busy_seconds(),
        )
        yield CounterMetricFamily(
            "clora_engine_sampler_busy_seconds", "Seconds in which vLLM had a sequence.", stats.busy_seconds
        )
        yield GaugeMetricFamily("clora_engine_sampler_up", "1 when vLLM's core is up.", float(stats.up))
        yield GaugeMetricFamily("clora_engine_sampler_generation", "Lives of vLLM's core.", stats.generation)
        yield GaugeMetricFamily("clora_engine_sampler_running", "Requests being decoded.", stats.running)
        yield GaugeMetricFamily("clora_engine_sampler_waiting", "Requests waiting in vLLM.", stats.waiting)
        yield GaugeMetricFamily("clora_engine_sampler_versions", "Versions loaded.", len(stats.versions))
        gate = stats.gate
        yield GaugeMetricFamily("clora_engine_sampler_seats", "Sequences decoded at once, at most.", gate.seats)
        yield GaugeMetricFamily("clora_engine_sampler_seats_taken", "Sequences being decoded.", gate.taken)
        yield GaugeMetricFamily("clora_engine_sampler_queued", "Sequences waiting for a seat.", gate.queued)
        yield CounterMetricFamily("clora_engine_sampler_granted", "Sequences that got a seat.", gate.granted)
        yield CounterMetricFamily(
            "clora_engine_sampler_granted_tokens",
            "Tokens charged to experiments: generated, and of prompts what the cache did not save.",
            gate.granted_tokens,
        )
        yield CounterMetricFamily(
            "clora_engine_sampler_wait_seconds",
            "Seconds from request to seat, over all sequences that got one.",
            gate.wait_seconds,
        )
        yield CounterMetricFamily(
            "clora_engine_serving_requests", "Tenants' requests that were answered.", stats.served.requests
        )
        for whose, counts, text in (
            ("sampler", stats, "Tokens: {}, of training and serving."),
            ("serving", stats.served, "Tokens of tenants' requests alone: {}."),
        ):
            for name, value in (
                ("generated", counts.generated_tokens),
                ("prompt", counts.prompt_tokens),
                ("cached_prompt", counts.cached_tokens),
            ):
                yield CounterMetricFamily(f"clora_engine_{whose}_{name}_tokens", text.format(name), value)

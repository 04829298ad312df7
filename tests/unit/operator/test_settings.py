"""Flags over environment over defaults; errors that name the setting."""

from __future__ import annotations

import argparse

import pytest

from clora_operator.__main__ import main
from clora_operator.settings import ServiceAddressing, Settings


def load(*flags: str, **environment: str) -> Settings:
    parser = argparse.ArgumentParser()
    Settings.add_flags(parser)
    return Settings.load(parser.parse_args(flags), {f"CLORA_OPERATOR_{k}": v for k, v in environment.items()})


def test_defaults() -> None:
    assert load() == Settings()
    assert Settings().watches("anything")


def test_flags_win_over_the_environment() -> None:
    both = load("--liveness-port", "1", LIVENESS_PORT="2", METRICS_PORT="3", SERVICE_ADDRESSING="ClusterIP")
    assert (both.liveness_port, both.metrics_port) == (1, 3)
    assert both.service_addressing is ServiceAddressing.CLUSTER_IP


def test_namespaces() -> None:
    assert load("-n", "a", "--namespace", "b", "-n", "a").namespaces == ("a", "b")
    assert load(NAMESPACES="a, b,").namespaces == ("a", "b")
    assert load("--all-namespaces", NAMESPACES="a").namespaces == ()
    assert not load("-n", "a").watches("b")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("METRICS_PORT", "http", "metrics_port cannot be 'http'; it takes int"),
        ("WORKERS", "-1", "workers cannot be '-1'"),
        ("RESYNC_SECONDS", "nan", "resync_seconds cannot be 'nan'"),
        ("SERVICE_ADDRESSING", "Pigeon", "it takes DNS, ClusterIP"),
        ("ENGINE_INGRESS_FROM", "[]", "it takes a JSON list of NetworkPolicyPeers"),
        ("ENGINE_INGRESS_FROM", "[1]", "it takes a JSON list of NetworkPolicyPeers"),
        ("ENGINE_INGRESS_FROM", "everybody", "it takes a JSON list of NetworkPolicyPeers"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        load(**{name: value})
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("per_second", "unfinished", "progress", "queue"),
    [(10, 20, 5, 30), (10, 200, 20, 30), (10, 1000, 100, 100), (0, 1000, 5, 30)],
)
def test_many_experiments_are_written_less_often_each(
    per_second: float, unfinished: int, progress: float, queue: float
) -> None:
    paced = Settings(moving_writes_per_second=per_second).paced(unfinished)
    assert (paced.progress_write_seconds, paced.queue_write_seconds) == (progress, queue)


def test_the_program_says_so_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--workers", "many"]) == 2
    assert "setting workers cannot be 'many'" in capsys.readouterr().err

"""Flags of `clora-engine serve`, and the control API's token."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from clora_api.v1alpha1.engine import Scheduling
from clora_engine import follow
from clora_engine.config import EngineConfig, add_arguments, from_arguments, quantity
from clora_engine.server.auth import TokenFile


def parse(*flags: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(["--model=m", "--storage=/s", "--token-file=/t", *flags]))


def test_defaults_are_a_cpu_engine() -> None:
    config = parse()
    assert (config.resolved_dtype, config.served_name, config.sampler_slots) == ("float32", "m", 32)
    assert parse("--max-experiments=3", "--max-off-policy-steps=0").sampler_slots == 6


def test_a_port_for_tenants_needs_versions_and_is_not_the_control_apis() -> None:
    assert parse().tenant_port is None
    config = parse("--tenant-port=8000", "--max-experiments=3")
    assert (config.tenant_port, config.served_versions, config.sampler_slots) == (8000, 2, 18)
    with pytest.raises(ValueError, match="--tenant-port 8080 is the control API's"):
        parse("--tenant-port=8080")


def test_gpus_mean_bfloat16() -> None:
    config = parse("--sampler-gpus=4", "--data-parallel-size=4", "--trainer-gpus=1", "--model-name=x")
    assert (config.resolved_dtype, config.served_name) == ("bfloat16", "x")


def test_scheduling_is_fair_unless_said_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse().scheduling is Scheduling.FAIR_SHARE
    assert parse("--scheduling=ShortestRemaining").scheduling is Scheduling.SHORTEST_REMAINING
    with pytest.raises(SystemExit):
        parse("--scheduling=First")
    assert "invalid" in capsys.readouterr().err


def test_slots_are_measured_unless_given() -> None:
    assert (parse().trainer_slots, parse().gradient_checkpointing) == (None, False)
    assert parse("--trainer-slots=Auto").trainer_slots is None
    config = parse("--trainer-slots=4", "--gradient-checkpointing=true")
    assert (config.trainer_slots, config.gradient_checkpointing) == (4, True)


def test_parallel_sizes_must_fit_the_gpus() -> None:
    with pytest.raises(ValueError, match="--sampler-gpus 4 must equal"):
        parse("--sampler-gpus=4", "--data-parallel-size=2")


def test_several_trainers() -> None:
    assert parse().trainer_ranks == 1
    assert parse("--trainer-gpus=4").trainer_ranks == 4
    assert parse("--trainer-processes=2", "--shard-base=true").trainer_ranks == 2
    with pytest.raises(ValueError, match="--trainer-processes is for a trainer on the CPU"):
        parse("--trainer-gpus=2", "--trainer-processes=2")
    with pytest.raises(ValueError, match="--shard-base spreads the model over several"):
        parse("--trainer-gpus=1", "--shard-base=true")


def test_trainers_of_several_nodes() -> None:
    assert (parse().trainer_nodes, parse().trainer_port) == (1, 29400)
    config = parse("--trainer-nodes=2", "--trainer-gpus=4", "--shard-base=true")
    assert (config.node_ranks, config.trainer_ranks) == (4, 8)
    assert parse("--trainer-nodes=3", "--shard-base=true").trainer_ranks == 3
    for flags, message in (
        (["--trainer-nodes=0"], "--trainer-nodes 0: this node is one, give at least 1"),
        (["--trainer-nodes=2", "--trainer-processes=2"], "--trainer-processes is for one node"),
        (["--trainer-nodes=2", "--trainer-port=65535"], "--trainer-port 65535 and the next one are no ports"),
        (["--trainer-nodes=2", "--trainer-port=8079"], "--trainer-port 8079 and the next one are the trainer's"),
        (["--trainer-nodes=2", "--tenant-port=29400"], "--trainer-port 29400 and the next one are the trainer's"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(*flags)
    assert parse("--trainer-port=8080").trainer_nodes == 1, "of one node, no port is opened"


def test_nodes_that_follow() -> None:
    def follows(*flags: str) -> follow.FollowConfig:
        parser = argparse.ArgumentParser()
        follow.add_arguments(parser)
        given = ["--leader=h", "--model=m", "--token-file=/t", *flags]
        return follow.from_arguments(parser.parse_args(given))

    assert list(follows("--node=1", "--trainer-nodes=2").ranks) == [1]
    config = follows("--node=2", "--trainer-nodes=3", "--trainer-gpus=4", "--trainer-port=30000")
    assert (list(config.ranks), config.trainer_port) == ([8, 9, 10, 11], 30000)
    for node in (0, 2, -1):
        with pytest.raises(ValueError, match=f"--node {node} is none of --trainer-nodes 2: give 1 to 1"):
            follows(f"--node={node}", "--trainer-nodes=2")
    with pytest.raises(ValueError, match="--trainer-port 0 and the next one are no ports"):
        follows("--node=1", "--trainer-nodes=2", "--trainer-port=0")


def test_data_volumes_by_name() -> None:
    config = parse("--data-volume=a=/x", "--data-volume=b=/y")
    assert config.data_volumes == {"a": Path("/x"), "b": Path("/y")}


def test_environments_and_their_hosts() -> None:
    assert parse().environments == parse().environment_hosts == ()
    config = parse("--environment=GSM8K", "--environment=HTTP", "--environment-host=a.svc:80", "--environment-host=*.b")
    assert config.environments == ("GSM8K", "HTTP")
    assert config.environment_hosts == ("a.svc:80", "*.b")
    assert parse("--tracking-host=mlflow.svc:5000").tracking_hosts == ("mlflow.svc:5000",)
    assert not config.loopback_environments
    assert parse("--loopback-environments").loopback_environments


@pytest.mark.parametrize(
    "flag",
    [
        "--environment=Chess",
        "--environment-host=http://a",
        "--hub-dataset=*/x",
        "--hub-dataset=gsm8k",
        "--hub-dataset=a/b*",
        "--data-volume=a",
        "--data-volume=a=relative",
        "--kv-cache-memory=4 GB",
        "--trainer-slots=0",
        "--max-off-policy-steps=-1",
        "--max-off-policy-steps=17",
        "--trainer-slots=auto",
        "--gradient-checkpointing=yes",
    ],
)
def test_bad_flags_end_with_two(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(flag)
    assert caught.value.code == 2
    assert flag.split("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(("text", "size"), [("4Gi", 4 << 30), ("500M", 500_000_000), ("1.5Ki", 1536), ("7", 7)])
def test_quantity(text: str, size: int) -> None:
    assert quantity(text) == size


def test_a_rotated_token_takes_effect_and_an_emptied_file_does_not(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("one\n")
    token = TokenFile(path)
    assert token.accepts("Bearer one")
    assert token.accepts("bearer one")
    assert not token.accepts("Bearer two")
    assert not token.accepts("one")
    assert not token.accepts(None)
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    assert token.accepts("Bearer two")
    assert not token.accepts("Bearer one")
    path.write_text("")
    os.utime(path, ns=(2, 2))
    assert token.accepts("Bearer two")
    assert not token.accepts("Bearer ")


def test_no_token_no_engine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing or empty"):
        TokenFile(tmp_path / "nothing")

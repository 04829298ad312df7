"""What an engine says, before it begins, of trackers that it cannot run or may not reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clora_engine import tracking
from clora_engine.config import EngineConfig
from clora_engine.errors import UserError
from tests.unit.engine.tracking.fixtures import MLFLOW, TRACKIO, WANDB, tracked

ONLINE = {"kind": "WandB", "project": "p", "secretRef": {"name": "s", "key": "k"}}


def check(*trackers: dict[str, Any], hosts: tuple[str, ...] = ()) -> None:
    config = EngineConfig(model="m", storage=Path("s"), token_file=Path("t"), tracking_hosts=hosts)
    tracking.check(tracked(*trackers).spec, config)


def test_what_can_be_tracked() -> None:
    check()
    check(WANDB, MLFLOW, TRACKIO)
    check(ONLINE, hosts=("api.wandb.ai",))
    check(ONLINE | {"url": "https://wandb.team.svc/base/"}, hosts=("*.team.svc:443",))
    check({"kind": "MLflow", "project": "p", "url": "http://MLflow.svc:5000"}, hosts=("mlflow.svc:5000",))
    check(ONLINE | {"kind": "Trackio", "url": "https://team-metrics.hf.space"}, hosts=("team-metrics.hf.space",))


@pytest.mark.parametrize(
    ("tracker", "hosts", "named"),
    [
        (ONLINE, (), "api.wandb.ai"),
        (ONLINE, ("api.wandb.ai:80",), "api.wandb.ai"),
        (ONLINE | {"url": "https://api.wandb.ai.evil.org"}, ("api.wandb.ai",), "evil.org"),
        ({"kind": "MLflow", "project": "p", "url": "http://mlflow.svc:5001"}, ("mlflow.svc:5000",), "mlflow.svc:5001"),
        ({"kind": "MLflow", "project": "p", "url": "http://mlflow.svc:port"}, ("mlflow.svc",), "mlflow.svc:port"),
    ],
)
def test_a_host_that_is_not_allowed(tracker: dict[str, Any], hosts: tuple[str, ...], named: str) -> None:
    with pytest.raises(UserError, match=named) as error:
        check(MLFLOW, tracker, hosts=hosts)
    assert error.value.field == "tracking[1].url"
    assert "spec.tracking.allowedHosts" in str(error.value)


def test_an_engine_without_the_libraries_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, (_, extra) in list(tracking.LIBRARIES.items()):
        monkeypatch.setitem(tracking.LIBRARIES, kind, ("no_such_package", extra))
    for tracker, named in (
        (WANDB, "the extra tracking"),
        (MLFLOW, "the extra tracking"),
        (TRACKIO, "the extra trackio"),
    ):
        with pytest.raises(UserError, match=named) as error:
            check(tracker)
        assert error.value.field == "tracking[0].kind"

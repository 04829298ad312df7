"""The images in docker/ are what the chart and the operator run them as, with the versions that the tests ran with."""

from __future__ import annotations

import re

import pytest
import yaml
from packaging.requirements import Requirement

from clora_operator import pod_template
from local.cache import REPOSITORY

DOCKER, REQUIREMENTS = REPOSITORY / "docker", REPOSITORY / "requirements"


def _instruction(name: str, keyword: str) -> str:
    """The last one counts."""
    found = re.findall(rf"^{keyword} (.*)$", (DOCKER / name).read_text(), re.MULTILINE)
    return str(found[-1])


def _pins(name: str) -> dict[str, str]:
    pinned = re.findall(r"^([a-zA-Z0-9._-]+)==(\S+) \\\n +--hash=sha256:", (REQUIREMENTS / name).read_text(), re.M)
    return dict(pinned)


def test_operator_runs_as_the_user_of_the_chart() -> None:
    template = (REPOSITORY / "charts" / "clora" / "templates" / "_helpers.tpl").read_text()
    user = re.search(r"runAsUser: (\d+)", template)
    assert user
    assert _instruction("operator.Dockerfile", "USER") == f"{user[1]}:{user[1]}"
    assert yaml.safe_load(_instruction("operator.Dockerfile", "ENTRYPOINT")) == ["clora-operator"]


@pytest.mark.parametrize("name", ["engine.Dockerfile", "engine-cpu.Dockerfile"])
def test_engine_runs_as_the_operator_starts_it(name: str) -> None:
    assert _instruction(name, "USER") == f"{pod_template.USER}:{pod_template.USER}"
    assert f"HOME={pod_template.HOME}" in (DOCKER / name).read_text()
    assert _instruction(name, "EXPOSE") == str(pod_template.PORT)
    assert yaml.safe_load(_instruction(name, "ENTRYPOINT")) == ["clora-engine"]


@pytest.mark.parametrize("name", ["operator.txt", "engine-cpu.txt", "build.txt"])
def test_images_hold_the_versions_that_were_tested(name: str) -> None:
    tested, held = _pins("cpu.txt"), _pins(name)
    assert held
    assert {package: tested.get(package) for package in held} == held


@pytest.mark.parametrize("name", ["engine-cpu.txt", "engine-on-vllm.txt"])
def test_engines_can_track(name: str) -> None:
    assert {"wandb", "mlflow-skinny", "trackio"} <= _pins(name).keys()


def test_what_is_added_to_vllms_image_is_what_clora_allows() -> None:
    added = _pins("engine-on-vllm.txt")
    project = (REPOSITORY / "pyproject.toml").read_text()
    for package in ("peft", "simpleeval", "transformers"):
        wanted = re.search(rf'"({package}[<>=][^"]*)"', project)
        assert wanted
        assert Requirement(wanted[1]).specifier.contains(added[package])

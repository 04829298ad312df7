"""Served adapters on a real engine: the real sampler answers, through the tenants' port and OpenAI's own client."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from clora_api.control import ExperimentReport, Phase
from local.control_plane import free_port
from tests.engine_fixtures import FINAL, EngineProcess, sft_spec

pytestmark = pytest.mark.integration

PROMPT = "<|im_start|>user\nHow many apples are left?<|im_end|>\n<|im_start|>assistant\n"


class ServingEngine(EngineProcess):
    def __init__(self, folder: Path, model: Path) -> None:
        self.tenant_port = free_port()
        super().__init__(folder, model, tenant_port=self.tenant_port, max_experiments=2)

    def client(self, token: str) -> openai.OpenAI:
        """As a tenant has it."""
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.tenant_port}/v1", api_key=token, max_retries=0, timeout=90
        )

    def serve(self, uid: str, token: str | None, **desired: object) -> httpx.Response:
        return self.put(uid, sft_spec(lora={"rank": 8, "alpha": 32, "seed": 3}), servingToken=token, **desired)

    def train(self, uid: str, token: str) -> None:
        """To its end; what it is at the end is served."""
        assert self.serve(uid, token).status_code == 200
        self.wait(uid, lambda r: r.phase in FINAL and _answers(r))


def _answers(report: ExperimentReport) -> bool:
    return report.serving is not None and report.serving.version.endswith("@3")


@pytest.fixture
def serving(tmp_path: Path, tiny_model: Path) -> Iterator[ServingEngine]:
    engine = ServingEngine(tmp_path / "engine", tiny_model)
    try:
        engine.start()
        yield engine
    finally:
        engine.close()


def says(engine: ServingEngine, name: str, token: str) -> str:
    """Greedy, so that the same version says the same."""
    answer = engine.client(token).completions.create(model=name, prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.system_fingerprint == f"{name}@3"
    return answer.choices[0].text


def refused(engine: ServingEngine, token: str, name: str) -> int:
    with pytest.raises(openai.APIStatusError) as error:
        engine.client(token).completions.create(model=name, prompt=PROMPT, max_tokens=4)
    assert isinstance(error.value.body, dict)
    assert set(error.value.body) == {"message", "type", "param", "code"}
    return error.value.status_code


def test_a_token_gets_its_own_adapter_through_kills_and_nothing_else(serving: ServingEngine) -> None:
    a, b = str(uuid.uuid4()), str(uuid.uuid4())
    token_a, token_b = f"token-of-tenant-{a}", f"token-of-tenant-{b}"
    assert refused(serving, token_a, a) == 401
    serving.train(a, token_a)
    serving.train(b, token_b)
    assert serving.report(a).phase is Phase.SUCCEEDED
    assert serving.info().experiments == 2
    full = serving.put(str(uuid.uuid4()), sft_spec())
    assert full.status_code == 409

    first = says(serving, a, token_a)
    chat = serving.client(token_a).chat.completions.create(
        model=a, messages=[{"role": "user", "content": "How many apples are left?"}], max_tokens=24, temperature=0
    )
    assert chat.choices[0].message.content == first  # the template makes the same tokens
    assert chat.usage is not None
    assert chat.usage.completion_tokens > 0
    assert [model.id for model in serving.client(token_a).models.list()] == [a]

    for token, name in ((token_a, b), (token_b, a)):
        assert refused(serving, token, name) == 404
    for token in ("wrong", token_a[:-1], token_a + token_b):
        assert refused(serving, token, a) == 401
    with pytest.raises(openai.BadRequestError, match="streaming"):
        serving.client(token_a).completions.create(model=a, prompt=PROMPT, stream=True)

    serving.kill()
    serving.start()
    assert refused(serving, token_a, a) == 401  # nobody has told it yet
    assert serving.serve(a, token_a, mode="Serve", committedStep=3).status_code == 200
    serving.wait(a, _answers)
    assert says(serving, a, token_a) == first  # from the commit as from the trainer
    assert serving.report(a).phase is Phase.SUCCEEDED

    serving.serve(a, None, mode="Serve")
    assert refused(serving, token_a, a) == 401
    assert serving.info().experiments == 0
    serving.serve(a, token_a, mode="Serve")
    serving.wait(a, _answers)
    serving.delete(a)
    assert refused(serving, token_a, a) == 401
    assert all(token not in serving.tail() for token in (token_a, token_b))


def test_while_it_trains_the_latest_version_answers_and_none_when_it_is_suspended(serving: ServingEngine) -> None:
    uid = str(uuid.uuid4())
    token = f"token-of-tenant-{uid}"
    spec = sft_spec(maxSteps=1000)
    assert serving.put(uid, spec, servingToken=token).status_code == 200
    steps = set()
    for has_come in (lambda r: r.progress.step >= 1, lambda r: r.progress.step >= 3):
        serving.wait(uid, has_come)
        answer = serving.client(token).completions.create(model=uid, prompt=PROMPT, max_tokens=8)
        assert answer.system_fingerprint is not None
        steps.add(int(answer.system_fingerprint.rpartition("@")[2]))
    assert min(steps) >= 1
    assert max(steps) >= 3
    serving.put(uid, spec, servingToken=token, mode="Suspend")
    serving.wait(uid, lambda r: r.phase is Phase.SUSPENDED)
    assert refused(serving, token, uid) == 503
    assert serving.info().experiments == 0

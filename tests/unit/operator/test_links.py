"""Which connection to an engine is kept."""

from __future__ import annotations

from clora_operator.decide_engine import decide_engine
from clora_operator.links import Links
from clora_operator.plan import Connect
from clora_operator.resources import Key
from tests.unit.operator.factories import NOW, SETTINGS, engine, observed_engine

ENGINE = Key("engine", "team", "main")


async def test_another_pod_is_another_connection() -> None:
    """A force-deleted pod's process may live on, and a kept connection leads to it."""
    links = Links(1.0, lambda: NOW, lambda change: None)
    await links.connect(ENGINE, "http://127.0.0.1:9", "token")
    first = links.get(ENGINE)
    for pod in ("old", "old", ""):  # known, the same, gone for the moment
        await links.connect(ENGINE, "http://127.0.0.1:9", "token", pod)
        assert links.get(ENGINE) is first
    await links.connect(ENGINE, "http://127.0.0.1:9", "token", "new")
    second = links.get(ENGINE)
    assert second is not first
    await links.connect(ENGINE, "http://127.0.0.1:9", "token", "new")
    assert links.get(ENGINE) is second
    await links.close()


def test_an_engine_is_connected_to_with_its_pod() -> None:
    of = engine(image="x")
    found = decide_engine(observed_engine(of, pod={"metadata": {"name": "main-0", "uid": "u"}}), NOW, SETTINGS).actions
    assert [action.pod for action in found if isinstance(action, Connect)] == ["u"]

"""What initFrom comes to, which of two engines has an endpoint, how tokens are read, what the cache keeps."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest

from clora_api.control import InitSource, Problem
from clora_operator.cache import Cache
from clora_operator.links import EngineView
from clora_operator.observe import Answer, Memory, resolve_init
from clora_operator.observer import claims, decode_token, rival
from clora_operator.resources import Engine, Experiment, Key
from tests.unit.operator.factories import (
    NOW,
    UID,
    ago,
    condition,
    engine,
    experiment,
    metadata,
    namespaces,
    priority_classes,
    report,
    running,
    spec,
    view,
)

NO_CLASSES, NO_NAMESPACES = priority_classes(body=None), namespaces()


def source(*conditions: dict[str, Any], step: int | None = None) -> Experiment:
    status: dict[str, Any] = {"conditions": list(conditions), "engine": {"name": "main"}}
    if step is not None:
        status["checkpoint"] = {"step": step, "path": "p", "digest": "d"}
    of = experiment(status=status)
    return replace(of, meta=replace(of.meta, name="source", uid="source-uid"))


SUCCEEDED = condition("Succeeded", "True", "Completed")
FAILED = condition("Failed", "True", "BackoffLimitExceeded", message="it broke")


@pytest.mark.parametrize(
    ("step", "of", "expected"),
    [
        (None, None, "InitFromNotFound"),
        (None, source(), "WaitingForInit"),
        (None, source(step=5), "WaitingForInit"),
        (None, source(SUCCEEDED, step=9), InitSource(uid="source-uid", step=9)),
        (None, source(FAILED, step=9), "InitFromFailed"),
        (4, source(step=3), "WaitingForInit"),
        (4, source(step=4), InitSource(uid="source-uid", step=4)),
        (4, source(FAILED, step=4), InitSource(uid="source-uid", step=4)),
        (4, source(FAILED, step=3), "InitFromFailed"),
        (4, source(SUCCEEDED, step=3), "InitFromFailed"),
        (0, source(step=0), InitSource(uid="source-uid", step=0)),
    ],
)
def test_init(step: int | None, of: Experiment | None, expected: Any) -> None:
    named = {"name": "source"} | ({} if step is None else {"step": step})
    found = resolve_init(experiment(initFrom={"experiment": named}), of)
    assert found is not None
    assert (found.source or found.reason) == expected


def test_init_is_resolved_once() -> None:
    kept = experiment(
        initFrom={"experiment": {"name": "source"}}, status={"initFrom": {"uid": "source-uid", "step": 2}}
    )
    for later in (None, source(SUCCEEDED, step=9)):
        found = resolve_init(kept, later)
        assert found is not None
        assert found.source == InitSource(uid="source-uid", step=2)


def test_init_from_an_engine_of_another_namespace() -> None:
    elsewhere = replace(source(SUCCEEDED, step=9), engine_namespace="platform")
    found = resolve_init(experiment(initFrom={"experiment": {"name": "source"}}), elsewhere)
    assert found is not None
    assert found.reason == "InitFromNotFound"
    assert "platform" in found.message


def test_no_init() -> None:
    assert resolve_init(experiment(), None) is None


def at(endpoint: str, name: str, created: str) -> Engine:
    return engine(
        name=name,
        uid=name,
        meta={"creationTimestamp": f"2026-01-01T{created}Z"},
        endpoint=endpoint,
        tokenSecretRef={"name": "t"},
    )


def test_the_older_engine_has_the_endpoint() -> None:
    old, young = at("http://E:1", "old", "10:00:00"), at("http://e:1", "young", "10:00:01")
    other = at("http://e:2", "other", "09:00:00")
    assert rival(young, [young, old, other]) == "old"
    assert rival(old, [young, old, other]) is None
    assert rival(engine(image="x"), [young, old]) is None


@pytest.mark.parametrize(
    ("data", "token"),
    [(b"abc", "abc"), (b"abc\n", "abc"), (b"", None), (b" \n", None), (b"\xff\xfe", None)],
)
def test_tokens(data: bytes, token: str | None) -> None:
    assert decode_token({"data": {"token": base64.b64encode(data).decode()}}, "token") == token
    assert decode_token(None, "token") is None
    assert decode_token({"data": {}}, "token") is None


def body(version: int, uid: str = "u") -> dict[str, Any]:
    return {"metadata": metadata("one", uid, resourceVersion=str(version)), "spec": spec()}


def version(cache: Cache) -> str | None:
    known = cache.experiment(Key("experiment", "team", "one"))
    return known.meta.resource_version if known else None


def test_the_cache_keeps_the_newest_version() -> None:
    cache = Cache()
    cache.put("experiment", body(10))
    cache.put("experiment", body(9))
    assert version(cache) == "10"
    cache.put("experiment", body(5, uid="made-anew"))
    assert version(cache) == "5"


def test_an_answer_does_not_bring_back_what_is_deleted() -> None:
    cache = Cache()
    cache.put("experiment", body(10))
    cache.remove("experiment", body(11))
    cache.put_answer("experiment", body(12))
    assert version(cache) is None


def test_a_late_deletion_does_not_remove_a_namesake() -> None:
    cache = Cache()
    cache.put("experiment", body(12, uid="made-anew"))
    cache.remove("experiment", body(11))
    assert version(cache) == "12"


def test_a_list_replaces_what_events_have_missed() -> None:
    cache = Cache()
    cache.put("experiment", body(10))
    assert cache.replace("experiment", []) == {Key("experiment", "team", "one")}
    assert version(cache) is None


# ------------------------------------------------------------------------------ what placement is told


def links_with(of: EngineView) -> Any:
    class OneView:
        """Links, of which placement reads nothing but views."""

        def view(self, key: Key) -> EngineView:
            return of

    return OneView()


def told(**fields: Any) -> Cache:
    cache = Cache()
    status = {"engine": {"name": "main", "epoch": 1}} | fields
    item = spec(engineRef=None, engineSelector={"matchLabels": {"a": "b"}})
    cache.put(
        "experiment",
        {"metadata": metadata("one", UID), "spec": {k: v for k, v in item.items() if v}, "status": status},
    )
    return cache


REFUSED = Memory(answer=Answer("d", NOW, problem=Problem(type="capacity-exceeded", title="full", status=409)))


@pytest.mark.parametrize(
    ("cache", "of_view", "memory", "pinned"),
    [
        (told(), view(), Memory(), "main"),
        (told(), view(), REFUSED, None),
        (told(), view(down_since=ago(1)), REFUSED, "main"),
        (told(), view(report(experiment())), REFUSED, "main"),
        (told(checkpoint={"step": 1, "path": "p", "digest": "d"}), view(), REFUSED, "main"),
    ],
)
def test_only_a_plain_refusal_sets_an_experiment_free(
    cache: Cache, of_view: EngineView, memory: Memory, pinned: str | None
) -> None:
    (claim,) = claims(cache, links_with(of_view), {UID: memory}, NO_CLASSES, NO_NAMESPACES)
    assert claim.pinned == pinned


def prioritised(**status: Any) -> Cache:
    cache = Cache()
    cache.put(
        "experiment", {"metadata": metadata("one", UID), "spec": spec(priorityClassName="high"), "status": status}
    )
    return cache


async def test_a_priority_that_is_not_known_yet_takes_nobodys_slot_and_loses_none() -> None:
    classes = priority_classes(body={"value": 1000})
    (before,) = claims(prioritised(), links_with(view()), {}, classes, NO_NAMESPACES)
    assert (before.priority, before.preempts, before.preemptible) == (0, False, False)
    await classes.read("high")
    (after,) = claims(prioritised(), links_with(view()), {}, classes, NO_NAMESPACES)
    assert (after.priority, after.preempts, after.preemptible) == (1000, True, True)


async def test_nobody_makes_room_for_what_the_engine_has_refused() -> None:
    classes = priority_classes(body={"value": 1000})
    await classes.read("high")
    refused = condition("Accepted", "False", "InvalidSpec")
    (claim,) = claims(prioritised(conditions=[refused]), links_with(view()), {}, classes, NO_NAMESPACES)
    assert not claim.preempts
    (claim,) = claims(
        prioritised(conditions=[refused | {"observedGeneration": 0}]), links_with(view()), {}, classes, NO_NAMESPACES
    )
    assert claim.preempts


def test_who_is_to_be_suspended_gives_its_slot_up_by_itself() -> None:
    cache = Cache()
    suspended = experiment(suspend=True, status=running())
    status = dict(suspended.raw_status)
    cache.put("experiment", {"metadata": metadata("one", UID), "spec": spec(suspend=True), "status": status})
    (claim,) = claims(cache, links_with(view(report(suspended))), {}, NO_CLASSES, NO_NAMESPACES)
    assert claim.holds
    assert claim.leaving

"""Two want what there is once, and the operator dies at the worst moment: after the engine has acted, before the
operator has heard or written anything of it."""

from __future__ import annotations

import pytest

from tests.integration.operator_fixtures import Stage, condition, stage, status, wait_for

pytestmark = pytest.mark.integration
__all__ = ["stage"]

SLOW_ANSWER = {"answerSeconds": "30", "stepSeconds": "0.2"}


def test_the_last_slot_goes_to_one_although_the_operator_dies_between_put_and_status(stage: Stage) -> None:
    engine = stage.start_engine(max_experiments=1)
    operator = stage.start_operator()
    cluster = stage.cluster
    names = ("first", "second")
    uids = {name: cluster.experiment(name, max_steps=100_000, arguments=SLOW_ANSWER) for name in names}
    wait_for(lambda: bool(engine.uids()), "the engine to take one")
    (taken,) = engine.uids()
    winner = next(name for name in names if uids[name] == taken)
    (loser,) = set(names) - {winner}
    assert condition(cluster.get(winner), "Attached").get("status") != "True"  # nobody has written it yet

    operator.kill()
    operator.start()

    attached = cluster.wait(winner, lambda o: condition(o, "Attached").get("status") == "True", "the winner's slot")
    assert status(attached)["engine"]["name"] == "main"
    cluster.wait_reason(loser, "Attached", "Queued")
    assert engine.uids() == {taken}
    assert len(engine.events("attach", taken)) == 1
    assert engine.events("attach", uids[loser]) == []

    cluster.delete(winner)
    cluster.wait_gone(winner)
    cluster.wait(loser, lambda o: condition(o, "Attached").get("status") == "True", "the loser's turn")


def test_a_choice_between_engines_outlives_the_operator(stage: Stage) -> None:
    """The engine that was told first keeps it, although by now another would be chosen."""
    engines = {name: stage.start_engine(name, max_experiments=1) for name in ("one", "two")}
    operator = stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment(
        "chosen",
        max_steps=100_000,
        arguments=SLOW_ANSWER,
        engineRef=None,
        engineSelector={"matchLabels": {"pool": "tests"}},
    )
    wait_for(lambda: any(engine.uids() for engine in engines.values()), "an engine to take it")
    holder = next(name for name, engine in engines.items() if engine.uids())
    (other,) = set(engines) - {holder}

    operator.kill()
    cluster.experiment("filler", max_steps=100_000, engineRef={"name": holder})  # wants the same slot
    operator.start()

    held = cluster.wait("chosen", lambda o: condition(o, "Attached").get("status") == "True", "its slot")
    assert status(held)["engine"]["name"] == holder
    assert engines[other].events("attach", uid) == []
    assert len(engines[holder].events("attach", uid)) == 1


def test_deleted_while_the_engine_is_being_told(stage: Stage) -> None:
    """The answer to the PUT is still under way when the resource is deleted: nothing stays on the engine."""
    engine = stage.start_engine()
    stage.start_operator()
    cluster = stage.cluster
    uid = cluster.experiment("brief", max_steps=100_000, arguments=SLOW_ANSWER | {"answerSeconds": "3"})
    wait_for(lambda: uid in engine.uids(), "the engine to take it")
    cluster.delete("brief")
    cluster.wait_gone("brief")
    assert uid not in engine.uids()
    assert len(engine.events("delete", uid)) == 1

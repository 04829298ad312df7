"""The commands that ask an engine, against the engine's real HTTP app over a folder as an experiment leaves it."""

from __future__ import annotations

import base64
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from rich.console import Console

from clora_api import API_VERSION
from clora_api.control import TrajectoryOrder
from clora_engine.config import EngineConfig
from clora_engine.journal import Journal
from clora_engine.server.app import create_app
from clora_engine.server.auth import TokenFile
from clora_engine.supervisor import Supervisor
from clora_engine.training import Services
from clora_engine.types import Group, Trajectory
from clora_operator import cli
from clora_operator.cli_compare import BARS, Course, plot, sparkline
from clora_operator.cli_engine import pod_of
from clora_operator.cli_logs import logs, step_line
from clora_operator.cli_text import harmless
from clora_operator.cli_trajectories import trajectories
from clora_operator.cli_watch import watch
from clora_operator.kube import ENGINES, Kube
from tests.unit.engine.chat_fixtures import CHATML, tiny_tokenizer
from tests.unit.operator.factories import claimed, condition, engine, metadata, running, spec

TOKENIZER = tiny_tokenizer(CHATML)
NAMES = {"kitchen": "uid-1", "garden": "uid-2", "empty": "uid-3"}


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def trajectory(reward: float, *parts: str, error: str = "", **fields: Any) -> Trajectory:
    """Parts are the model's and the environment's in turn."""
    tokens, mask = [], []
    for place, part in enumerate(parts):
        found = ids(part)
        tokens += found
        mask += [1 - place % 2] * len(found)
    turns = (len(parts) + 1) // 2
    return Trajectory(
        ids=tokens, mask=mask, logprobs=[0.0] * len(mask), reward=reward, turns=turns, error=error, **fields
    )


def write_experiment(storage: Path, name: str, rewards: list[float]) -> Journal:
    journal = Journal(storage, NAMES[name], 1)
    journal.claim("team", name)
    for step, reward in enumerate(rewards):
        row: dict[str, Any] = {"step": step}
        if step:
            row |= {"reward_mean": reward, "reward_std": 0.25, "loss": 0.0123, "sampled_tokens": 1000.0}
            row |= {"tokens_per_second": 321.0, "step_seconds": 4.5, "rollout_seconds": 3.0, "train_seconds": 1.0}
        if step in (0, len(rewards) - 1):
            row["eval_accuracy"] = 0.25 if step == 0 else 0.875
        journal.append_metrics(row)
    return journal


@dataclass
class FakeKube:
    """An API server that holds these experiments and the engine that has them; `changes` are what a watch sees."""

    endpoint: str
    statuses: dict[str, dict[str, Any]]
    changes: list[Callable[[], None]] = field(default_factory=list)

    def experiment(self, name: str) -> dict[str, Any]:
        return {
            "apiVersion": API_VERSION,
            "kind": "LoRAExperiment",
            "metadata": metadata(name, NAMES[name]),
            "spec": spec(),
            "status": self.statuses[name],
        }

    def get(self, plural: str, namespace: str, name: str) -> dict[str, Any] | None:
        if plural == ENGINES:
            return {
                "apiVersion": API_VERSION,
                "kind": "LoRAEngine",
                "metadata": metadata("main", "engine-uid"),
                "spec": {"model": {"name": "m"}, "endpoint": self.endpoint, "tokenSecretRef": {"name": "s"}},
                "status": {},
            }
        return self.experiment(name) if name in self.statuses else None

    def secret(self, namespace: str, name: str) -> dict[str, Any]:
        return {"data": {"token": base64.b64encode(b"secret").decode()}}

    def watch(self, plural: str, namespace: str) -> Iterator[list[dict[str, Any]]]:
        yield [self.experiment(name) for name in self.statuses]
        for change in self.changes:
            change()
            yield [self.experiment(name) for name in self.statuses]


@pytest.fixture
def kube(tmp_path: Path) -> Iterator[FakeKube]:
    storage = tmp_path / "storage"
    (tmp_path / "token").write_text("secret")
    config = EngineConfig(model="m", storage=storage, token_file=tmp_path / "token")
    journal = write_experiment(storage, "kitchen", [0.0, 0.25, 0.5, 0.75])
    write_experiment(storage, "garden", [0.0, 0.5, 0.5, 0.5, 0.5])
    write_experiment(storage, "empty", [])
    prompt = ids("<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n")
    for index, members in enumerate(
        [
            [trajectory(1.0, '{"calculator": "1+1"}', "\nTOOL 2\n", "right", tool_calls=2), trajectory(0.0, "wrong")],
            [trajectory(0.5, "\x1b[2J half"), trajectory(0.0, "", error="Timeout: no answer within 60 s")],
        ]
    ):
        journal.append_group(3, Group(index=index, example=7, version_step=2, prompt=prompt, trajectories=members))
    supervisor = Supervisor(config, 1, "0")
    supervisor.open(Services(config, cast(Any, None), cast(Any, None), TOKENIZER))
    app = create_app(supervisor, TokenFile(tmp_path / "token"), CollectorRegistry())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
            yield FakeKube(endpoint, {name: running() for name in NAMES})
        finally:
            server.should_exit = True
            thread.join()


def run(kube: FakeKube, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The command line itself, but for where the API server is."""
    monkeypatch.setattr(cli, "configuration", lambda _: None)
    monkeypatch.setattr(cli, "Kube", lambda _: kube)
    monkeypatch.setenv("COLUMNS", "200")
    return cli.main([*arguments, "-n", "team"])


def real(kube: FakeKube) -> Kube:
    return cast(Kube, kube)


# ------------------------------------------------------------------------------------ pull


def test_what_trackers_have_kept_is_pulled(
    kube: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "storage" / "experiments" / NAMES["kitchen"] / "tracking" / "mlruns" / "1"
    there.mkdir(parents=True)
    (there / "meta.yaml").write_text("name: p")
    assert run(kube, monkeypatch, "pull", "kitchen", str(tmp_path / "mine"), "--tracking") == 0
    assert (tmp_path / "mine" / "mlruns" / "1" / "meta.yaml").read_text() == "name: p"
    assert capsys.readouterr().out == f"trackers of kitchen: {tmp_path / 'mine' / 'mlruns'}\n"


def test_where_trackers_have_kept_nothing_it_is_said(
    kube: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(kube, monkeypatch, "pull", "garden", str(tmp_path / "mine"), "--tracking") == 2
    assert "it keeps no files of trackers: none in spec.tracking has had mode Offline" in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()


def test_what_the_system_refuses_is_said_in_words(
    kube: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run(kube, monkeypatch, "pull", "kitchen", str(tmp_path / "file" / "mine"), "--step", "1") == 2
    assert "Not a directory" in capsys.readouterr().err
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        kube.endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert run(kube, monkeypatch, "logs", "kitchen") == 2
    assert "Connection refused" in capsys.readouterr().err


class Labelled:
    """Pods with an engine's label: its own, one that ends, and a copy that somebody has made to look into it."""

    def pods(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        owner = {"kind": "StatefulSet", "name": "main", "controller": True}
        ends = {"name": "main-00", "deletionTimestamp": "2026-01-01T11:00:00Z", "ownerReferences": [owner]}
        of_ours: dict[str, Any] = {"name": "main-1", "ownerReferences": [owner]}
        return [{"metadata": meta} for meta in ({"name": "debug-main"}, ends, of_ours)]


def test_the_token_goes_to_no_pod_that_only_has_the_label() -> None:
    assert pod_of(cast(Kube, Labelled()), engine()) == "main-1"


# ------------------------------------------------------------------------------------ logs


def test_logs_are_a_line_a_step(
    kube: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(kube, monkeypatch, "logs", "kitchen") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 0/10  held out 0.250"
    assert lines[1] == ("step 1/10  reward 0.250 ± 0.250  loss 0.0123  321 tok/s  4.5 s (rollout 3.0, train 1.0)")
    assert lines[3].startswith("step 3/10  reward 0.750 ± 0.250  loss 0.0123  held out 0.875")
    assert len(lines) == 4


def test_a_step_in_trouble_says_so() -> None:
    row = {"step": 2, "truncated": 0.5, "tool_errors": 3.0, "environment_errors": 2.0, "update_skipped": 1.0}
    assert step_line(row, None) == "step 2  truncated 50%  tool errors 3  failed 2  update skipped 1"


def test_following_ends_with_the_experiment_and_says_each_thing_once(
    kube: FakeKube, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(tmp_path / "storage", NAMES["kitchen"], 1)

    def waits() -> None:
        kube.statuses["kitchen"] = claimed(condition("Attached", "False", "Queued", message="place \x1b[1m1"))

    def goes_on() -> None:
        kube.statuses["kitchen"] = running()
        journal.append_metrics({"step": 4, "reward_mean": 0.9})

    def rolls_back() -> None:
        path = journal.folder / "metrics.jsonl"
        path.write_bytes(b"\n".join(path.read_bytes().splitlines()[:3]) + b"\n")

    def fails() -> None:
        journal.append_metrics({"step": 3, "reward_mean": 0.8})
        kube.statuses["kitchen"] = claimed(condition("Failed", "True", "Oops", message="it broke"))

    kube.changes = [waits, goes_on, lambda: None, rolls_back, fails]
    assert logs(real(kube), "team", "kitchen", follow=True) == 1
    said = [line[:30].strip() for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "-- Running",
        "step 0/10  held out 0.250",
        *(f"step {step}/10  reward 0.{reward} ± 0.25" for step, reward in ((1, "250"), (2, "500"), (3, "750"))),
        "-- Queued: place \\x1b[1m1",
        "-- Running",
        "step 4/10  reward 0.900 ± 0.00",
        "rolled back to step 2: what ca",
        "step 3/10  reward 0.800 ± 0.00",
        "-- Failed: it broke",
    ]


def test_following_waits_for_an_engine_that_cannot_be_asked_yet(
    kube: FakeKube, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint, kube.endpoint = kube.endpoint, "http://127.0.0.1:1"
    kube.statuses["kitchen"] = {}

    def attached() -> None:
        kube.endpoint, kube.statuses["kitchen"] = endpoint, running()

    def done() -> None:
        kube.statuses["kitchen"] = claimed(condition("Succeeded", "True", "Done"))

    kube.changes = [attached, done]
    assert logs(real(kube), "team", "kitchen", follow=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[:2], lines[2][:9], lines[-1]) == (["-- Pending", "-- Running"], "step 0/10", "-- Succeeded")


def breaking_off(*answers: bytes) -> tuple[str, threading.Thread]:
    """Where an engine gives these answers, one a connection, and then is gone."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", thread


CUT = b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"step": 0}\n'
GARBAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"


@pytest.mark.parametrize("answer", [CUT, GARBAGE, b"SSH-2.0\r\n"])
@pytest.mark.parametrize("command", [["logs"], ["trajectories"], ["compare"]])
def test_an_answer_that_breaks_off_is_said(
    kube: FakeKube,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    answer: bytes,
) -> None:
    kube.endpoint, thread = breaking_off(answer)
    assert run(kube, monkeypatch, *command, "kitchen") == 2
    thread.join()
    told = capsys.readouterr()
    assert told.err.startswith("clora: ")
    assert len(told.err) < 400


def test_metrics_that_break_off_are_said(
    kube: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kube.endpoint, thread = breaking_off(CUT)
    assert run(kube, monkeypatch, "metrics", "--json", "kitchen") == 2
    thread.join()
    assert "cannot be read" in capsys.readouterr().err


def test_following_outlives_an_engine_that_breaks_off(kube: FakeKube, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = kube.endpoint
    kube.endpoint, thread = breaking_off(CUT, GARBAGE)

    def back() -> None:
        kube.endpoint = endpoint
        kube.statuses["kitchen"] = claimed(condition("Succeeded", "True", "Done"))

    kube.changes = [lambda: None, back]
    assert logs(real(kube), "team", "kitchen", follow=True) == 0
    thread.join()
    assert "step 3/10" in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [True, False])
def test_watch_shows_messages_of_others_as_they_are(
    kube: FakeKube, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    told = "no [/foo] \x1b[2J [red]"
    kube.statuses = {"kitchen": claimed(condition("Failed", "True", "Oops", message=told))}
    console = Console(width=200, force_terminal=terminal, no_color=True)
    assert watch(real(kube), "team", [], until_done=True, console=console) == 1
    shown = capsys.readouterr().out
    assert "no [/foo] \\x1b[2J [red]" in shown
    assert "\x1b[2J" not in shown


# ------------------------------------------------------------------------------------ trajectories


def show(kube: FakeKube, order: TrajectoryOrder, *, step: int | None = None, limit: int = 3) -> str:
    console = Console(width=200, no_color=True)
    with console.capture() as captured:
        trajectories(real(kube), "team", "kitchen", step=step, order=order, limit=limit, as_json=False, console=console)
    return captured.get()


def test_a_trajectory_as_people_read_it(kube: FakeKube) -> None:
    assert show(kube, TrajectoryOrder.BEST, limit=1) == (
        "kitchen, step 3: 4 trajectories, 1 failed; shown: best 1\n"
        "\n"
        "── reward 1 · group 0, member 0 · 2 turns · 2 tool calls · version 2\n"
        "prompt\n"
        "  <|im_start|>user\n"
        "  How many?<|im_end|>\n"
        "  <|im_start|>assistant\n"
        "model\n"
        '  {"calculator": "1+1"}\n'
        "environment\n"
        "  TOOL 2\n"
        "model\n"
        "  right\n\n"
    )


def test_orders(kube: FakeKube) -> None:
    def rewards(order: TrajectoryOrder) -> list[str]:
        return [
            line.split(" · ")[0].removeprefix("── reward ") for line in show(kube, order).splitlines() if "──" in line
        ]

    assert rewards(TrajectoryOrder.BEST) == ["1", "0.5", "0"]
    assert rewards(TrajectoryOrder.WORST) == ["0", "0.5", "1"]
    assert rewards(TrajectoryOrder.FIRST) == ["1", "0", "0.5"]
    assert rewards(TrajectoryOrder.FAILED) == ["0"]
    assert "failed: Timeout: no answer within 60 s" in show(kube, TrajectoryOrder.FAILED)


def test_what_a_model_wrote_cannot_move_the_cursor(kube: FakeKube) -> None:
    shown = show(kube, TrajectoryOrder.BEST)
    assert "\x1b" not in shown
    assert "\\x1b[2J half" in shown


def test_trajectories_as_json(
    kube: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(kube, monkeypatch, "trajectories", "kitchen", "--worst", "--limit", "1", "--step", "3", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["step"], found["reward"], found["versionStep"]) == (3, 0.0, 2)
    assert found["parts"] == [{"by": "model", "text": "wrong"}]
    assert run(kube, monkeypatch, "trajectories", "kitchen", "--best", "--limit", "4", "--json") == 0
    assert capsys.readouterr().out.isascii()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["trajectories", "kitchen", "--step", "2"], "it keeps no trajectories of step 2; it has of steps 3 to 3"),
        (["trajectories", "garden"], "it keeps no trajectories; it has none"),
        (["trajectories", "nobody"], "there is no LoRAExperiment nobody"),
        (["logs", "nobody"], "there is no LoRAExperiment nobody"),
        (["compare", "kitchen", "--metric", "luck"], "none of them has a metric luck; there are: eval_accuracy, loss"),
        (["compare", "kitchen", "--metric", "time"], "none of them has a metric time; there are: eval_accuracy, loss"),
        (["compare", "kitchen", "--metric", "[/y]"], "none of them has a metric [/y]"),
        (["compare", "kitchen", "--plot", "x.gif"], "a plot's name ends in .png, .svg, .pdf"),
    ],
)
def test_what_is_not_there_is_said(
    kube: FakeKube,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    what: str,
) -> None:
    assert run(kube, monkeypatch, *arguments) == 2
    told = capsys.readouterr()
    assert what in told.err
    assert told.out == ""


@pytest.mark.parametrize("arguments", [["--step", "0"], ["--limit", "x"], ["--best", "--worst"]])
def test_arguments_that_make_no_sense(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["trajectories", "kitchen", *arguments])
    assert caught.value.code == 2
    assert arguments[-1].lstrip("-") in capsys.readouterr().err


def test_harmless_text() -> None:
    assert harmless("a\tb\nnaïve 数 🙂") == "a\tb\nnaïve 数 🙂"
    assert harmless("\x1b[31m\r\x07\x9b\u202e\ud800") == "\\x1b[31m\\r\\x07\\x9b\\u202e\\ud800"


# ------------------------------------------------------------------------------------ compare


def test_compare_is_a_table_with_the_course(
    kube: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(kube, monkeypatch, "compare", "kitchen", "garden", "empty") == 0
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines() if "│" in line
    ]
    assert cells == [
        ["kitchen", "Running", "3", "0.5", "0.5", "0.75", "0.25 → 0.875", "3,000", "4.5", "▁▅█"],
        ["garden", "Running", "4", "0.5", "0.5", "0.5", "0.25 → 0.875", "4,000", "4.5", "▅▅▅▅"],
        ["empty", "Running", "0", "", "", "", "", "", "", ""],
    ]


def test_a_plot_is_written(kube: FakeKube, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, begins in (("plot.svg", b"<?xml"), ("plot.png", b"\x89PNG")):
        assert run(kube, monkeypatch, "compare", "kitchen", "garden", "--plot", str(tmp_path / name)) == 0
        assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LookupError, match=r"pip install 'clora\[plot\]'"):
        plot([Course("a", "Running", ({"step": 1, "loss": 1.0},))], "loss", tmp_path / "x.png")


def test_the_drawn_course() -> None:
    assert sparkline([], 0.0, 1.0) == ""
    assert sparkline([0.0, 0.5, 1.0], 0.0, 1.0) == BARS[0] + BARS[4] + BARS[-1]
    assert sparkline([2.0] * 3, 2.0, 2.0) == BARS[0] * 3
    assert len(sparkline([i / 1000 for i in range(1000)], 0.0, 1.0)) == 32


def test_a_step_that_is_being_written_shows_its_finished_groups(kube: FakeKube, tmp_path: Path) -> None:
    path = tmp_path / "storage" / "experiments" / NAMES["kitchen"] / "rollouts" / "00003.jsonl"
    path.write_bytes(path.read_bytes() + b'{"index": 2, "exam')
    before = path.read_bytes()
    assert "4 trajectories" in show(kube, TrajectoryOrder.FIRST)
    assert path.read_bytes() == before

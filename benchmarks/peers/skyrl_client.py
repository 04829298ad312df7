"""The same experiments by SkyRL's Tinker server, as a user of the Tinker SDK writes them. Runs in SkyRL's environment.

    python -m benchmarks.peers.skyrl_client WORK.json

Settings: `url`; `clients`, which train at once, each with a shuffle seed of its own; `state`, the server's path of the
weights to start from. Without a state, one client makes it: it trains on the spec's demonstrations (estimator SFT) and
saves the result.

SkyRL takes the mean over a trajectory's tokens and then over trajectories; the advantages are scaled so that the loss
is the sum over tokens that clora takes. What cannot be made the same: its optimizer clips no gradients.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}  # read at import

import msgspec
import tinker
from tinker import types

from benchmarks.peers.work import Episodes, Events, Work, read_work, step_tokens
from clora_engine import advantages
from clora_engine.data import demonstration
from clora_engine.types import Row

API_KEY = "tml-local"  # the SDK asks for one that begins so; the server asks for none
PAUSE = threading.Lock()  # of the file of events


class Client:
    """One Tinker training run."""

    def __init__(self, index: int, work: Work, events: Events) -> None:
        self._index, self._work, self._events = index, work, events
        self._plan = _with_seed(work, index).plan()
        service = tinker.ServiceClient(base_url=work.settings["url"], api_key=API_KEY)
        state = work.settings["state"]
        self.training = (
            service.create_training_client_from_state(state)
            if state
            else service.create_lora_training_client(
                base_model=work.settings["base_model"], rank=self._plan.lora.rank, train_unembed=False
            )
        )

    def supervised(self) -> str:
        """All steps of supervised training; the server's path of what came of them."""
        plan, count = self._plan, self._plan.spec.algorithm.prompts_per_step
        for step in range(1, plan.spec.max_steps + 1):
            examples = [plan.data.train.example(place) for place in range((step - 1) * count, step * count)]
            shown = [plan.renderer.demonstration(demonstration(example, plan.factory)) for example in examples]
            batch = advantages.sft(shown)
            seconds, tokens = self._train(step, _data(batch.rows, batch.denominator), "cross_entropy", {})
            self._write("supervised", step=step, train_seconds=seconds, trained_tokens=tokens)
        path: str = self.training.save_state("warm-up").result().path
        return path

    def reinforce(self, wait: Callable[[], Any]) -> None:
        """All steps of GRPO; `wait` before each."""
        plan = self._plan
        algorithm = plan.spec.algorithm
        for step in range(1, plan.spec.max_steps + 1):
            wait()
            clock = [time.monotonic()]
            sampler = self.training.save_weights_and_get_sampling_client()
            clock.append(time.monotonic())
            episodes = Episodes(plan, (step - 1) * algorithm.prompts_per_step, self._work.max_context)
            while episodes.open:
                self._turn(sampler, episodes)
            clock.append(time.monotonic())
            groups = episodes.finished()
            batch = advantages.grpo(groups)
            clip = {"clip_low_threshold": float(algorithm.clip_low), "clip_high_threshold": float(algorithm.clip_high)}
            seconds, tokens = self._train(step, _data(batch.rows, batch.denominator), "ppo", clip)
            self._write(
                "step",
                step=step,
                publish_seconds=clock[1] - clock[0],
                rollout_seconds=clock[2] - clock[1],
                train_seconds=seconds,
                trained_tokens=tokens,
                **step_tokens(groups).to_dict(),
            )

    def _turn(self, sampler: tinker.SamplingClient, episodes: Episodes) -> None:
        """A turn of all open episodes: all requests at once, one for each distinct history."""
        alike = defaultdict(list)
        for episode in episodes.open:
            alike[episode.history].append(episode)
        sampling = self._plan.sampling(self._plan.temperature)
        params = types.SamplingParams(
            max_tokens=sampling.max_tokens, temperature=sampling.temperature, stop=list(sampling.stop_token_ids)
        )
        asked = [
            (members, sampler.sample(types.ModelInput.from_ints(list(history)), len(members), params))
            for history, members in alike.items()
        ]
        for members, answer in asked:
            for episode, sequence in zip(members, answer.result().sequences, strict=True):
                episodes.answer(episode, sequence.tokens, sequence.logprobs or [0.0] * len(sequence.tokens))

    def _train(
        self, step: int, data: list[types.Datum], loss: types.LossFnType, config: dict[str, float]
    ) -> tuple[float, int]:
        """Seconds and tokens of forward_backward and optim_step; nothing is done without data."""
        if not data:
            return 0.0, 0
        begun, adam = time.monotonic(), self._plan.adam(step)
        answer = self.training.forward_backward(data, loss, config or None)
        params = types.AdamParams(
            learning_rate=adam.learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        update = self.training.optim_step(params)
        answer.result()
        update.result()
        return time.monotonic() - begun, sum(datum.model_input.length for datum in data)

    def _write(self, event: str, **values: Any) -> None:
        with PAUSE:
            self._events.write(event, client=self._index, **values)


def _with_seed(work: Work, index: int) -> Work:
    data = work.spec["data"]
    return msgspec.structs.replace(
        work, spec=work.spec | {"data": data | {"shuffleSeed": data.get("shuffleSeed", 0) + index}}
    )


def _data(rows: Sequence[Row], denominator: float) -> list[types.Datum]:
    """A datum for every completion; token t of the input predicts token t of the targets."""
    pairs = [(row.prompt, completion) for row in rows for completion in row.completions]
    data = []
    for prompt, completion in pairs:
        ids, before = [*prompt, *completion.ids], [0.0] * (len(prompt) - 1)
        scale = sum(completion.weights) * len(pairs) / denominator
        inputs: dict[str, Any] = {
            "target_tokens": ids[1:],
            "weights": before + completion.weights,
            "logprobs": before + completion.logprobs,
            "advantages": before + [scale * advantage for advantage in completion.advantages],
        }
        data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
    return data


def main() -> None:
    work = read_work(Path(sys.argv[1]))
    count = work.settings["clients"]
    with Path(work.out).open("w") as out, ThreadPoolExecutor(count) as threads:
        events = Events(out)
        events.write("begin")
        clients = list(threads.map(lambda index: Client(index, work, events), range(count)))
        events.write("created")
        if not work.settings["state"]:
            events.write("saved", path=clients[0].supervised())
            return
        together = threading.Barrier(count)
        try:
            for running in [threads.submit(client.reinforce, together.wait) for client in clients]:
                running.result()
        except BaseException:
            together.abort()
            raise
        events.write("end")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the SDK's heartbeat threads would keep it alive

"""What every rank of test_parallel.py does: python -m tests.numerics.parallel_run RANK RANKS RENDEZVOUS SHARD OUT.

Every scenario runs on all ranks with the same calls, and one of them may be made to fail on rank 1 alone. What came of
it is written to OUT as JSON, for each rank.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from clora_engine.adapter_state import EXP_AVG, EXP_AVG_SQ, GRAD, MASTER
from clora_engine.errors import CapacityError
from clora_engine.trainer import Trainer
from clora_engine.trainer_base import BaseModel
from clora_engine.trainer_pass import Request
from clora_engine.trainer_place import FileMeeting
from clora_engine.trainer_ranks import Ranks
from clora_engine.trainer_shard import decoder_layers, shard
from clora_engine.types import AdamParams, ForwardBackwardResult, LoraConfig, Loss, Row
from tests.numerics.tiny import batch, tiny_model, trained_tokens

ADAM = AdamParams(learning_rate=5e-3, eps=1e-5)
BUDGET = 128
TENANTS = {
    "A": LoraConfig(rank=8, alpha=16, seed=1),
    "B": LoraConfig(rank=5, alpha=10, target_modules=("q_proj", "down_proj"), seed=2),
}
LOSSES: dict[str, Any] = {"A": {"name": "PPO", "temperature": 1.2}, "B": {"name": "CrossEntropy"}}
Facts = dict[str, Any]


def trainer_of(ranks: Ranks, **settings: Any) -> Trainer:
    model = tiny_model()
    if ranks.in_step:
        shard(model, ranks, torch.device("cpu"))
    base = BaseModel.wrap(model, gradient_checkpointing=settings.pop("gradient_checkpointing", False))
    options: Facts = {"model_name": "clora/tiny", "max_rank": 8, "host_limit_bytes": 1 << 28, "slots": 2} | settings
    trainer = Trainer(base, tokens_per_microbatch=BUDGET, ranks=ranks, **options)
    for name, config in TENANTS.items():
        trainer.create(name, config)
    return trainer


def request(name: str, seed: int, rows: list[Row] | None = None) -> Request:
    rows = rows or batch(100 * seed + ord(name), rows=3 + seed)
    return Request(name, rows, Loss(denominator=trained_tokens(rows), **LOSSES[name]))


def told(outcome: ForwardBackwardResult | Exception) -> Any:
    if isinstance(outcome, Exception):
        return {"error": str(outcome), "reason": getattr(outcome, "reason", None)}
    return {"loss": outcome.loss, "metrics": outcome.metrics, "adapters": outcome.adapters}


def gradient(trainer: Trainer, name: str) -> list[float]:
    """This rank's part of it."""
    state = trainer.store.sync(name)
    return [] if state.grad_is_zero else state.vectors[GRAD].tolist()


def digest(trainer: Trainer, name: str) -> str:
    state = trainer.store.sync(name)
    vectors = [state.vectors[each].numpy().tobytes() for each in (MASTER, EXP_AVG, EXP_AVG_SQ)]
    return hashlib.sha256(b"".join(vectors) + str(state.step).encode()).hexdigest()


@contextmanager
def failing(
    module: torch.nn.Module, here: bool, when: Callable[[Tensor], bool], error: Exception, *, backward: bool = False
) -> Iterator[None]:
    """The module fails on this rank, if it is `here`, on hidden states, gradients or ids that `when` picks."""

    def fail(_: object, arguments: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        if here and when(arguments[0] if arguments else named["input_ids"]):
            raise error

    def fail_backward(_: object, gradients: Any) -> None:
        if here and when(gradients[0]):
            raise error

    if backward:
        hook = module.register_full_backward_pre_hook(fail_backward)
    else:
        hook = module.register_forward_pre_hook(fail, with_kwargs=True)
    yield
    hook.remove()


def training(ranks: Ranks, **settings: Any) -> Facts:
    """Two steps of two adapters joined, the second of them accumulated over two calls, one with few rows."""
    trainer = trainer_of(ranks, **settings)
    facts: Facts = {"results": [], "norms": []}
    for step in range(2):
        calls = [request(name, step) for name in "AB"]
        facts["results"] += [told(each) for each in trainer.forward_backward_joined(calls)]
        if step == 0:
            facts["gradients"] = {name: gradient(trainer, name) for name in "AB"}
        else:
            few = request("A", 7, batch(7, rows=1, completions=1))
            facts["results"].append(told(trainer.forward_backward("A", few.rows, few.loss)))
        facts["norms"] += [trainer.optim_step(name, ADAM).grad_norm for name in "BA"]
    facts["logprobs"] = trainer.forward("A", batch(5), temperature=0.8)
    facts["digests"] = {name: digest(trainer, name) for name in "AB"}
    facts["masters"] = {name: trainer.store.sync(name).vectors[MASTER].tolist() for name in "AB"}
    return facts


def not_finite(ranks: Ranks) -> Facts:
    """A gradient that is no number on the last rank alone."""
    trainer = trainer_of(ranks)
    trainer.forward_backward_joined([request("A", 0), request("B", 0)])
    before = digest(trainer, "A")
    if ranks.rank == ranks.size - 1:
        trainer.store.swap_in(["A"])[0].buffers[GRAD][3] = float("nan")
    steps = [trainer.optim_step(name, ADAM) for name in "AB"]
    return {"skipped": [step.skipped for step in steps], "same": digest(trainer, "A") == before}


def an_error(ranks: Ranks, layer: str, error: Exception, *, backward: bool = False) -> Facts:
    """`layer` fails on rank 1; then all is well again."""
    trainer = trainer_of(ranks)
    first = request("A", 3)
    trainer.forward_backward("A", first.rows, first.loss)
    before = gradient(trainer, "A")
    module = trainer._base.model.get_submodule(layer)
    with failing(module, ranks.rank == 1, lambda _: True, error, backward=backward):
        outcomes = trainer.forward_backward_joined([request("A", 0), request("B", 0)])
    facts: Facts = {
        "outcomes": [told(each) for each in outcomes],
        "kept": gradient(trainer, "A") == before,
        "clean": trainer.store.state("B").grad_is_zero,
    }
    trainer.optim_step("A", ADAM)
    facts["after"] = [told(each) for each in trainer.forward_backward_joined([request("A", 1), request("B", 1)])]
    return facts


def out_of_memory(ranks: Ranks, most: int) -> Facts:
    """Rank 1 holds `most` positions at once."""
    trainer = trainer_of(ranks)
    error = torch.OutOfMemoryError("the device is full")
    with failing(trainer._base.decoder, ranks.rank == 1, lambda ids: ids.numel() > most, error):
        rows = request("A", 0)
        outcomes = trainer.forward_backward_joined([rows])
    return {"outcomes": [told(each) for each in outcomes], "gradient": gradient(trainer, "A")}


def no_room(ranks: Ranks) -> Facts:
    """Rank 1 cannot take a new adapter."""
    trainer = trainer_of(ranks)
    if ranks.rank == 1:

        def full(*_: object, **__: object) -> Any:
            raise CapacityError("the disk is full")

        trainer.store.new_state = full  # type: ignore[method-assign]
    try:
        trainer.create("C", TENANTS["A"])
    except CapacityError as error:
        return {"error": str(error), "there": "C" in trainer.store}
    return {"error": None, "there": "C" in trainer.store}


def held(ranks: Ranks) -> Facts:
    """Bytes of the decoder layers' parameters: in this rank's memory after a pass, and of the whole model's."""
    trainer = trainer_of(ranks)
    one = request("A", 0)
    trainer.forward_backward("A", one.rows, one.loss)
    parameters = [p for layer in decoder_layers(trainer._base.model) for p in layer.parameters()]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return {
        "here": sum(tensor.untyped_storage().nbytes() for tensor in local),
        "whole": sum(p.numel() * p.element_size() for p in parameters),
    }


def scenarios(ranks: Ranks) -> Facts:
    broken, memory = RuntimeError("a kernel that fails"), torch.OutOfMemoryError("the device is full")
    facts: Facts = {
        "held": held(ranks),
        "training": training(ranks),
        "checkpointed": training(ranks, gradient_checkpointing=True),
        "out_of_memory": out_of_memory(ranks, 100),
        "error in a layer": an_error(ranks, "model.layers.1.mlp", broken),
        "error in the end": an_error(ranks, "model.norm", broken),
        "error backward": an_error(ranks, "model.layers.0.mlp", broken, backward=True),
        "no memory at all": an_error(ranks, "model.layers.1.mlp", memory),
    }
    if not ranks.in_step:
        facts |= {"not_finite": not_finite(ranks), "no_room": no_room(ranks)}
    return facts


def main() -> None:
    rank, size, rendezvous, in_step, out = sys.argv[1:]
    torch.set_num_threads(1)
    meeting = FileMeeting(Path(rendezvous))
    ranks = Ranks.join(int(rank), int(size), meeting, torch.device("cpu"), in_step=in_step == "shard")
    group = torch.distributed.distributed_c10d._get_default_group()
    patience = group._get_backend(torch.device("cpu")).options._timeout  # once they have met
    Path(out).write_text(json.dumps(scenarios(ranks) | {"patience": patience.total_seconds()}))


if __name__ == "__main__":
    main()

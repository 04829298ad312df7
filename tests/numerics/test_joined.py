"""Several adapters in one pass: each as it would be alone, whatever the others are and do."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from clora_engine.adapter_state import GRAD, MASTER, VECTORS
from clora_engine.errors import CapacityError, EngineError, UserError
from clora_engine.trainer import Trainer
from clora_engine.trainer_packing import plain_tokens
from clora_engine.trainer_pass import Request
from clora_engine.types import AdamParams, Completion, ForwardBackwardResult, LoraConfig, Loss, Row
from tests.numerics.test_against_peft import peft_weights, reference_loss
from tests.numerics.tiny import VOCABULARY, batch, completion, tiny_model, tiny_trainer, trained_tokens

ADAM = AdamParams(learning_rate=5e-3, eps=1e-5)
# Ranks of two buckets, one of them padded, and different target modules: all of it in one pass.
TENANTS = {
    "A": LoraConfig(rank=8, alpha=16, seed=1),
    "B": LoraConfig(rank=5, alpha=10, seed=2),
    "C": LoraConfig(rank=16, alpha=16, seed=3),
    "D": LoraConfig(rank=8, alpha=8, target_modules=("q_proj", "down_proj"), seed=4),
}
# No two with the same settings: weight decay or not, clipping or not.
ADAMS = {
    "A": ADAM,
    "B": AdamParams(learning_rate=2e-3, beta1=0.8, beta2=0.99, eps=3e-5, weight_decay=0.05, grad_clip_norm=0.5),
    "C": AdamParams(learning_rate=8e-3, beta1=0.7, beta2=0.9, eps=1e-4, weight_decay=0.2, grad_clip_norm=0.1),
    "D": AdamParams(learning_rate=3e-3, beta1=0.95, beta2=0.97, eps=2e-5, weight_decay=0.01, grad_clip_norm=0.0),
}
LOSSES: dict[str, dict[str, Any]] = {
    "A": {"name": "PPO", "temperature": 1.2},
    "B": {"name": "CrossEntropy"},
    "C": {"name": "CISPO", "clip_high": 1.4, "temperature": 0.7},
    "D": {"name": "DRO", "beta": 0.2},
}


pytestmark = pytest.mark.usefixtures("one_thread")


def trainer_of(names: str, **settings: Any) -> Trainer:
    trainer = tiny_trainer(**({"slots": len(names)} | settings))
    for name in names:
        trainer.create(name, TENANTS[name])
    return trainer


def request(name: str, seed: int = 0, rows: list[Row] | None = None) -> Request:
    rows = rows or batch(100 * seed + ord(name))
    return Request(name, rows, Loss(denominator=trained_tokens(rows), **LOSSES[name]))


def join(trainer: Trainer, requests: list[Request]) -> list[ForwardBackwardResult]:
    """All must succeed."""
    results = []
    for outcome in trainer.forward_backward_joined(requests):
        assert isinstance(outcome, ForwardBackwardResult), outcome
        results.append(outcome)
    return results


def vectors(trainer: Trainer, name: str) -> dict[str, Tensor]:
    state = trainer.store.sync(name)
    return {v: state.vectors[v].clone() for v in VECTORS if not (v == GRAD and state.grad_is_zero)}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("budget", [256, 90], ids=["few-passes", "many-passes"])
def test_four_adapters_with_losses_of_their_own_in_one_pass_equal_each_alone(budget: int) -> None:
    """To the rounding of FP32 sums: gradients to 1e-5 of their norm, weights after 4 steps to 1/200 of the way."""
    joined, alone = trainer_of("ABCD", budget=budget), trainer_of("ABCD", budget=budget, slots=1)
    start = {name: vectors(alone, name)[MASTER] for name in TENANTS}
    for step in range(4):
        results = join(joined, [request(name, step) for name in "CADB"])
        for name, ours in zip("CADB", results, strict=True):
            one = request(name, step)
            theirs = alone.forward_backward(name, one.rows, one.loss)
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-4, abs=1e-5)
            assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-3, abs=1e-4)
            assert (ours.adapters, theirs.adapters) == (4, 1)
            assert ours.plain_tokens == theirs.plain_tokens
            if step == 0:
                a, b = vectors(joined, name)[GRAD], vectors(alone, name)[GRAD]
                assert (a - b).norm() / b.norm() < 1e-5
            assert joined.optim_step(name, ADAM).step == alone.optim_step(name, ADAM).step == step + 1
    for name in TENANTS:
        a, b = vectors(joined, name)[MASTER], vectors(alone, name)[MASTER]
        assert (b - start[name]).abs().max() > 2 * ADAM.learning_rate
        torch.testing.assert_close(a, b, rtol=0, atol=4 * ADAM.learning_rate / 200)


def same_shape(rows: list[Row], seed: int) -> list[Row]:
    """Other tokens, weights and advantages, in rows of the same lengths."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    return [
        Row(
            prompt=ids(len(row.prompt)),
            completions=[
                Completion(
                    ids=ids(len(one.ids)),
                    weights=one.weights,
                    logprobs=[-4.0] * len(one.ids),
                    advantages=[float(seed)] * len(one.ids),
                )
                for one in row.completions
            ],
        )
        for row in rows
    ]


def without_twins(seed: int) -> list[Row]:
    return [row for row in batch(seed, rows=6) if len({tuple(one.ids) for one in row.completions}) == 3]


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_data_and_weights_of_another_change_nothing_bit_for_bit(gradient_checkpointing: bool) -> None:
    """With equal lengths A's numbers do not depend on B's data, nor on B's LoRA being full of NaN."""
    found = []
    for seed, poisoned in ((1, False), (2, False), (3, True)):
        trainer = trainer_of("AB", gradient_checkpointing=gradient_checkpointing)
        if poisoned:
            trainer.store.sync("B").vectors[MASTER].fill_(float("nan"))
        ours = request("A", rows=without_twins(7))
        theirs = request("B", rows=same_shape(without_twins(8), seed))
        result, other = join(trainer, [ours, theirs])
        assert (other.loss != other.loss) == poisoned
        trainer.optim_step("A", ADAM)
        assert trainer.optim_step("B", ADAM).skipped == poisoned
        found.append((result.loss, result.metrics, vectors(trainer, "A")))
    for loss, metrics, state in found[1:]:
        assert (loss, metrics) == found[0][:2]
        assert same_bits(state, found[0][2])


def test_other_lengths_beside_it_change_only_the_last_bits() -> None:
    gradients = []
    for seed in (1, 2):
        trainer = trainer_of("AB")
        join(trainer, [request("A", rows=batch(7)), request("B", rows=batch(seed, rows=2 + 3 * seed))])
        gradients.append(vectors(trainer, "A")[GRAD])
    assert (gradients[0] - gradients[1]).norm() / gradients[0].norm() < 1e-5


def test_a_bad_call_does_not_fail_the_others() -> None:
    trainer, undisturbed = trainer_of("ABC"), trainer_of("AC")
    bad = Request("B", [Row(prompt=[VOCABULARY], completions=[])], Loss(name="PPO", denominator=1.0))
    nobody = Request("nobody", batch(0), Loss(name="PPO", denominator=1.0))
    trainer.slots = 4
    first, wrong, missing, last = trainer.forward_backward_joined([request("A"), bad, nobody, request("C")])
    assert isinstance(wrong, UserError)
    assert isinstance(missing, EngineError)
    assert missing.reason == "AdapterNotFound"
    assert isinstance(first, ForwardBackwardResult)
    assert isinstance(last, ForwardBackwardResult)
    join(undisturbed, [request("A"), request("C")])
    for name in "AC":
        assert same_bits(vectors(trainer, name), vectors(undisturbed, name))
    assert trainer.store.state("B").grad_is_zero


def fails_on(trainer: Trainer, most_tokens: int, error: Exception) -> Any:
    """A device whose memory holds passes of so many positions."""

    def check(_: object, __: object, arguments: dict[str, Tensor]) -> None:
        if arguments["input_ids"].numel() > most_tokens:
            raise error

    return trainer._base.decoder.register_forward_pre_hook(check, with_kwargs=True)


@pytest.mark.parametrize("pending", [False, True], ids=["first", "accumulating"])
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("the device is full"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
    ids=["device", "host"],
)
def test_out_of_memory_splits_what_can_be_split_and_fails_what_cannot(error: Exception, pending: bool) -> None:
    trainer, undisturbed = trainer_of("AB"), trainer_of("AB", budget=48)
    long = [Row(prompt=[1] * 60, completions=batch(1)[0].completions)]
    for each in (trainer, undisturbed):
        if pending:
            each.forward_backward("A", batch(9), request("A").loss)
            each.forward_backward("B", batch(9), request("B").loss)
    before = vectors(trainer, "B")
    hook = fails_on(trainer, 48, error)
    fits, too_long = trainer.forward_backward_joined([request("A"), request("B", rows=long)])
    hook.remove()
    assert isinstance(fits, ForwardBackwardResult)
    assert fits.adapters == 1
    assert isinstance(too_long, CapacityError)
    assert too_long.reason == "TrainerOutOfMemory"
    assert "gradientCheckpointing" in str(too_long)
    assert same_bits(vectors(trainer, "B"), before)
    undisturbed.forward_backward("A", *_call(request("A")))
    a, b = vectors(trainer, "A")[GRAD], vectors(undisturbed, "A")[GRAD]
    assert (a - b).norm() / b.norm() < 1e-5, "micro-batches of another size, the same gradient"


def _call(one: Request) -> tuple[Any, Loss]:
    return one.rows, one.loss


def test_a_bug_in_a_joined_pass_leaves_nothing_and_every_call_is_made_alone() -> None:
    trainer, undisturbed = trainer_of("AB"), trainer_of("AB")
    passes = 0

    def fail_twice(*_: object) -> None:
        nonlocal passes
        passes += 1
        if passes <= 2:
            raise RuntimeError("a kernel that fails")

    trainer._base.decoder.register_forward_pre_hook(fail_twice)
    first, second = trainer.forward_backward_joined([request("A"), request("B")])
    assert isinstance(first, RuntimeError), "it fails alone too"
    assert isinstance(second, ForwardBackwardResult)
    assert trainer.store.state("A").grad_is_zero
    undisturbed.forward_backward("B", *_call(request("B")))
    assert same_bits(vectors(trainer, "B"), vectors(undisturbed, "B"))


def test_slots_that_are_idle_do_not_move() -> None:
    trainer = trainer_of("ABCD")
    join(trainer, [request(name) for name in "ABCD"])
    trainer.optim_step("B", ADAM)
    before = {name: vectors(trainer, name) for name in "ACD"}
    join(trainer, [request("B", 1)])
    trainer.optim_step("B", ADAM)
    for name, state in before.items():
        assert same_bits(vectors(trainer, name), state)
        assert trainer.store.state(name).step == 0


def test_more_adapters_than_slots_take_turns() -> None:
    trainer, undisturbed = trainer_of("ABCD", slots=2), trainer_of("ABCD", slots=4)
    for step in range(2):
        for pair in ("AB", "CD"):
            for each in (trainer, undisturbed):
                join(each, [request(name, step) for name in pair])
        for name in "DCBA":
            for each in (trainer, undisturbed):
                each.optim_step(name, ADAM)
    for name in TENANTS:
        assert same_bits(vectors(trainer, name), vectors(undisturbed, name))


def test_a_higher_rank_in_the_slot_of_a_deleted_adapter_finds_nothing_of_it() -> None:
    trainer, fresh = trainer_of("BD", slots=2), tiny_trainer(slots=2)
    join(trainer, [request("B"), request("D")])
    trainer.optim_step("B", ADAM)
    join(trainer, [request("B", 1), request("D", 1)])
    slots = list(trainer.store._slots)
    trainer.delete("B")
    assert [slot.owner for slot in slots] == [None, "D"]
    assert not any(buffer.any() for buffer in slots[0].buffers.values())
    for each in (trainer, fresh):
        each.create("C", TENANTS["C"])
        each.forward_backward("C", *_call(request("C")))
        each.optim_step("C", ADAM)
    assert slots[0].owner == "C"
    assert same_bits(vectors(trainer, "C"), vectors(fresh, "C"))


def _silent(row: Row) -> Row:
    """The same row, and nothing of it to train on."""
    completions = [
        Completion(ids=one.ids, weights=[0.0] * len(one.ids), logprobs=one.logprobs, advantages=one.advantages)
        for one in row.completions
    ]
    return Row(prompt=row.prompt, completions=completions)


def test_rows_without_any_weight_are_not_computed() -> None:
    """Zero weights change nothing, to the last bit."""
    silent = [_silent(row) for row in batch(5)]
    with_them, without = trainer_of("A"), trainer_of("A")
    loss = request("A").loss
    ours = with_them.forward_backward("A", [*batch(1), *silent], loss)
    theirs = without.forward_backward("A", batch(1), loss)
    assert (ours.loss, ours.metrics, ours.tokens) == (theirs.loss, theirs.metrics, theirs.tokens)
    assert same_bits(vectors(with_them, "A"), vectors(without, "A"))


def test_a_call_without_any_weight_is_refused_and_moves_nothing() -> None:
    trainer = trainer_of("AB")
    trainer.forward_backward("A", *_call(request("A")))
    trainer.optim_step("A", ADAM)
    join(trainer, [request("A", 1), request("B")])
    before = vectors(trainer, "A")
    assert all(before[name].any() for name in VECTORS), "a gradient is pending"
    silent = [_silent(row) for row in batch(2)]
    nothing = Request("A", silent, Loss(name="PPO", denominator=1.0))
    with pytest.raises(UserError, match="no token of the batch has a weight") as caught:
        trainer.forward_backward("A", *_call(nothing))
    assert caught.value.field == "rows"
    assert same_bits(vectors(trainer, "A"), before)
    refused, made = trainer.forward_backward_joined([nothing, request("B", 1)])
    assert (type(refused), type(made)) == (UserError, ForwardBackwardResult)
    assert same_bits(vectors(trainer, "A"), before)
    assert trainer.optim_step("A", ADAM).step == 2


def test_every_tenant_starts_from_its_own_seed() -> None:
    trainer = trainer_of("A")
    for name, seed in (("other", 9), ("again", 1)):
        trainer.create(name, LoraConfig(rank=8, alpha=16, seed=seed))
    first, other, again = (vectors(trainer, name)[MASTER] for name in ("A", "other", "again"))
    assert not torch.equal(first, other)
    assert torch.equal(first, again), "the seed decides, and nothing else"


rows_of_any_shape = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 10), min_size=1, max_size=4)), min_size=1, max_size=5
)


@settings(deadline=None, max_examples=15)
@given(shapes=st.lists(rows_of_any_shape, min_size=2, max_size=4), budget=st.sampled_from([32, 64, 256]))
def test_rows_of_any_shape_in_one_pass_equal_each_alone(shapes: list[list[tuple[int, list[int]]]], budget: int) -> None:
    names = "ABCD"[: len(shapes)]
    joined, alone = trainer_of(names, budget=budget), trainer_of(names, budget=budget, slots=1)
    rng = random.Random(len(shapes))
    requests = []
    for name, rows in zip(names, shapes, strict=True):
        made = [
            Row(
                prompt=[rng.randrange(VOCABULARY) for _ in range(prompt)],
                completions=[completion(rng, length) for length in lengths],
            )
            for prompt, lengths in rows
        ]
        requests.append(request(name, rows=made))
    results = join(joined, requests)
    for one, result in zip(requests, results, strict=True):
        assert result.loss == pytest.approx(alone.forward_backward(one.adapter, *_call(one)).loss, rel=1e-4, abs=1e-5)
        a, b = vectors(joined, one.adapter)[GRAD], vectors(alone, one.adapter)[GRAD]
        assert (a - b).norm() <= 2e-5 * b.norm()


def test_four_adapters_in_one_pass_equal_peft_with_adamw(tmp_path: Path) -> None:
    """Each with settings of its own against a PEFT model and a torch optimizer with the same, weights to 1/200 of the
    way (test_against_peft)."""
    trainer, peers = trainer_of("ABCD"), {}
    for name in "ABCD":
        trainer.save(name, tmp_path / name, optimizer=False)
        peer = PeftModel.from_pretrained(tiny_model(), tmp_path / name, is_trainable=True)
        parameters = [p for p in peer.parameters() if p.requires_grad]
        adam = ADAMS[name]
        optimizer = torch.optim.AdamW(
            parameters,
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        peers[name] = peer, parameters, optimizer
    for step in range(4):
        requests = [request(name, step) for name in "ABCD"]
        for one, ours in zip(requests, join(trainer, requests), strict=True):
            peer, parameters, optimizer = peers[one.adapter]
            adam = ADAMS[one.adapter]
            theirs = reference_loss(peer, list(one.rows), one.loss)
            theirs.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, adam.grad_clip_norm or math.inf)
            optimizer.step()
            optimizer.zero_grad()
            assert ours.loss == pytest.approx(float(theirs.detach()), rel=1e-4, abs=1e-5)
            assert trainer.optim_step(one.adapter, adam).grad_norm == pytest.approx(float(norm), rel=1e-3)
    for name in "ABCD":
        trainer.save(name, tmp_path / f"{name}-end", optimizer=False)
        saved, wanted = load_file(tmp_path / f"{name}-end" / "adapter_model.safetensors"), peft_weights(peers[name][0])
        assert saved.keys() == wanted.keys()
        for key, tensor in saved.items():
            torch.testing.assert_close(tensor, wanted[key], rtol=0, atol=4 * ADAMS[name].learning_rate / 200)


def test_a_gradient_that_was_pending_is_added_to() -> None:
    joined, alone = trainer_of("AB"), trainer_of("AB")
    for each in (joined, alone):
        each.forward_backward("A", *_call(request("A", 1)))
    join(joined, [request("A", 2), request("B")])
    alone.forward_backward("A", *_call(request("A", 2)))
    a, b = vectors(joined, "A")[GRAD], vectors(alone, "A")[GRAD]
    assert (a - b).norm() / b.norm() < 1e-5


def test_an_evicted_adapter_is_scaled_once() -> None:
    trainer = trainer_of("ABD", slots=1)
    for name in "ABD":
        trainer.forward_backward(name, *_call(request(name)))
        trainer.optim_step(name, ADAM)
        if name == "B":
            assert trainer.store._slots[0].owner == "B"
            before = trainer.forward("B", batch(3))  # still live, and never written back
    trainer.forward("A", batch(3))
    trainer.forward("D", batch(3))
    assert trainer.forward("B", batch(3)) == before


def test_gradient_checkpointing_keeps_less_and_changes_no_bit() -> None:
    gradients, kept = [], []
    for checkpointing in (False, True):
        trainer = trainer_of("AB", gradient_checkpointing=checkpointing)
        bytes_kept = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal bytes_kept
            bytes_kept += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            join(trainer, [request("A"), request("B")])
        kept.append(bytes_kept)
        gradients.append([vectors(trainer, name) for name in "AB"])
    assert kept[1] < kept[0] / 3
    assert all(same_bits(plain, checkpointed) for plain, checkpointed in zip(*gradients, strict=True))


def test_attention_and_shared_experts_of_a_mixture_of_experts_are_trained_and_routed_ones_refused() -> None:
    joined, alone = (tiny_trainer("qwen2-moe", slots=slots) for slots in (2, 1))
    for trainer in (joined, alone):
        for name in "AB":
            trainer.create(name, TENANTS[name])
    (module,) = {m.name for m in joined._base.modules if m.name.endswith("0.mlp.shared_expert.up_proj")}
    requests = [request(name) for name in "AB"]
    for one, ours in zip(requests, join(joined, requests), strict=True):
        assert ours.loss == pytest.approx(alone.forward_backward(one.adapter, *_call(one)).loss, rel=1e-4, abs=1e-5)
        state = alone.store.sync(one.adapter)
        assert state.layout.matrices(state.vectors[GRAD])[module][1].any()
        assert (vectors(joined, one.adapter)[GRAD] - state.vectors[GRAD]).norm() < 1e-4 * state.vectors[GRAD].norm()
    with pytest.raises(UserError, match=r"'experts' matches no linear layer of the base model; it has .*up_proj"):
        joined.create("C", LoraConfig(rank=8, alpha=8, target_modules=("experts",)))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("DefaultCPUAllocator: full")])
def test_log_probs_too_are_computed_in_pieces_when_memory_runs_out(error: Exception) -> None:
    trainer = trainer_of("A")
    expected = trainer.forward("A", batch(3))
    hook = fails_on(trainer, 48, error)
    found = trainer.forward("A", batch(3))
    with pytest.raises(CapacityError, match="gradientCheckpointing") as caught:
        trainer.forward("A", [Row(prompt=[1] * 60, completions=batch(1)[0].completions)])
    hook.remove()
    assert caught.value.reason == "TrainerOutOfMemory"
    for row, same in zip(found, expected, strict=True):
        for ours, theirs in zip(row, same, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)


def test_memory_that_holds_what_is_trained_is_enough() -> None:
    """A long completion without weight is never computed, so it does not say how small micro-batches may be."""
    trainer = trainer_of("A")
    rows = batch(3)
    idle = Completion(ids=[1] * 60, weights=[0.0] * 60, logprobs=[0.0] * 60, advantages=[0.0] * 60)
    rows.append(Row(prompt=[1] * 4, completions=[idle]))
    hook = fails_on(trainer, 48, torch.OutOfMemoryError("full"))
    done = trainer.forward_backward("A", rows, Loss(name="CrossEntropy", denominator=1.0))
    hook.remove()
    assert done.plain_tokens == plain_tokens(rows)

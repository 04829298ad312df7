"""The AdapterStore by itself: swaps, what is copied back, limits and deletion."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clora_engine.adapter_state import EXP_AVG, GRAD, MASTER, VECTORS
from clora_engine.errors import CapacityError, EngineError
from clora_engine.lora import Layout, ModuleShape, rank_bucket
from clora_engine.store import AdapterStore, Slot
from clora_engine.types import LoraConfig

MODULES = (ModuleShape("x", 6, 4), ModuleShape("y", 8, 8))
FEW = MODULES[:1]


def store(limit: int = 1 << 20, *, slots: int = 1, spill: Path | None = None) -> AdapterStore:
    return AdapterStore(
        device=torch.device("cpu"),
        slots=slots,
        slot_floats=Layout(MODULES, 16).numel,
        host_limit_bytes=limit,
        spill_directory=spill,
    )


def add(
    adapters: AdapterStore, name: str, value: float, rank: int = 8, modules: tuple[ModuleShape, ...] = MODULES
) -> None:
    state = adapters.new_state(LoraConfig(rank=rank, alpha=16), Layout(modules, rank_bucket(rank)))
    for position, vector in enumerate(state.vectors.values()):
        vector.fill_(value + position / 10)
    state.grad_is_zero = False
    adapters.put(name, state)


def test_swapping_in_fills_the_slot_and_swapping_out_returns_what_changed() -> None:
    adapters = store()
    add(adapters, "a", 1.0)
    add(adapters, "b", 2.0)
    (slot,) = adapters.swap_in(["a"])
    assert [float(slot.buffers[name][0]) for name in VECTORS] == pytest.approx([1.0, 1.1, 1.2, 1.3])
    slot.buffers[MASTER].fill_(5.0)
    slot.buffers[EXP_AVG].fill_(6.0)
    slot.dirty.add(MASTER)  # EXP_AVG is not said to have changed, so it must not come back
    assert adapters.swap_in(["b"]) == [slot]
    assert slot.owner == "b"
    assert not slot.dirty
    back = adapters.state("a").vectors
    assert (back[MASTER] == 5.0).all()
    assert (back[EXP_AVG] == torch.tensor(1.2)).all()
    assert (slot.buffers[MASTER][: Layout(MODULES, 8).numel] == 2.0).all()


def test_an_adapter_that_is_in_stays_in() -> None:
    adapters = store()
    add(adapters, "a", 1.0)
    (slot,) = adapters.swap_in(["a"])
    slot.buffers[MASTER].fill_(5.0)
    assert adapters.swap_in(["a"]) == [slot]
    assert (slot.buffers[MASTER] == 5.0).all()


def test_a_zero_gradient_is_zeroed_rather_than_copied() -> None:
    adapters = store()
    add(adapters, "a", 1.0)
    add(adapters, "b", 2.0)
    adapters.state("b").grad_is_zero = True
    adapters.swap_in(["a"])
    assert not adapters.swap_in(["b"])[0].buffers[GRAD].any()


def test_fewer_modules_leave_no_tail_of_the_tenant_before() -> None:
    adapters = store()
    add(adapters, "a", 1.0)
    add(adapters, "few", 3.0, modules=FEW)
    adapters.swap_in(["a"])
    (slot,) = adapters.swap_in(["few"])
    used = Layout(FEW, 8).numel
    for buffer in slot.buffers.values():
        assert (buffer[:used] >= 3.0).all()
        assert not buffer[used:].any()


def test_adapters_of_one_pass_have_slots_of_their_own_whatever_their_ranks() -> None:
    adapters = store(slots=2)
    add(adapters, "a", 1.0, rank=8)
    add(adapters, "b", 2.0, rank=12)
    add(adapters, "c", 3.0, rank=8)
    first, second = adapters.swap_in(["a", "b"])
    assert (first.owner, second.owner) == ("a", "b")
    second.buffers[MASTER].add_(0.5)
    second.dirty.add(MASTER)
    assert adapters.swap_in(["a"]) == [first], "the latest used"
    assert adapters.swap_in(["c"]) == [second], "of the one that was not used for longest"
    assert (second.buffers[MASTER][: Layout(MODULES, 8).numel] == 3.0).all()
    assert not second.buffers[MASTER][Layout(MODULES, 8).numel :].any()
    assert (adapters.sync("b").vectors[MASTER] == 2.5).all()


def test_gradients_of_the_leaves_lie_in_the_flat_gradient() -> None:
    adapters = store()
    add(adapters, "a", 1.0)
    adapters.state("a").grad_is_zero = True
    (slot,) = adapters.swap_in(["a"])
    layout = adapters.state("a").layout
    a, b = slot.matrices(layout)["y"]
    for _ in range(2):
        (2 * a.sum() + 3 * b.sum()).backward()
    views = layout.matrices(slot.buffers[GRAD])
    assert (views["y"][0] == 4.0).all()
    assert (views["y"][1] == 6.0).all()
    assert not views["x"][0].any()
    assert slot.buffers[GRAD].sum() == 4 * a.numel() + 6 * b.numel()


def test_deleting_zeroes_the_slot_and_frees_the_name() -> None:
    adapters = store()
    add(adapters, "a", 1.0)
    (slot,) = adapters.swap_in(["a"])
    adapters.delete("a")
    assert "a" not in adapters
    assert slot.owner is None
    assert not any(buffer.any() for buffer in slot.buffers.values())
    with pytest.raises(EngineError, match="no adapter 'a'") as caught:
        adapters.swap_in(["a"])
    assert caught.value.reason == "AdapterNotFound"


def test_replacing_an_adapter_that_is_in_its_slot() -> None:
    adapters = store()
    add(adapters, "a", 1.0)
    adapters.swap_in(["a"])[0].dirty.add(MASTER)
    add(adapters, "a", 2.0)
    assert (adapters.sync("a").vectors[MASTER] == 2.0).all()
    assert (adapters.swap_in(["a"])[0].vector(MASTER, Layout(MODULES, 8)) == 2.0).all()


def test_the_host_limit() -> None:
    one = 4 * 4 * Layout(MODULES, 8).numel
    adapters = store(limit=2 * one)
    add(adapters, "a", 1.0)
    add(adapters, "b", 2.0)
    assert adapters.host_bytes == 2 * one
    config, layout = LoraConfig(rank=8, alpha=8), Layout(MODULES, 8)
    with pytest.raises(CapacityError, match=f"{2 * one} of {2 * one} are taken"):
        adapters.new_state(config, layout)
    adapters.new_state(config, layout, replacing="a")  # its memory will be free
    adapters.delete("b")
    adapters.new_state(config, layout)


def test_device_memory_is_asked_for_before_any_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = store(slots=2)
    for name in "abc":
        add(adapters, name, 1.0)

    def full(*_: object) -> Slot:
        raise torch.OutOfMemoryError("the device is full")

    monkeypatch.setattr(Slot, "allocate", full)
    adapters.swap_in(["a"])
    assert len({id(slot) for slot in adapters.swap_in(["b", "c"])}) == 2
    with pytest.raises(torch.OutOfMemoryError):
        adapters.slots = 3


@pytest.mark.parametrize("of_pass", [["a", "b"], ["c", "d"]])
def test_after_a_pass_its_adapters_may_be_spilled_for_any_other(tmp_path: Path, of_pass: list[str]) -> None:
    one = 4 * 4 * Layout(MODULES, 8).numel
    adapters = store(limit=2 * one, slots=2, spill=tmp_path)
    for value, name in enumerate("abcd"):
        add(adapters, name, float(value))
    for slot in adapters.swap_in(of_pass):
        slot.buffers[MASTER].add_(0.5)
        slot.dirty.add(MASTER)
    for value, name in enumerate("abcd"):
        expected = value + (0.5 if name in of_pass else 0.0)
        assert (adapters.sync(name).vectors[MASTER] == expected).all(), "as to be saved"
    assert [slot.owner for slot in adapters.swap_in(of_pass)] == of_pass

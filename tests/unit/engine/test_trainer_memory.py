"""What a trainer takes is known before it is loaded, and an engine that does not fit says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from clora_engine.adapter_files import BaseShapes
from clora_engine.errors import UserError
from clora_engine.trainer_memory import MemoryPlan, host_memory
from clora_engine.types import LoraConfig
from tests.numerics.tiny import tiny_model, tiny_trainer

GIB = 1 << 30
PLAN = MemoryPlan(base=8 * GIB, adapter=GIB, slots=5, store=10 * GIB)


def test_the_plan_is_what_the_trainer_then_takes(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    settings = {"bytes_per_parameter": 4, "max_rank": 20, "host_limit": GIB}
    plan = MemoryPlan.of(BaseShapes.of_model(tmp_path), slots=2, adapters=3, **settings)
    assert plan.base == sum(p.numel() * p.element_size() for p in tiny_model().parameters())
    trainer = tiny_trainer(max_rank=20, slots=2)
    for name in ("a", "b"):
        assert trainer.create(name, LoraConfig(rank=20, alpha=8)).host_bytes == plan.adapter
    slots = trainer.store.swap_in(["a", "b"])
    assert plan.device - plan.base == sum(b.numel() * 4 for slot in slots for b in slot.buffers.values())
    for name in ("a", "b"):
        trainer.save(name, tmp_path / name, optimizer=False)
        trainer.load(f"{name}/start", tmp_path / name, optimizer=False, frozen=True)
    assert plan.store == trainer.store.host_bytes // 2 * 3, "three experiments, each with the start of its KL term"


def test_a_sharded_base_model_takes_its_part_and_its_ends(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    settings = {"bytes_per_parameter": 2, "max_rank": 8, "host_limit": GIB, "slots": 1, "adapters": 1}
    shapes = BaseShapes.of_model(tmp_path)
    model = tiny_model()
    ends = model.get_input_embeddings().weight.numel() + model.get_output_embeddings().weight.numel()
    assert shapes.ends == ends
    whole, quarter = (MemoryPlan.of(shapes, shards=shards, **settings).base for shards in (1, 4))
    assert quarter - 2 * ends == pytest.approx((whole - 2 * ends) / 4, abs=2)


def test_a_sampler_on_the_same_host_takes_its_copies_and_its_kv_cache(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    settings = {"bytes_per_parameter": 4, "max_rank": 8, "slots": 1, "adapters": 1, "host_limit": GIB}
    shapes = BaseShapes.of_model(tmp_path)
    alone = MemoryPlan.of(shapes, **settings)
    beside = MemoryPlan.of(shapes, sampler_copies=2, sampler_kv=2 * GIB, **settings)
    whole = sum(p.numel() * p.element_size() for p in tiny_model().parameters())
    assert (beside.sampler_base, beside.sampler_kv) == (2 * whole, 2 * GIB)
    needed = alone.device + alone.store + 2 * whole + 2 * GIB
    beside.check(device_free=None, host_free=needed)
    words = (
        r"and the sampler 0\.\d\d GiB for its base model and 2\.00 GiB for its KV cache: set or lower sampler.kvCache"
    )
    with pytest.raises(UserError, match=words):
        beside.check(device_free=None, host_free=needed - 1)
    # A trainer on a GPU needs the host for its adapters alone, the sampler as much as ever.
    on_gpu = needed - alone.device
    beside.check(device_free=alone.device, host_free=on_gpu)
    with pytest.raises(UserError, match=words):
        beside.check(device_free=alone.device, host_free=on_gpu - 1)
    # Each of several processes answers for its part.
    assert MemoryPlan.of(shapes, sampler_copies=2, sampler_kv=2 * GIB, processes=2, **settings).beside == (
        alone.store + whole + GIB
    )


def test_what_fits_is_accepted() -> None:
    PLAN.check(device_free=13 * GIB, host_free=10 * GIB)
    PLAN.check(device_free=None, host_free=23 * GIB)


@pytest.mark.parametrize(
    ("device_free", "host_free", "words"),
    [
        (12 * GIB, 99 * GIB, r"GPU has 12\.00 GiB free, .* 8\.00 GiB for the base model and 5 x 1\.00 GiB"),
        (13 * GIB, 9 * GIB, r"9\.00 GiB of memory are free, .* needs 10\.00 GiB for adapters: lower"),
        (None, 22 * GIB, r"22\.00 GiB of memory are free, .* for adapters beside 8\.00 GiB for the base model"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(device_free: int | None, host_free: int, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        PLAN.check(device_free=device_free, host_free=host_free)
    assert caught.value.field is not None


def test_a_host_limit_below_one_adapter_is_refused() -> None:
    with pytest.raises(UserError, match=r"takes 1\.00 GiB, and the trainer's host limit is 0\.50 GiB"):
        MemoryPlan(base=0, adapter=GIB, slots=1, store=GIB // 2).check(device_free=None, host_free=99 * GIB)


def test_a_host_limit_below_the_adapters_of_a_pass_is_refused() -> None:
    base = BaseShapes(vocabulary=1, parameters=0, ends=0, linear={"x": (1 << 10, 1 << 10)})

    def plan(limit: int, slots: int, adapters: int) -> MemoryPlan:
        return MemoryPlan.of(base, bytes_per_parameter=4, max_rank=8, slots=slots, adapters=adapters, host_limit=limit)

    one = plan(GIB, 1, 1).adapter
    with pytest.raises(UserError, match=r"3 of them are used at once, .* lower capacity.maxRank or trainer.slots"):
        plan(3 * one - 1, 3, 8).check(device_free=None, host_free=99 * GIB)
    plan(3 * one, 3, 8).check(device_free=None, host_free=99 * GIB)
    plan(one, 3, 1).check(device_free=None, host_free=99 * GIB)  # more slots than there will ever be adapters
    assert plan(3 * one, 1, 8).slots_that_fit(8, device_free=99 * GIB, share=0.25) == 3


@pytest.mark.parametrize(("free", "slots"), [(9 * GIB, 1), (16 * GIB, 2), (28 * GIB, 5), (99 * GIB, 8)])
def test_slots_that_fit(free: int, slots: int) -> None:
    assert PLAN.slots_that_fit(8, device_free=free, share=0.25) == slots


def test_a_containers_memory_is_not_more_than_the_machines() -> None:
    total, available = host_memory()
    assert 0 < available <= total

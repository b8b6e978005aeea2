"""The host tier of both backends: bytes come back as they went, and a preempted request goes on as if nothing was."""

import pytest

from services.common.clock import ManualClock
from services.common.errors import EngineError, InvariantError
from services.scheduler.core import SamplingParams
from services.worker.host_costs import measure_host_costs
from services.worker.loaded_model import LoadedModel
from services.worker.plan import BatchPlan, BlockCopy, BlockId, CopyDirection, Handle, NewRequest, ScheduledRow
from services.worker.plan import SamplingParams as WorkerSamplingParams
from tests.core_mesh import CoreMesh, Sizes
from tests.unit.worker.native_models import BLOCK_SIZE, load, write_model

TO_HOST, TO_DEVICE = CopyDirection.TO_HOST, CopyDirection.TO_DEVICE
NUM_OUTPUTS = 40
PROMPTS = [list(range(start, start + 18)) for start in (3, 20, 40)]
SEEDED = [SamplingParams(temperature=0.9, seed=seed) for seed in range(3)]
SWAP = {"swap_space_gib": 0.001}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("host-tier"), "qwen3")


@pytest.fixture(scope="module", params=["native-float32", "native-bfloat16", "torch-float32"])
def loaded(path, request) -> LoadedModel:
    backend, dtype = request.param.split("-")
    return load(path, backend=backend, dtype=dtype, **SWAP)


def copy_plan(*copies: tuple[CopyDirection, int, int]) -> BatchPlan:
    return BatchPlan(
        1, block_copies=tuple(BlockCopy(direction, BlockId(block), slot) for direction, block, slot in copies)
    )


def run_prompt(runner, handle: int, block_ids: tuple[int, ...], num_computed_tokens: int = 0) -> int:
    """Run a prompt of two blocks and a token; return the token after it."""
    token_ids = tuple(range(3, 3 + 2 * BLOCK_SIZE + 1))
    request = NewRequest(
        Handle(handle),
        "r",
        token_ids,
        len(token_ids),
        WorkerSamplingParams(temperature=0.0),
        tuple(map(BlockId, block_ids)),
        num_computed_tokens,
    )
    row = ScheduledRow(Handle(handle), len(token_ids) - num_computed_tokens, is_sampling=True)
    result = runner.execute(BatchPlan(1, (request,), (row,), finished_handles=()))
    runner.execute(BatchPlan(1, finished_handles=(Handle(handle),)))
    return result.sampled[0].token_id


def test_restored_blocks_hold_what_was_offloaded(loaded):
    runner = loaded.runner
    expected = run_prompt(runner, 1, (1, 2, 3))
    runner.execute(copy_plan((TO_HOST, 1, 5), (TO_HOST, 2, 0)))
    run_prompt(runner, 2, (2, 1, 3))  # overwrites them
    runner.execute(copy_plan((TO_DEVICE, 6, 5), (TO_DEVICE, 4, 0)))
    assert run_prompt(runner, 3, (6, 4, 3), num_computed_tokens=2 * BLOCK_SIZE) == expected


def test_copies_take_effect_in_order_when_a_slot_is_used_twice(loaded):
    runner = loaded.runner
    expected = run_prompt(runner, 1, (1, 2, 3))
    runner.execute(copy_plan((TO_HOST, 3, 0), (TO_HOST, 1, 0), (TO_DEVICE, 5, 0), (TO_HOST, 2, 0), (TO_DEVICE, 6, 0)))
    assert run_prompt(runner, 2, (5, 6, 3), num_computed_tokens=2 * BLOCK_SIZE) == expected


@pytest.mark.parametrize(
    "copy", [(TO_HOST, 0, 0), (TO_HOST, 1 << 20, 0), (TO_DEVICE, 1, 1 << 20)], ids=["null", "block", "slot"]
)
def test_plan_is_refused_whole_when_a_copy_names_what_does_not_exist(loaded, copy):
    with pytest.raises(InvariantError):
        loaded.runner.execute(copy_plan((TO_HOST, 1, 0), copy))


def test_plan_with_copies_is_refused_without_host_memory(path):
    runner = load(path, dtype="float32").runner
    with pytest.raises(InvariantError):
        runner.execute(copy_plan((TO_HOST, 1, 0)))


@pytest.mark.parametrize("sampling", [(), SEEDED], ids=["greedy", "seeded"])
def test_tokens_are_the_same_alone_after_recompute_and_after_swap(loaded, sampling):
    alone = []
    for index, prompt in enumerate(PROMPTS):
        mesh = CoreMesh(loaded.runner, Sizes(block_size=BLOCK_SIZE, num_blocks=10))
        alone += mesh.generate([prompt], NUM_OUTPUTS, sampling[index : index + 1])
    recompute = CoreMesh(loaded.runner, Sizes(block_size=BLOCK_SIZE, num_blocks=7))
    assert recompute.generate(PROMPTS, NUM_OUTPUTS, sampling) == alone
    assert recompute.num_preemptions > 0
    swap = CoreMesh(loaded.runner, Sizes(block_size=BLOCK_SIZE, num_blocks=7, num_host_blocks=loaded.num_host_blocks))
    assert swap.generate(PROMPTS, NUM_OUTPUTS, sampling) == alone
    assert swap.num_preemptions > 0
    assert swap.usage.num_restored > 0


def test_costs_are_measured_through_plans_and_leave_nothing_behind(loaded):
    class Clock(ManualClock):
        def monotonic_s(self) -> float:
            self.advance(0.5)
            return super().monotonic_s()

    costs = measure_host_costs(
        loaded.runner,
        Clock(),
        max_num_tokens=64,
        num_blocks=loaded.num_blocks,
        num_host_blocks=loaded.num_host_blocks,
        block_size=BLOCK_SIZE,
    )
    assert costs.block_restore_us == pytest.approx(0.5e6 / 4)
    assert costs.token_prefill_us == pytest.approx(0.5e6 / 64)
    assert loaded.runner.num_requests == 0


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"backend": "torch", "dtype": "bfloat16"}])
def test_compressed_tier_holds_nearly_twice_as_many_blocks_and_requests_still_end(path, options):
    plain, compressed = (load(path, **options, **SWAP, swap_compression=name) for name in ("none", "int8"))
    # 16 numbers of two bytes against 16 of one and a scale of four
    assert compressed.num_host_blocks / plain.num_host_blocks == pytest.approx(32 / 20, rel=0.02)
    mesh = CoreMesh(
        compressed.runner, Sizes(block_size=BLOCK_SIZE, num_blocks=7, num_host_blocks=compressed.num_host_blocks)
    )
    assert [len(output) for output in mesh.generate(PROMPTS, NUM_OUTPUTS)] == [NUM_OUTPUTS] * len(PROMPTS)
    assert mesh.usage.num_restored > 0


def test_compression_is_refused_where_the_engine_pads_heads(tmp_path):
    path = write_model(tmp_path, head_dim=8)
    with pytest.raises(EngineError, match="needs heads that the engine does not pad"):
        load(path, dtype="bfloat16", **SWAP, swap_compression="int8")


def test_swap_space_that_holds_no_block_is_refused(path):
    with pytest.raises(EngineError, match="a block takes 8192 bytes"):
        load(path, dtype="float32", swap_space_gib=1e-6)

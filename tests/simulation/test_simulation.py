"""Two thousand worlds, each from its first arrival to its rest. ``scripts/simulate`` runs more of them."""

import pytest

from services.kv_cache.core.prefix_hash import sha256
from tests.simulation.simulation import Simulation

SEEDS_PER_TEST = 50


def run_seed(seed: int, **options: object) -> Simulation:
    simulation = Simulation(seed, **options)  # type: ignore[arg-type]
    try:
        simulation.run()
    except Exception as error:
        error.add_note(f"replay: scripts/simulate --seeds 1 --start {seed}")
        raise
    return simulation


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(0, 2000, SEEDS_PER_TEST))
def test_mesh_answers_rightly_and_comes_to_rest_in_every_world(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        run_seed(seed)


@pytest.mark.slow
def test_mesh_answers_rightly_when_nearly_every_prefix_hash_collides() -> None:
    for seed in range(20):
        run_seed(seed, prefix_hash=lambda preimage: sha256(preimage)[:1])


def test_world_is_the_same_when_its_seed_is_replayed() -> None:
    first, second = run_seed(7), run_seed(7)
    assert first.num_steps == second.num_steps
    assert first.scheduler.load() == second.scheduler.load()
    assert {request_id: client.received for request_id, client in first.client_by_id.items()} == {
        request_id: client.received for request_id, client in second.client_by_id.items()
    }


@pytest.mark.slow
def test_worlds_together_see_preemption_prefix_hits_faults_and_guesses() -> None:
    num_preemptions = num_hit_tokens = num_lives = num_accepted = num_rejected = 0
    for seed in range(30):
        simulation = run_seed(seed)
        num_preemptions += simulation.scheduler.load().num_preemptions
        num_hit_tokens += sum(simulation.manager.usage(name).hit_tokens for name in simulation.site_by_worker)
        num_lives += simulation.num_lives - simulation.world.num_workers
        load = simulation.scheduler.load()
        num_accepted += sum(load.num_accepted_by_place)
        num_rejected += sum(load.num_drafted_by_place) - sum(load.num_accepted_by_place)
    assert num_preemptions > 10
    assert num_hit_tokens > 100
    assert num_lives > 10
    assert num_accepted > 50
    assert num_rejected > 50

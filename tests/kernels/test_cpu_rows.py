"""Row-wise operations and threads of the CPU engine."""

import numpy as np
import pytest

from tests.kernels.cpu_references import ISAS, random_floats
from treadle_kernels import cpu
from treadle_kernels.cpu import ThreadPool

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable_reason()))


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 64, 576, 1000])
def test_rms_norm_divides_by_the_root_mean_square(isa, n):
    rng = np.random.default_rng(1)
    x, weight = random_floats(rng, 5, n), random_floats(rng, n)
    x[3] = 0
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(cpu.rms_norm(x, weight, 1e-5), expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 1536])
def test_swiglu_is_silu_times_up_even_for_huge_gates(isa, n):
    rng = np.random.default_rng(2)
    gate, up = 4 * random_floats(rng, 7, n), random_floats(rng, 7, n)
    gate[0], gate[1], gate[2] = -1e4, 1e4, 0
    wide = gate.astype(np.float64)
    expected = wide / (1 + np.exp(np.minimum(-wide, 700))) * up
    np.testing.assert_allclose(cpu.swiglu(gate, up), expected, rtol=1e-6, atol=1e-30)


def test_row_operations_give_the_same_bits_on_all_instruction_sets_with_fused_products():
    rng = np.random.default_rng(3)
    x, weight, up = random_floats(rng, 9, 333), random_floats(rng, 333), random_floats(rng, 9, 333)
    before = cpu.current_isa()
    results = []
    for name in ISAS:
        cpu.select_isa(name)
        if name != "plain":
            results.append((cpu.rms_norm(x, weight, 1e-6), cpu.swiglu(x, up)))
    cpu.select_isa(before)
    for result in results[1:]:
        np.testing.assert_array_equal(result[0], results[0][0])
        np.testing.assert_array_equal(result[1], results[0][1])


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("spin_us", [0, 50])
def test_threads_join_every_loop_whether_they_spin_or_sleep(num_threads, spin_us):
    pool = ThreadPool(num_threads, spin_us=spin_us)
    assert pool.measure_fork_join_s(300) < 1


def test_pools_may_live_side_by_side():
    pools = [ThreadPool(2, spin_us=0) for _ in range(4)]
    assert all(pool.measure_fork_join_s(20) < 1 for pool in pools)


def test_a_pool_may_end_before_its_threads_have_begun():
    # They used to sleep through its end now and then: once in a hundred pools, or in fifty thousand.
    for _ in range(20_000):
        ThreadPool(4)

"""The cost model adds up, is off published figures as far as it says, and the page shows it."""

from pathlib import Path

import pytest

from benchmarks import cost_model, gpu_costs
from benchmarks.cost_model import BEGIN, END, predict
from benchmarks.gpu_costs import (
    DEVICES,
    METHODS,
    Step,
    device_of,
    entries_like_exact,
    fill,
    gemm_ms,
    replay,
)

PAGE = Path(__file__).parents[2] / "benchmarks/results/predicted.md"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("device", DEVICES)
def test_time_grows_with_tokens(device, method):
    times = [
        predict(DEVICES[device], (N, 151_936, 1536), METHODS[method])
        for N in (1024, 2048, 4096, 8192, 16_384, 65_536)
    ]
    assert times == sorted(times)


def test_gemms_are_three_and_no_method_is_faster_than_what_it_computes():
    """At a large size the bare GEMMs take their FLOPs, and nothing exact takes less."""
    shape = (16_384, 151_936, 4096)
    floor = 6 * 16_384 * 151_936 * 4096 / (1e9 * DEVICES["H200"].tflops)
    gemms = predict(DEVICES["H200"], shape, METHODS["bare GEMMs"])
    assert floor <= gemms <= 1.1 * floor
    for name, method in METHODS.items():
        terms = METHODS[name](Step(DEVICES["H200"], *shape))
        assert all(ms >= 0 for ms in terms.values())
        assert predict(DEVICES["H200"], shape, method) >= gemms, name


def test_a_card_of_24_gb_plans_with_its_own_budget():
    large, small = (gpu_costs.plan_of(DEVICES[x], 16_384, 151_936) for x in ("H100", "RTX 4090"))
    assert len([*small.chunk_slices()]) > len([*large.chunk_slices()])


def test_two_passes_keep_the_exponentials_of_one_chunk():
    for N, products in ((4096, 3), (16_384, 4)):
        terms = METHODS["two passes"](Step(DEVICES["H100"], N, 151_936, 2048))
        assert len(terms.keys() & {"GEMM 1", "GEMM 1, again", "dH", "dW"}) == products


def test_the_cpu_is_behind_in_a_small_call_and_not_in_a_large_one():
    """The CPU takes what was measured without a GPU: 1.5 ms for 512 tokens."""
    device, exact = DEVICES["H100"], METHODS["exact"]
    terms = exact(Step(device, 512, 151_936, 896))
    assert terms["CPU behind"] > 0.2 and 1.3 < sum(terms.values()) - terms["waits"] < 1.7
    assert exact(Step(device, 16_384, 151_936, 896))["CPU behind"] == 0


def test_a_last_wave_that_is_hardly_filled_costs():
    assert fill(132 * 128, 256, 132) == 1.0
    assert 0.5 < fill(133 * 128, 256, 132) < 0.97
    device = DEVICES["H200"]
    assert gemm_ms(device, 133 * 128, 256, 4096) > 1.02 * gemm_ms(device, 132 * 128, 256, 4096)


def test_replay_is_as_slow_as_exact_where_the_table_says():
    device, shape = DEVICES["H200"], cost_model.REPLAY
    entries = entries_like_exact(device, *shape)
    exact = predict(device, shape, METHODS["exact"])
    near, far = (sum(replay(Step(device, *shape), n).values()) for n in (entries, 1.1 * entries))
    assert near == pytest.approx(exact, rel=0.01) and far > 1.05 * exact


def test_published_figures_are_met_as_far_as_the_page_says():
    errors = sorted(abs(error) for _, _, error in cost_model.calibration())
    assert errors[len(errors) // 2] <= 0.1 and errors[-1] <= 0.55
    assert f"{errors[-1]:.0%} (worst)" in cost_model.error_of_the_model()


def test_the_page_is_fresh(capsys):
    cost_model.main([])
    printed = capsys.readouterr().out
    shown = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    assert shown == printed, f"stale: run {cost_model.COMMAND}"


def test_a_gpu_is_known_by_the_name_that_it_tells():
    assert device_of("NVIDIA H200") is DEVICES["H200"]
    assert device_of("NVIDIA A100-SXM4-80GB") is DEVICES["A100"]
    assert device_of("AMD EPYC, 2 threads") is None

# SPDX-License-Identifier: Apache-2.0
"""The roofline: counts worked out by hand, and what bounds which operator."""

import pytest

from npu_ops.roofline import (
    CHIPS,
    LAUNCH_S,
    markov_topk_work,
    modelled_time,
    pack_tree_work,
    tree_attention_work,
)

B2 = next(chip for chip in CHIPS if chip.name == "910B2")
B4 = next(chip for chip in CHIPS if chip.name == "910B4")


def test_peak_rates_follow_from_cores_and_clock():
    assert B2.cube_flops_per_s == pytest.approx(353.9e12, rel=1e-3)
    assert B4.cube_flops_per_s == pytest.approx(245.76e12, rel=1e-6)
    assert B2.vector_ops_per_s == pytest.approx(5.53e12, rel=1e-3)


def test_markov_topk_of_12_requests_is_bound_by_reading_the_weights():
    work = markov_topk_work(48, 12, 151936, 256, 4)
    assert work.hbm_bytes == 151936 * 256 * 2 + 12 * 151936 * 2 + 48 * (256 * 2 + 4) + 48 * 9 * 4
    assert work.cube_flops == 2 * 48 * 151936 * 256
    time = modelled_time(work, B2)
    assert time.bound_by == "hbm"
    assert time.seconds == pytest.approx(50.9e-6, rel=0.01)


def test_tree_attention_of_12_requests_is_bound_by_reading_the_cache():
    work = tree_attention_work(12, 33, 32, 8, 128, 4096)
    assert work.cube_flops == 4 * 12 * 33 * 32 * 128 * 4129
    assert work.hbm_bytes > 2 * 12 * 4129 * 8 * 128 * 2
    time = modelled_time(work, B2)
    assert time.bound_by == "hbm"
    assert time.seconds == pytest.approx(126e-6, rel=0.06)


def test_pack_tree_is_bound_by_its_launch():
    assert modelled_time(pack_tree_work(12, 100, 32), B4).seconds == LAUNCH_S


def test_a_slower_chip_takes_longer():
    work = markov_topk_work(48, 12, 151936, 256, 4)
    assert modelled_time(work, B4).seconds > modelled_time(work, B2).seconds

from __future__ import annotations

from tests.support.planned import layout_of, settings_for


def test_cores_are_shared_out_and_devices_are_not() -> None:
    assert settings_for(device="CPU", devices=8).devices_per_rank(2) == 4
    assert settings_for(device="CPU", devices=8).devices_per_rank(16) == 1
    assert settings_for(device="H200", devices=8).devices_per_rank(2) == 1
    cpu = settings_for(device="CPU", devices=8)
    assert cpu.rank_memory_bytes(2) == 4 * int(cpu.sheet.memory_bytes.value)


def test_a_chunk_grows_with_the_ranks_that_share_its_rows() -> None:
    fixed = settings_for(chunk=512)
    free = settings_for(chunk=512, chunk_per_pcp_rank=True)
    assert fixed.scheduler_of(layout_of(pcp=4)).max_num_batched_tokens == 512
    assert free.scheduler_of(layout_of(pcp=4)).max_num_batched_tokens == 2048
    assert free.scheduler_of(layout_of(tp=4)).max_num_batched_tokens == 512

"""The decode step that is captured on a device: what it computes, and that pads change nothing."""

from __future__ import annotations

import numpy as np
import torch

from tests.kernels.conftest import device  # noqa: F401 - where Triton's kernels run
from tests.support.graph_step import make_step, rows


def dense(step, hidden, slots, lengths):
    """The same step in float64: softmax over the keys of each sequence, read one by one."""

    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    wide = [pool.double().cpu() for pool in step.pools]
    hidden = hidden.double().cpu()
    for pool, layer in zip(wide, step._layers, strict=True):
        inward, outward, gate_up, down = (weight.double().cpu() for weight in layer)
        products = norm(hidden) @ inward
        query = products[:, :64].view(-1, 4, 16)
        key, value = products[:, 64:96].view(-1, 2, 16), products[:, 96:].view(-1, 2, 16)
        found = []
        for row, length in enumerate(lengths):
            pool[int(slots[row])] = torch.cat((key[row], value[row]), dim=-1)
            places = np.arange(length)
            where = step._tables[row][places // 16] * 16 + places % 16
            for head in range(4):
                kept = pool[torch.from_numpy(where), head // 2]
                weights = (kept[:, :16] @ query[row, head] / 4).softmax(0)
                found.append(weights @ kept[:, 16:])
        hidden = hidden + torch.stack(found).view(-1, 64) @ outward
        gate, up = (norm(hidden) @ gate_up).chunk(2, dim=-1)
        hidden = hidden + (gate * gate.sigmoid() * up) @ down
    return norm(hidden)


def test_the_step_is_attention_and_gates_over_the_stored_rows(device):  # noqa: F811
    step, lengths = make_step(device), [20, 1, 33]
    hidden, slots = rows(3, 0, device), step.plan(lengths, 3)
    expected = dense(step, hidden, slots, lengths)
    found = step.compute(hidden, slots).cpu().double()
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_pads_change_nothing_of_the_rows(device):  # noqa: F811
    plain, padded = make_step(device), make_step(device)
    hidden = rows(4, 1, device)
    expected = plain.compute(hidden[:3], plain.plan([20, 1, 33], 3))
    found = padded.compute(hidden, padded.plan([20, 1, 33], 4))
    torch.testing.assert_close(found[:3], expected, atol=1e-5, rtol=0)
    for one, other in zip(plain.pools, padded.pools, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert not found.isnan().any()

"""Adam of what learns: how far numbers go, alone and pooled."""

import pytest
import torch

from exl2nb.converter.grid import Adam, learning_rate_shares


def walk(gradients, pooled, far=0.5, damping=1.0):
    """Where numbers stand that begin at 0, after one step for each of the gradients f32 `(steps, n)`."""
    learning = torch.zeros(gradients.shape[1])
    adam, way = Adam([(learning, far)], pooled=1 if pooled else 0, damping=damping), learning_rate_shares(len(gradients))
    with torch.no_grad():
        for step, (share, gradient) in enumerate(zip(way, gradients)):
            adam.pace(step, share)
            adam.move([gradient])
    return learning.detach()


def test_gradients_that_all_point_one_way_go_the_whole_distance():
    gradients = torch.full((50, 3), 0.01)
    for pooled in (False, True):
        torch.testing.assert_close(walk(gradients, pooled), torch.full((3,), -0.5), rtol=1e-3, atol=0)


def test_what_hardly_matters_and_what_is_unsure_go_less_far_where_numbers_are_pooled():
    noise = torch.randn(400, 2000, generator=torch.Generator().manual_seed(0))
    size = torch.logspace(-2, 0, 2000)
    alone, high, low = (walk(noise * size, *how).abs() for how in ((False, 2.0), (True, 2.0, 1.0), (True, 2.0, 0.15)))
    small, middle, large = size < 0.02, (size.square() / size.square().mean() - 1).abs() < 0.1, size > 0.9
    assert high[small].mean() < 0.5 * low[small].mean() < 0.25 * alone[small].mean()
    for pooled in (high, low):
        assert pooled[middle].mean() > 0.95 * alone[middle].mean()
        assert pooled[large].mean() < 0.7 * alone[large].mean()


def test_a_higher_power_makes_steps_short_sooner():
    plain, sharp = learning_rate_shares(100), learning_rate_shares(100, 2)
    assert sum(plain) == pytest.approx(1) == sum(sharp)
    assert sum(sharp[50:]) < 0.5 * sum(plain[50:])


def test_how_much_of_the_last_gradients_a_step_remembers():
    moved = []
    for decay in (0.0, 0.9):
        learning = torch.zeros(1)
        adam = Adam([(learning, 1.0)], decay=decay)
        with torch.no_grad():
            for step, gradient in enumerate((1.0, -1.0)):
                adam.pace(step, 1.0)
                adam.move([torch.tensor([gradient])])
        moved.append(float(learning.detach()))
    assert moved == pytest.approx([0.0, -1 + 0.1 / 1.9], abs=1e-5)  # 0.9: (0.1 * 0.9 - 0.1) / (1 - 0.81)


def test_only_the_first_are_pooled():
    learning = [torch.zeros(1), torch.zeros(1)]
    adam = Adam([(learning[0], 1.0), (learning[1], 1.0)], pooled=1)
    with torch.no_grad():
        adam.pace(0, 1.0)
        adam.move([torch.full((1,), 1e-6), torch.full((1,), 1e3)])
    for moved in learning:  # each by its own size
        torch.testing.assert_close(moved.detach(), torch.full((1,), -1.0), rtol=1e-3, atol=0)

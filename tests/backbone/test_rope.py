"""Rotary embedding against its definition: complex multiplication, and YaRN's interpolation by wavelength."""

import math

import numpy as np
import pytest
import torch

from specialized_decode.backbone.config import RopeScaling
from specialized_decode.backbone.rope import cos_sin_table, inverse_frequencies, rotate
from tests.helpers.small_config import small_config

PAIRS = 32
RELEASE = RopeScaling(16.0, 32.0, 1.0, 65536)
TINY = RopeScaling(4.0, 32.0, 1.0, 1024)


def _plain(base: float) -> np.ndarray:
    return np.array([base ** (-2.0 * i / 64) for i in range(PAIRS)])


def _pair_that_turns(base: float, rotations: float, length: int) -> float:
    """Where along the pairs an angle turns `rotations` times over `length` tokens: by bisection, as a real number."""
    low, high = -1000.0, 1000.0
    for _ in range(200):
        middle = (low + high) / 2
        if length * base ** (-2 * middle / 64) / (2 * math.pi) > rotations:
            low = middle
        else:
            high = middle
    return low


def _yarn(base: float, scaling: RopeScaling) -> np.ndarray:
    """Pairs of many rotations keep their angle, those of few are slowed by the factor, with a ramp in between."""
    length = scaling.original_max_position_embeddings
    first = max(math.floor(_pair_that_turns(base, scaling.beta_fast, length)), 0)
    last = min(math.ceil(_pair_that_turns(base, scaling.beta_slow, length)), 63)
    result = []
    for i, frequency in enumerate(_plain(base)):
        slowed = 0.0 if i <= first else 1.0 if i >= last else (i - first) / (last - first)
        result.append(frequency * (1 - slowed) + frequency / scaling.factor * slowed)
    return np.array(result)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_window_layers_rotate_plainly(base: float) -> None:
    found = inverse_frequencies(small_config(rope_theta=base), compressed=False)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), _plain(base), rtol=1e-6)


def test_compressed_layers_without_scaling_rotate_plainly_at_their_own_base() -> None:
    found = inverse_frequencies(small_config(rope_scaling=None), compressed=True)
    np.testing.assert_allclose(found.numpy(), _plain(160000.0), rtol=1e-6)


@pytest.mark.parametrize("scaling", [RELEASE, TINY, RopeScaling(2.0, 4.0, 1.0, 128), RopeScaling(8.0, 32.0, 1.0, 64)])
@pytest.mark.parametrize("base", [10000.0, 160000.0])
def test_yarn(scaling: RopeScaling, base: float) -> None:
    found = inverse_frequencies(small_config(rope_scaling=scaling, compress_rope_theta=base), compressed=True)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), _yarn(base, scaling), rtol=2e-6)


def test_yarn_of_the_release() -> None:
    """Its ends: the first pair untouched, the last one 16 times slower, and between them a ramp of both kinds."""
    ratio = inverse_frequencies(small_config(), compressed=True).double().numpy() / _plain(160000.0)
    np.testing.assert_allclose(ratio[0], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[-1], 1 / 16, rtol=1e-6)
    assert (np.diff(ratio) <= 1e-6).all() and ((ratio > 0.07) & (ratio < 0.99)).sum() > 3


def test_a_factor_of_one_changes_nothing() -> None:
    config = small_config(rope_scaling=RopeScaling(1.0, 32.0, 1.0, 65536))
    np.testing.assert_allclose(inverse_frequencies(config, True).numpy(), _plain(160000.0), rtol=1e-6)


@pytest.mark.parametrize("compressed", [False, True])
def test_table_holds_cosines_then_sines(compressed: bool) -> None:
    config = small_config()
    table = cos_sin_table(config, compressed, 3000)
    assert table.shape == (3000, 64) and table.dtype == torch.float32
    frequencies = inverse_frequencies(config, compressed).numpy()
    # The angle itself is a float32, as in the serving engine; only its cosine is taken exactly here.
    angles = (np.arange(3000, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    np.testing.assert_allclose(table[:, :32].numpy(), np.cos(angles), atol=2e-7)
    np.testing.assert_allclose(table[:, 32:].numpy(), np.sin(angles), atol=2e-7)
    assert table[0].tolist() == [1.0] * 32 + [0.0] * 32


def test_rotation_is_complex_multiplication_of_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 64, generator=generator)
    angles = torch.randn(5, 1, 32, generator=generator) * 10
    found = rotate(x, torch.cat((angles.cos(), angles.sin()), -1)).double().numpy()
    z = x.double().numpy()[..., 0::2] + 1j * x.double().numpy()[..., 1::2]
    z = z * np.exp(1j * angles.double().numpy())
    np.testing.assert_allclose(found[..., 0::2], z.real, atol=2e-6)
    np.testing.assert_allclose(found[..., 1::2], z.imag, atol=2e-6)


def test_the_inverse_undoes_the_rotation() -> None:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    table = cos_sin_table(small_config(), True, 900)[893:]
    turned = rotate(x, table)
    assert (turned - x).abs().max() > 0.5
    torch.testing.assert_close(rotate(turned, table, inverse=True), x, atol=1e-6, rtol=0)


def test_scores_depend_on_the_distance_alone() -> None:
    """What rotary embedding is for: the product of a rotated query and key is a function of their distance."""
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(64, generator=generator), torch.randn(64, generator=generator)
    table = cos_sin_table(small_config(), False, 400)
    products = [float(rotate(q, table[at + 17]) @ rotate(k, table[at])) for at in (0, 5, 380)]
    np.testing.assert_allclose(products, products[0], atol=1e-4)

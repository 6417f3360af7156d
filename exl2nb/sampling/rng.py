"""Random numbers by counter: number `i` of a seed is a function of (seed, i) alone, so a request draws the same whatever runs beside it."""

from __future__ import annotations

import secrets

_MASK = 2**64 - 1


def uniform(seed: int, index: int) -> float:
    """Number `index` of the stream `seed`: a float in [0, 1) with 53 random bits.

    Source: the splitmix64 finaliser (Steele, Lea and Flood, 2014) over the mixed seed plus index steps of the golden ratio.

    Example:
        >>> uniform(1, 0) == uniform(1, 0) != uniform(1, 1)
        True
    """
    return (_mix((_mix(seed & _MASK) + (index + 1) * 0x9E3779B97F4A7C15) & _MASK) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def fresh_seed() -> int:
    """A seed nobody chose: 63 random bits, so that it also fits a signed 64-bit column."""
    return secrets.randbits(63)

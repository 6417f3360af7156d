"""The truth for EXL2 matrices: a slow scalar decoder written from the format's text, sharing no code with the package."""

import numpy as np


def decode(q_weight, q_scale, q_scale_max, q_groups, q_invperm, prescale=1.0):
    """NumPy arrays as stored -> float16 (K, N), rows in original order."""
    words = q_weight.view(np.uint32)
    scales = q_scale.view(np.uint32)
    total_words, columns = words.shape
    rows = len(q_invperm)
    stored = np.zeros((rows, columns), np.float16)
    row = 0
    for g in range(len(q_groups) // 2):
        bits, start = int(q_groups[2 * g]), int(q_groups[2 * g + 1])
        end = int(q_groups[2 * g + 3]) if 2 * g + 3 < len(q_groups) else total_words
        unit = np.float16(np.float32(q_scale_max[g]) * np.float32(prescale / 256))
        for r in range((end - start) * 32 // bits):
            for n in range(columns):
                code = 0
                for t in range(bits):
                    p = r * bits + t
                    code |= ((int(words[start + p // 32, n]) >> (p % 32)) & 1) << t
                index = (int(scales[g, n // 8]) >> (4 * (n % 8))) & 15
                step = np.float16(np.float32((index + 1) ** 2) * np.float32(unit))
                stored[row, n] = np.float16(np.float32(code - 2 ** (bits - 1)) * np.float32(step))
            row += 1
    assert row == rows
    original = np.empty_like(stored)
    for i in range(rows):
        original[i] = stored[q_invperm[i]]
    return original


def groups_of(rng, rows):
    """A random legal group table: widths falling, sizes any multiple of 32."""
    sizes = []
    while (left := rows - sum(sizes)) > 0:
        sizes.append(min(left, 32 * int(rng.integers(1, 5))))
    widths = sorted((int(b) for b in rng.choice([2, 3, 4, 5, 6, 8], len(sizes))), reverse=True)
    return list(zip(widths, sizes))


def random_parts(rng, rows, columns, groups=None):
    """Random arguments for `encode`: codes, scale_index, scale_max, groups, perm as NumPy arrays."""
    groups = groups or groups_of(rng, rows)
    codes = np.concatenate([rng.integers(0, 1 << b, (r, columns), dtype=np.uint8) for b, r in groups])
    index = rng.integers(0, 16, (len(groups), columns), dtype=np.uint8)
    scale_max = np.exp(rng.uniform(np.log(1e-5), np.log(0.5), len(groups))).astype(np.float16)
    return codes, index, scale_max, groups, rng.permutation(rows)

"""The inputs of a round of draft tokens that follows another, as the GPU computes them: here on the CPU."""

import random

import torch

from exl2nb.generator.draft import FIRST_STEP_TOKENS
from exl2nb.generator.gpu_draft import COUNTER_WORD, ROW_WORDS, write_round_inputs
from exl2nb.ops.cuda_sample import Row, pack_rows


def test_the_next_round_begins_where_the_verified_tokens_end():
    chance = random.Random(0)
    for _ in range(50):
        rows, steps = chance.choice([1, 2, 4, 8]), chance.randint(1, 7)
        live = chance.randint(1, rows)
        sizes = [
            rows * ROW_WORDS,
            FIRST_STEP_TOKENS * rows,
            FIRST_STEP_TOKENS * rows,
            rows,
            rows,
            rows,
            rows,
            5 * rows,
            rows,
            (1 + steps) * rows,
        ]
        state = torch.zeros(sum(sizes), dtype=torch.int32).split(sizes)
        params, ids, positions, last, lens, _, _, first, alive, tokens = state
        texts = [[chance.randrange(1, 50) for _ in range(chance.randint(2, 40))] for _ in range(live)]
        numbers = [chance.randrange(100) for _ in texts]
        known, verified = tokens.view(1 + steps, rows), torch.zeros(1 + steps, rows, dtype=torch.int32)
        wanted = []
        for row, (text, number) in enumerate(zip(texts, numbers)):
            length, accepted = len(text), chance.randint(0, steps)
            right = [chance.randrange(1, 50) for _ in range(1 + steps)]
            drafts = [*right[:accepted], *(right[i] + 50 for i in range(accepted, steps))]
            drafts[accepted + 1 :] = right[accepted + 1 : steps]  # what agrees behind the first wrong one does not count
            known[:, row], verified[:, row] = torch.tensor([text[-1], *drafts]), torch.tensor(right)
            first.view(5, rows)[:, row] = torch.tensor([length - 2, length - 1, length - 1, length, number])
            alive[row], last[row], lens[row] = 1, length - 1 + steps, length + steps  # the round has moved them on
            params.view(rows, ROW_WORDS)[row] = pack_rows([Row(seed=7, counter=number + steps)]).view(torch.int32)
            wanted.append(([*text, *right[: accepted + 1]], number + accepted + 1))
        write_round_inputs(state, verified)
        for row, (text, number) in enumerate(wanted):
            length = len(text)
            assert ids.view(rows, FIRST_STEP_TOKENS)[row].tolist() == text[-FIRST_STEP_TOKENS:]
            assert positions.view(rows, FIRST_STEP_TOKENS)[row].tolist() == [length - 2, length - 1]
            assert (int(known[0, row]), int(last[row]), int(lens[row])) == (text[-1], length - 1, length)
            expected = pack_rows([Row(seed=7, counter=number)]).view(torch.int32)
            assert torch.equal(params.view(rows, ROW_WORDS)[row], expected[0])
            assert int(first.view(5, rows)[4, row]) == number == int(expected[0, COUNTER_WORD])
        assert not lens[live:].any(), "places without a sequence"

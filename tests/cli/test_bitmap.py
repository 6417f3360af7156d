from exl2nb.cli.bitmap import BitMap, colour, ink, render_text

BITS = {
    "model.layers.0.self_attn.q_proj": 4.13,
    "model.layers.0.mlp.down_proj": 3.0,
    "model.layers.11.self_attn.q_proj": 2.04,
    "lm_head": 6.0,
}


def test_layers_across_matrices_down():
    grid = BitMap.of(BITS)
    assert grid.matrices == ("q_proj", "down_proj")
    assert grid.layers == (0, 11)
    assert grid.bits == ((4.13, 2.04), (3.0, None))


def test_plain_text():
    assert render_text(BitMap.of(BITS)).splitlines() == ["layer        0  11", "q_proj     4.1 2.0", "down_proj  3.0"]


def test_narrow_terminals_break_lines():
    grid = BitMap.of({f"model.layers.{i}.mlp.up_proj": 4.0 for i in range(80)})
    text = render_text(grid, columns=60)
    assert max(map(len, text.splitlines())) <= 60
    assert text.count("4") >= 80


def test_colours_say_the_same_as_the_digits():
    plain, coloured = (render_text(BitMap.of(BITS), colours=c) for c in (False, True))
    import re

    assert re.sub(r"\033\[[0-9;]*m", "", coloured).split() == plain.split()
    assert coloured.count("\033[0m") == 3


def test_cells_are_readable():
    def luminance(rgb):
        linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for tenth in range(10, 170):
        rgb = colour(tenth / 10)
        high, low = sorted([luminance(rgb), luminance(ink(rgb))], reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, tenth / 10

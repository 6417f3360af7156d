# ruff: noqa: E501 - texts
"""Exercises in mathematics and conversations for the mixed calibration text (`make_calibration.py`), written from a seed.

Every number in them is computed, every function is run: nothing states a wrong result. Facts come from the Factbook's profiles.
"""

from __future__ import annotations

import csv
import io
import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

Message = dict[str, str]
Profile = Mapping[str, Mapping[str, str]]
Exercise = tuple[str, str]  # question, solution

# ---- mathematics


def term(coefficient: int, power: int, first: bool = False) -> str:
    """A term of a polynomial in x, with its sign."""
    if not coefficient:
        return ""
    size = "" if abs(coefficient) == 1 and power else str(abs(coefficient))
    tail = "" if not power else "x" if power == 1 else f"x^{{{power}}}" if power > 9 else f"x^{power}"
    sign = ("-" if coefficient < 0 else "") if first else (" - " if coefficient < 0 else " + ")
    return sign + size + tail


def polynomial(coefficients: Sequence[int]) -> str:
    """Coefficients from the constant up, as TeX."""
    parts, first = [], True
    for power in reversed(range(len(coefficients))):
        if text := term(coefficients[power], power, first):
            parts.append(text)
            first = False
    return "".join(parts) or "0"


def fraction(value: Fraction) -> str:
    """As TeX."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def linear(r: random.Random) -> Exercise:
    """A x + b = c x + d."""
    x, a, c = r.randint(-12, 12), r.randint(2, 9), r.randint(-5, 1)
    b = r.randint(-20, 20)
    d = (a - c) * x + b
    left, right = polynomial([b, a]), polynomial([d, c])
    steps = f"Bring the terms with $x$ to the left and the numbers to the right: ${a - c}x = {d} - ({b}) = {d - b}$."
    return (
        f"Solve ${left} = {right}$ for $x$.",
        f"{steps} Dividing by ${a - c}$ gives $x = {x}$.\n\nCheck: ${a} \\cdot ({x}) + ({b}) = {a * x + b}$.",
    )


def quadratic(r: random.Random) -> Exercise:
    """With whole roots."""
    p, q = sorted((r.randint(-9, 9), r.randint(-9, 9)))
    b, c = -(p + q), p * q
    d = b * b - 4 * c
    text = (
        f"The discriminant is $D = b^2 - 4ac = ({b})^2 - 4 \\cdot ({c}) = {d}$, so\n\n\\[ x = \\frac{{{-b} \\pm \\sqrt{{{d}}}}}{{2}} "
        f"= \\frac{{{-b} \\pm {math.isqrt(d)}}}{{2}}, \\]\n\n"
    )
    end = f"which gives the double root $x = {p}$." if p == q else f"which gives $x_1 = {p}$ and $x_2 = {q}$."
    return f"Find all real solutions of ${polynomial([c, b, 1])} = 0$.", text + end


def derivative(r: random.Random) -> Exercise:
    """Of a polynomial, and its value at a point."""
    f = [r.randint(-9, 9) for _ in range(r.randint(3, 5))] + [r.randint(1, 6)]
    g, at = [k * a for k, a in enumerate(f)][1:], r.randint(-3, 3)
    value = sum(a * at**k for k, a in enumerate(g))
    return (
        f"Let $f(x) = {polynomial(f)}$. Compute $f'(x)$ and the slope of the tangent at $x = {at}$.",
        f"By the power rule each term $a x^n$ becomes $n a x^{{n-1}}$:\n\n\\[ f'(x) = {polynomial(g)}. \\]\n\nAt $x = {at}$ the slope is "
        f"$f'({at}) = {value}$.",
    )


def integral(r: random.Random) -> Exercise:
    """Of a polynomial over an interval."""
    f, a, b = [r.randint(-6, 6) for _ in range(3)] + [r.randint(1, 5)], r.randint(-2, 0), r.randint(1, 3)
    antiderivative = [Fraction(0), *(Fraction(c, k + 1) for k, c in enumerate(f))]
    sizes: dict[Fraction | int, str] = {1: "", -1: "-"}
    terms = [f"{sizes.get(c, fraction(c))}{f'x^{k}' if k > 1 else 'x'}" for k, c in reversed(list(enumerate(antiderivative))) if c]
    upper, lower = (sum(c * x**k for k, c in enumerate(antiderivative)) for x in (b, a))
    whole = " + ".join(terms).replace("+ -", "- ")
    return (
        f"Evaluate $\\int_{{{a}}}^{{{b}}} \\left({polynomial(f)}\\right) dx$.",
        f"An antiderivative is $F(x) = {whole}$. Hence\n\n\\[ \\int_{{{a}}}^{{{b}}} f(x)\\,dx = F({b}) - F({a}) = {fraction(Fraction(upper))} - "
        f"\\left({fraction(Fraction(lower))}\\right) = {fraction(Fraction(upper) - Fraction(lower))}. \\]",
    )


def euclid(r: random.Random) -> Exercise:
    """Greatest common divisor, line by line."""
    g = r.randint(2, 40)
    a, b = g * r.randint(20, 90), g * r.randint(5, 60)
    lines, x, y = [], max(a, b), min(a, b)
    while y:
        lines.append(f"{x} &= {x // y} \\cdot {y} + {x % y} \\\\")
        x, y = y, x % y
    body = "\n".join(lines)
    return (
        f"Use Euclid's algorithm to find $\\gcd({a}, {b})$.",
        f"\\begin{{align*}}\n{body}\n\\end{{align*}}\n\nThe last remainder other than zero is {x}, so $\\gcd({a}, {b}) = {x}$.",
    )


def matrices(r: random.Random) -> Exercise:
    """A product and a determinant, 2 x 2."""
    a, b = ([[r.randint(-6, 6) for _ in range(2)] for _ in range(2)] for _ in range(2))
    c = [[sum(a[i][k] * b[k][j] for k in range(2)) for j in range(2)] for i in range(2)]

    def show(m: list[list[int]]) -> str:
        return "\\begin{pmatrix} " + " \\\\ ".join(" & ".join(map(str, row)) for row in m) + " \\end{pmatrix}"

    det = [m[0][0] * m[1][1] - m[0][1] * m[1][0] for m in (a, b, c)]
    return (
        f"Let $A = {show(a)}$ and $B = {show(b)}$. Compute $AB$ and check that $\\det(AB) = \\det A \\cdot \\det B$.",
        f"\\[ AB = {show(c)}. \\]\n\nHere $\\det A = {det[0]}$ and $\\det B = {det[1]}$, whose product is ${det[0] * det[1]}$; and $\\det(AB) = {det[2]}$.",
    )


def progression(r: random.Random) -> Exercise:
    """Sums of progressions."""
    a, d, n = r.randint(1, 20), r.randint(2, 9), r.randint(8, 40)
    last = a + (n - 1) * d
    return (
        f"An arithmetic progression begins with {a} and has the common difference {d}. What are its {n}th term and the sum of its first {n} terms?",
        f"The {n}th term is $a_{{{n}}} = {a} + {n - 1} \\cdot {d} = {last}$. The sum is\n\n\\[ S_{{{n}}} = \\frac{{{n}({a} + {last})}}{{2}} = {n * (a + last) // 2}. \\]",
    )


def bases(r: random.Random) -> Exercise:
    """A number in base 2 and 16."""
    n = r.randint(40, 4000)
    left, lines = n, []
    while left:
        lines.append(f"{left} = 2 · {left // 2} + {left % 2}")
        left //= 2
    return (
        f"Write {n} in binary and in hexadecimal.",
        "Divide by two again and again and read the remainders from the bottom up:\n\n"
        + "\n".join(lines)
        + f"\n\nSo {n} is {n:b} in binary and {n:X} in hexadecimal.",
    )


def chance(r: random.Random) -> Exercise:
    """Balls from an urn."""
    red, blue, k = r.randint(3, 9), r.randint(3, 9), r.randint(2, 3)
    n, ways, good = red + blue, math.comb(red + blue, k), math.comb(red, k)
    return (
        f"An urn holds {red} red and {blue} blue balls. {k} balls are drawn without putting them back. What is the probability that all of them are red?",
        f"There are $\\binom{{{n}}}{{{k}}} = {ways}$ equally likely draws, and $\\binom{{{red}}}{{{k}}} = {good}$ of them are all red. The probability is "
        f"$\\frac{{{good}}}{{{ways}}} = {fraction(Fraction(good, ways))} \\approx {good / ways:.4f}$.",
    )


def shop(r: random.Random) -> Exercise:
    """A word problem with percentages."""
    name, thing = r.choice(["Mira", "Tom", "Aiko", "Ravi", "Lena", "Omar"]), r.choice(["notebooks", "plants", "bottles", "books", "lamps"])
    count, price, off = r.randint(3, 24), r.randint(2, 60), r.choice([5, 10, 15, 20, 25, 30])
    full = count * price
    paid = full * (100 - off) / 100
    return (
        f"{name} buys {count} {thing} at {price} dollars each and gets {off}% off the total. How much does {name} pay?",
        f"Without the discount the price is {count} × {price} = {full} dollars. The discount is {off}% of {full}, which is {full * off / 100:.2f} dollars. "
        f"{name} pays {full} − {full * off / 100:.2f} = {paid:.2f} dollars.",
    )


def induction(r: random.Random) -> Exercise:
    """A proof."""
    a = r.randint(2, 9)
    return (
        f"Prove by induction that $\\sum_{{k=0}}^{{n}} {a}^k = \\frac{{{a}^{{n+1}} - 1}}{{{a - 1}}}$ for all integers $n \\ge 0$.",
        f"For $n = 0$ both sides are 1. Suppose that the formula holds for $n$. Then\n\n\\[ \\sum_{{k=0}}^{{n+1}} {a}^k = \\frac{{{a}^{{n+1}} - 1}}{{{a - 1}}} + {a}^{{n+1}} = "
        f"\\frac{{{a}^{{n+1}} - 1 + {a - 1} \\cdot {a}^{{n+1}}}}{{{a - 1}}} = \\frac{{{a}^{{n+2}} - 1}}{{{a - 1}}}, \\]\n\nwhich is the formula for $n + 1$. \\qed",
    )


EXERCISES: tuple[Callable[[random.Random], Exercise], ...] = (
    linear, quadratic, derivative, integral, euclid, matrices, progression, bases, chance, shop, induction,
)  # fmt: skip


def exercises(r: random.Random, *, characters: int) -> list[str]:
    """Sheets of exercises with their solutions, so many characters together."""
    made, size, number = [], 0, 0
    while size < characters:
        kind = r.choice(EXERCISES)
        parts = [f"\\section*{{Exercises {number + 1}}}"]
        for i in range(r.randint(2, 6)):
            question, solution = (kind if r.random() < 0.5 else r.choice(EXERCISES))(r)
            parts.append(f"\\textbf{{{i + 1}.}} {question}\n\n\\textit{{Solution.}} {solution}")
        made.append("\n\n".join(parts))
        size, number = size + len(made[-1]), number + 1
    return made


# ---- conversations

SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful, honest assistant. Answer briefly.",
    "Answer in full sentences, and say so where you are not sure.",
    "You are a patient tutor. Explain each step.",
    "You are an assistant for programmers. Prefer short code over long explanations.",
    "You write for a general audience: no jargon, no filler.",
)
# what is asked of a country: section, field, ways to ask
ASKED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Introduction",
        "Background",
        ("Tell me about the history of {c}.", "Give me some background on {c}, please.", "What should I know about {c}?"),
    ),
    ("Geography", "Location", ("Where is {c}?", "On which continent does {c} lie?")),
    ("Geography", "Climate", ("What is the climate of {c} like?", "How is the weather in {c}?")),
    ("Geography", "Terrain", ("Describe the terrain of {c}.", "Is {c} flat or mountainous?")),
    ("Geography", "Natural resources", ("Which natural resources does {c} have?",)),
    ("People and Society", "Languages", ("Which languages are spoken in {c}?", "What do people in {c} speak?")),
    ("People and Society", "Ethnic groups", ("Which groups live in {c}?",)),
    ("Economy", "Economic overview", ("How does {c} earn its living?", "Summarise the economy of {c}.")),
    ("Economy", "Agricultural products", ("What is grown in {c}?",)),
    ("Economy", "Industries", ("Which industries matter in {c}?",)),
    ("Economy", "Exports - commodities", ("What does {c} export?",)),
    ("Government", "Government type", ("How is {c} governed?", "What kind of state is {c}?")),
    ("Government", "Administrative divisions", ("How is {c} divided?",)),
    ("Government", "Legal system", ("Which legal system does {c} have?",)),
    ("Communications", "Broadcast media", ("What are the media in {c} like?",)),
    ("Environment", "Environmental issues", ("Which environmental problems does {c} have?",)),
)
# functions with calls whose results are computed: request, code, calls
CODE: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("checks whether a number is prime", "def is_prime(n):\n    if n < 2:\n        return False\n    for d in range(2, int(n**0.5) + 1):\n        if n % d == 0:\n            return False\n    return True\n", ("is_prime(97)", "is_prime(91)", "is_prime(2)")),
    ("returns the first n Fibonacci numbers", "def fibonacci(n):\n    a, b, found = 0, 1, []\n    for _ in range(n):\n        found.append(a)\n        a, b = b, a + b\n    return found\n", ("fibonacci(10)", "fibonacci(1)")),
    ("counts the words of a text", "from collections import Counter\n\n\ndef count_words(text):\n    words = (word.strip('.,!?;:').lower() for word in text.split())\n    return dict(Counter(word for word in words if word))\n", ("count_words('To be, or not to be')",)),
    ("reverses the words of a sentence", "def reverse_words(sentence):\n    return ' '.join(reversed(sentence.split()))\n", ("reverse_words('one two three')",)),
    ("merges two sorted lists", "def merge(left, right):\n    made, i, j = [], 0, 0\n    while i < len(left) and j < len(right):\n        if left[i] <= right[j]:\n            made.append(left[i])\n            i += 1\n        else:\n            made.append(right[j])\n            j += 1\n    return made + left[i:] + right[j:]\n", ("merge([1, 4, 9], [2, 3, 10, 11])",)),
    ("finds the longest run of equal characters", "from itertools import groupby\n\n\ndef longest_run(text):\n    return max((''.join(run) for _, run in groupby(text)), key=len, default='')\n", ("longest_run('aabbbbcd')", "longest_run('')")),
    ("flattens a nested list", "def flatten(items):\n    for item in items:\n        if isinstance(item, list):\n            yield from flatten(item)\n        else:\n            yield item\n", ("list(flatten([1, [2, [3, 4]], [], 5]))",)),
    ("does a binary search", "def search(values, wanted):\n    low, high = 0, len(values)\n    while low < high:\n        middle = (low + high) // 2\n        if values[middle] < wanted:\n            low = middle + 1\n        else:\n            high = middle\n    return low if low < len(values) and values[low] == wanted else -1\n", ("search([1, 3, 5, 7, 11], 7)", "search([1, 3, 5], 4)")),
    ("checks whether brackets are balanced", "def balanced(text):\n    pairs, open_ones = {')': '(', ']': '[', '}': '{'}, []\n    for character in text:\n        if character in pairs.values():\n            open_ones.append(character)\n        elif character in pairs and (not open_ones or open_ones.pop() != pairs[character]):\n            return False\n    return not open_ones\n", ("balanced('{[()]}')", "balanced('(]')")),
    ("turns a number into Roman numerals", "def roman(n):\n    table = [(1000, 'M'), (900, 'CM'), (500, 'D'), (400, 'CD'), (100, 'C'), (90, 'XC'), (50, 'L'), (40, 'XL'), (10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV'), (1, 'I')]\n    made = ''\n    for value, letters in table:\n        while n >= value:\n            made, n = made + letters, n - value\n    return made\n", ("roman(1994)", "roman(2026)")),
    ("computes the edit distance of two words", "def distance(a, b):\n    row = list(range(len(b) + 1))\n    for i, x in enumerate(a, 1):\n        before, row[0] = row[0], i\n        for j, y in enumerate(b, 1):\n            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))\n    return row[-1]\n", ("distance('kitten', 'sitting')",)),
    ("groups words that are anagrams", "from collections import defaultdict\n\n\ndef anagrams(words):\n    found = defaultdict(list)\n    for word in words:\n        found[''.join(sorted(word))].append(word)\n    return [group for group in found.values() if len(group) > 1]\n", ("anagrams(['listen', 'silent', 'enlist', 'stone', 'notes'])",)),
    ("transposes a matrix", "def transpose(rows):\n    return [list(column) for column in zip(*rows)]\n", ("transpose([[1, 2, 3], [4, 5, 6]])",)),
    ("parses a query string", "from urllib.parse import unquote_plus\n\n\ndef parse_query(query):\n    pairs = (part.partition('=') for part in query.split('&') if part)\n    return {unquote_plus(key): unquote_plus(value) for key, _, value in pairs}\n", ("parse_query('q=deep+blue&lang=en')",)),
    ("computes the moving average of a series", "def moving_average(values, width):\n    return [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]\n", ("moving_average([2, 4, 6, 8, 10], 3)",)),
)  # fmt: skip
# written by hand
PLAIN: tuple[tuple[Exercise, ...], ...] = (
    (("Could you help me write a short mail to my landlord? The heating has been broken since Monday.", "Subject: Heating out of order since Monday\n\nDear Mr. Alvarez,\n\nthe heating in my flat has not worked since Monday morning; the radiators stay cold in every room. Could you send somebody this week? I am at home every day after four, and you can reach me by phone at any time.\n\nMany thanks,\nJana Novak"), ("A little more urgent, please, there is a baby in the flat.", "Subject: URGENT: no heating since Monday, infant in the flat\n\nDear Mr. Alvarez,\n\nwe have had no heating since Monday morning, and we have an infant of five months. Please send a technician today, or tell me whom I may call at your expense. I am at home all day.\n\nJana Novak")),
    (("What is the difference between a virus and a bacterium?", "A bacterium is a living cell: it feeds, grows and divides by itself, and antibiotics can kill it. A virus is much smaller and is not a cell. It is genetic material in a shell, and it can multiply only inside the cells of a host. That is why antibiotics do nothing against a cold or the flu, which viruses cause."),),
    (("Plan a day in a city with two children, aged 6 and 9. It may rain.", "**Morning.** A science or natural history museum: most have rooms where children may touch things. Two hours are enough.\n\n**Midday.** A market hall or a food court, where everybody finds something and nobody has to wait.\n\n**Afternoon.** If it is dry: a park with a playground, and a boat or a tram ride. If it rains: the swimming pool, or the public library, which often has a floor for children.\n\n**Evening.** An early dinner close to where you sleep. Keep one thing in reserve, such as a puppet theatre, for the case that energy is left."), ("They are vegetarian. Any idea for lunch?", "A falafel stand, a bakery with filled pastries, or pasta with tomato sauce are safe choices for that age. In a food court, let each of them pick one dish and share a third one.")),
    (("Explain recursion to me as if I were ten.", "Imagine that you stand in a queue and want to know your place. You cannot see the front, so you ask the person before you: \"What is your place?\" That person does not know either and asks the next one, and so on, until the first one says: \"I am number one!\" Then the answer travels back: two, three, four, until it reaches you, and you add one.\n\nRecursion is the same: a problem asks a smaller copy of itself, until one copy is so small that the answer is obvious."),),
    (("Is it safe to take ibuprofen and paracetamol together?", "For most healthy adults it is common to take both, since they work in different ways, as long as each stays within the dose on its leaflet. Do not do so without asking a doctor or pharmacist if you are pregnant, have trouble with stomach, kidneys, liver or heart, take blood thinners, or drink a lot. If pain or fever lasts longer than three days, see a doctor."),),
    (("Rewrite this in plain English: \"Pursuant to our previous correspondence, kindly be advised that remittance is outstanding.\"", "\"As we wrote to you before, we have not received your payment yet.\""), ("And friendlier?", "\"Just a quick reminder: your payment has not reached us yet. If it is already on its way, please ignore this note.\"")),
    (("Give me five names for a bakery by the sea.", "1. Salt & Crumb\n2. The Morning Tide\n3. Harbour Loaf\n4. Driftwood Bakehouse\n5. Seven Gulls"), ("The third, but in French.", "\"La Miche du Port\": *miche* is a round loaf, and it sounds warmer than *pain*.")),
    (("My program says `IndexError: list index out of range`. What does that mean?", "You asked a list for an element that it does not have. A list with three elements has the indices 0, 1 and 2; asking for number 3 raises this error. The usual causes are:\n\n- a loop that runs to `len(items)` inclusive: use `for item in items` instead;\n- a list that is empty because a file or an answer was;\n- an index from user input that was never checked.\n\nPrint `len(items)` and the index just before the line that fails."),),
    (("Summarise the plot of a detective story in three sentences, any story.", "A governess is paid far too well to cut her hair and to sit at a window in a blue dress. A detective finds that she stands in for a daughter who is locked up, so that a suitor outside believes the daughter has lost interest. The suitor frees her, the father is hurt by his own dog, and the governess later runs a school."),),
    (("How do I get a coffee stain out of a white shirt?", "Act while it is fresh. Rinse the stain from the back with cold water. Rub in a little washing-up liquid, wait ten minutes, rinse again. If a shadow is left, soak the shirt in warm water with oxygen bleach, as the packet says, and wash it. Do not use the dryer before the stain is gone: heat sets it."),),
    (("I can't decide whether to learn Python or JavaScript first.", "Ask what you want to make. If it should run in a browser, take JavaScript: you see something on the page on the first day. If it is about data, automation or science, take Python: its syntax is smaller and its error messages are kinder. The second language takes a quarter of the time that the first one does, so there is no wrong choice, only a late one."), ("It's about data, I think.", "Then Python. Begin with lists, dictionaries and files; after two weeks take a table of your own, such as your bank statements, and answer one question about it with `csv` and a loop. Add pandas after that, when you know what it saves you.")),
    (("What's the weather in Lisbon right now?", "I cannot look that up: I have no connection to live data. A weather service or your phone will tell you. I can say what is usual for a month, if you tell me which one."), ("October then.", "October in Lisbon is mild: usually between about 15 and 23 degrees Celsius, with some rainy days towards the end of the month. A light jacket for the evenings is enough.")),
)  # fmt: skip


def spoken(text: str) -> str:
    """A field of the Factbook as a sentence or a list."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if len(lines) > 1:
        return "\n".join(f"- {line}" for line in lines[:12])
    line = lines[0]
    return line[:1].upper() + line[1:] + ("" if line.endswith((".", "!", "?", ")")) else ".")


def about_a_country(r: random.Random, name: str, profile: Profile) -> list[Exercise]:
    """Two to four questions about one country."""
    known = [(section, field, ways) for section, field, ways in ASKED if field in profile.get(section, {})]
    turns = []
    for section, field, ways in r.sample(known, min(len(known), r.randint(2, 4))):
        turns.append((r.choice(ways).format(c=name), spoken(profile[section][field])[:1800]))
    capital = re.search(r"name: ([^\n;(]+)", profile.get("Government", {}).get("Capital", ""))
    if capital and r.random() < 0.5:
        turns.insert(0, (f"What is the capital of {name}?", f"The capital of {name} is {capital[1].strip()}."))
    return turns


def table(r: random.Random, countries: Sequence[tuple[str, Profile]]) -> list[Exercise]:
    """Figures of some countries as a table, then in other formats."""
    rows = []
    for name, profile in r.sample(list(countries), 12):
        area = re.search(r"total ?: ([\d,]+) sq km", profile.get("Geography", {}).get("Area", ""))
        coast = re.search(r"([\d,]+) km", profile.get("Geography", {}).get("Coastline", ""))
        if area and coast:
            rows.append({"country": name, "area_km2": int(area[1].replace(",", "")), "coastline_km": int(coast[1].replace(",", ""))})
    rows = rows[: r.randint(3, 5)]
    if len(rows) < 3:
        return []
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    marked = "| country | area in km² | coastline in km |\n|---|---:|---:|\n" + "\n".join(
        f"| {row['country']} | {row['area_km2']:,} | {row['coastline_km']:,} |" for row in rows
    )
    largest = max(rows, key=lambda row: row["area_km2"])
    return [
        (f"Turn this into a Markdown table:\n\n{out.getvalue()}", marked),
        ("And as JSON, please.", f"```json\n{json.dumps(rows, indent=2, ensure_ascii=False)}\n```"),
        ("Which of them is the largest?", f"{largest['country']}, with {largest['area_km2']:,} square kilometres."),
    ]


def translation(r: random.Random, english: Sequence[str], parallel: Mapping[str, Sequence[str]]) -> list[Exercise]:
    """Articles of the Declaration into other languages, and back."""
    turns = []
    for language in r.sample(sorted(parallel), r.randint(1, 3)):
        articles = parallel[language]
        if len(articles) != len(english):
            continue
        at = r.randrange(len(english))
        one, other = (text.partition("\n\n")[2] or text for text in (english[at], articles[at]))
        if r.random() < 0.6:
            turns.append((f"Translate into {language}:\n\n{one}", other))
        else:
            turns.append((f"What does this mean in English?\n\n{other}", one))
    return turns


def programming(r: random.Random) -> list[Exercise]:
    """A function, its results, and a test."""
    what, code, calls = r.choice(CODE)
    scope: dict[str, Any] = {}
    exec(code, scope)  # our own, from CODE
    shown = "\n".join(f">>> {call}\n{eval(call, scope)!r}" for call in calls)
    ask = r.choice(
        (
            "Write a Python function that {w}.",
            "I need a function in Python which {w}.",
            "python: {w}?",
            "How would you write something that {w}, in Python?",
        )
    )
    turns = [(ask.format(w=what), f"```python\n{code}```\n\nFor example:\n\n```\n{shown}\n```")]
    if r.random() < 0.6:
        name = re.findall(r"def (\w+)", code)[0]
        tests = "\n".join(f"    assert {call} == {eval(call, scope)!r}" for call in calls)
        turns.append((r.choice(("Add a test.", "Now a pytest for it, please.")), f"```python\ndef test_{name}():\n{tests}\n```"))
    return turns


def sums(r: random.Random) -> list[Exercise]:
    """One to three exercises."""
    return [r.choice(EXERCISES)(r) for _ in range(r.randint(1, 3))]


def dialogues(
    r: random.Random,
    countries: Sequence[tuple[str, Profile]],
    english: Sequence[str],
    parallel: Mapping[str, Sequence[str]],
    *,
    characters: int,
) -> list[list[Message]]:
    """Conversations of all kinds in turn, so many characters together."""
    made: list[list[Message]] = []
    size, by_hand = 0, [list(turns) for turns in PLAIN]
    while size < characters:
        kind = len(made) % 8
        if kind in (0, 4):
            turns = about_a_country(r, *r.choice(countries))
        elif kind in (1, 5):
            turns = programming(r)
        elif kind in (2, 6):
            turns = sums(r)
        elif kind == 3:
            turns = translation(r, english, parallel)
        else:
            turns = by_hand.pop() if by_hand and r.random() < 0.6 else table(r, countries)
        turns = turns or sums(r)
        messages = [{"role": "system", "content": r.choice(SYSTEM)}] if r.random() < 0.4 else []
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        made.append(messages)
        size += sum(len(message["content"]) for message in messages)
    return made

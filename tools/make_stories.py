"""Write stories in plain words, of a small grammar: text that models of a few million weights can learn in a minute.

Who takes part, what is wanted, lost, found and said is drawn for each story; names and things come back through it, so that a model must
look at what stands before. A test bed for speculation needs a draft model that often agrees with its target, as models of a family do on
everyday text, and a minute is too short for that on books.

    python tools/make_stories.py 12000000 stories.txt            # characters; the same ones for the same seed
    python tools/make_stories.py 300000 unseen.txt --seed 1
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

GIRLS = ["Anna", "Clara", "Ella", "Ida", "Jane", "Lucy", "Mary", "Nora", "Rosa", "Sara", "Tilda", "Vera"]
BOYS = ["Adam", "Ben", "Carl", "David", "Emil", "Hugo", "Jack", "Leo", "Max", "Oscar", "Peter", "Tom"]
BEASTS = ["cat", "dog", "duck", "fox", "goat", "hare", "hen", "horse", "mouse", "owl", "pig", "sheep"]
PLACES = ["barn", "forest", "garden", "harbour", "hill", "lake", "market", "meadow", "mill", "old bridge", "river", "village"]
THINGS = ["ball", "bell", "blue cup", "boat", "book", "drum", "golden key", "hat", "kite", "lamp", "red scarf", "ring"]
COLOURS = ["black", "brown", "grey", "red", "white", "yellow"]
WEATHER = ["The sun was shining.", "It was raining.", "A cold wind was blowing.", "There was snow on the roofs.", "The sky was clear."]
MOODS = ["very happy", "a little sad", "quite tired", "very curious"]
FOODS = ["apples", "bread and cheese", "a warm soup", "pancakes", "a big cake"]

OPENINGS = [
    "Once upon a time there was a {kind} named {name}. {He} lived near the {place} with {his} {colour} {beast}.",
    "{name} was a {kind} who lived in a small house by the {place}. {He} had a {colour} {beast}, and the {beast} was {his} best friend.",
    "In a small house by the {place} lived a {kind} called {name}. Every day {he} played with {his} {colour} {beast}.",
]
WISHES = [
    "{name} had a {thing}, and {he} took it everywhere.",
    "The thing that {name} liked most was {his} {thing}.",
    "On {his} birthday {name} got a {thing}.",
]
LOSSES = [
    'One day {name} went to the {other} with the {beast}. {weather} When they came home, the {thing} was gone. "Where is it?" said {name}.',
    '{weather} {name} and the {beast} walked to the {other}, and there {he} lost {his} {thing}. "Oh no, my {thing}!" said {name}.',
    "One morning {name} could not find {his} {thing}. {He} looked under the bed and behind the door, but the {thing} was not there.",
]
MEETINGS = [
    'Then {name} met {friend}. "What is wrong?" asked {friend}. "I have lost my {thing}," said {name}. "I will help you," said {friend}.',
    '{name} was {mood}. {friend} came by and said, "Let us look for the {thing} together." So {name} and {friend} went to the {third}.',
    '{name} asked {friend} for help. "Have you seen my {thing}?" {friend} shook {her} head, but {she} went with {name} to the {third}.',
]
SEARCHES = [
    "They looked in the {third}, but they did not find the {thing}. Then they looked in the {other}. The {beast} ran ahead.",
    "They looked for a long time. {weather} The {beast} ran to the {third} and began to dig.",
    "{friend} looked behind the {third}, and {name} looked near the {other}. Only the {beast} knew where the {thing} was.",
]
FINDS = [
    'At last the {beast} found the {thing} under a tree. "Good {beast}!" said {name}.',
    'And there, near the {third}, was the {thing}. "Look, the {beast} has found it!" said {friend}.',
    '"Here it is!" said {friend}. The {thing} was in the grass, and the {beast} was sitting beside it.',
]
ENDINGS = [
    "{name} thanked {friend}, and they all went home and ate {food}. From that day on {name} and {friend} were friends.",
    "{name} was very happy. {He} gave the {beast} a kiss, and in the evening {name} and {friend} ate {food}. The end.",
    "So {name} had {his} {thing} again. {friend} and the {colour} {beast} stayed for supper, and there was {food}. The end.",
]
PARTS = OPENINGS, WISHES, LOSSES, MEETINGS, SEARCHES, FINDS, ENDINGS


def story(chance: random.Random) -> str:
    """One story."""
    girl, other_girl = chance.random() < 0.5, chance.random() < 0.5
    name = chance.choice(GIRLS if girl else BOYS)
    friend = chance.choice([one for one in (GIRLS if other_girl else BOYS) if one != name])
    place, other, third = chance.sample(PLACES, 3)
    words = {"name": name, "friend": friend, "place": place, "other": other, "third": third}
    words |= {"kind": "girl" if girl else "boy", "he": "she" if girl else "he", "his": "her" if girl else "his"}
    words |= {"He": "She" if girl else "He", "she": "she" if other_girl else "he", "her": "her" if other_girl else "his"}
    drawn = {"beast": BEASTS, "thing": THINGS, "colour": COLOURS, "mood": MOODS, "food": FOODS}
    words |= {key: chance.choice(choices) for key, choices in drawn.items()}
    return " ".join(chance.choice(part).format(**words, weather=chance.choice(WEATHER)) for part in PARTS)


def stories(characters: int, seed: int = 0) -> Iterator[str]:
    """Stories of so many characters together, at least."""
    chance, written = random.Random(seed), 0
    while written < characters:
        text = story(chance)
        written += len(text) + 2
        yield text


def main(argv: list[str] | None = None) -> int:
    """Write them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("characters", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.out.write_text("\n\n".join(stories(args.characters, args.seed)) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
